"""What the trainer tests share: small conversations of skewed lengths, a tiny model, and gradients by hand."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from transformers import TrainerCallback

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.quickstart.tiny import byte_tokenizer

VOCAB_SIZE = 272
LORA = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "init_lora_weights": False,
}


def conversations(number: int = 24, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    words = ["packed", "row", "of", "samples", "ends", "here", "and", "leaks", "nothing"]

    def text(most: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, most)))

    return [
        {
            "messages": [
                {"role": "user", "content": text(4)},
                {"role": "assistant", "content": text(rng.choice([3, 20]))},
            ]
        }
        for _ in range(number)
    ]


def prompt_completions(number: int = 24, seed: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": c["messages"][:1], "completion": c["messages"][1:]} for c in conversations(number, seed)]


def settings(output_dir: Any, **overrides: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "max_length": 256,
        "seed": 3,
        **overrides,
    }


def model_of(attn_implementation: str = "varlen", model_type: str = "llama", **overrides: Any) -> Any:
    if attn_implementation == "varlen":
        from trl_packing import register_ops

        register_ops()
    return tiny_model(model_type, attn_implementation=attn_implementation, vocab_size=VOCAB_SIZE, **overrides)


def tokens_of(*lengths: int) -> Dataset:
    """Random samples of these lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 250, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{"input_ids": row} for row in rows])


def packed_trainer(
    output_dir: Any,
    data: list[dict[str, Any]] | Dataset,
    *,
    model: Any = None,
    lora: bool | str | list[str] = False,
    eval_data: Any = None,
    callbacks: Any = None,
    compute_metrics: Any = None,
    **overrides: Any,
) -> PackedSFTTrainer:
    return PackedSFTTrainer(
        model=model_of() if model is None else model,
        args=PackedSFTConfig(**settings(output_dir, **overrides)),
        train_dataset=as_dataset(data),
        eval_dataset=None if eval_data is None else as_dataset(eval_data),
        processing_class=byte_tokenizer(),
        peft_config=lora_config(lora) if lora else None,
        callbacks=callbacks,
        compute_metrics=compute_metrics,
    )


def lora_config(targets: bool | str | list[str]) -> LoraConfig:
    return LoraConfig(**{**LORA, **({} if targets is True else {"target_modules": targets})})


def as_dataset(data: Any) -> Any:
    return Dataset.from_list(data) if isinstance(data, list) else data


def plain_copy(model: Any, lora: Any) -> Any:
    """An eager copy without TRL's fused head, whose closure would keep pointing at the trained model."""
    copy = model_of("eager")
    if lora:
        copy = get_peft_model(copy, lora_config(lora))
    copy.load_state_dict(model.state_dict())
    return copy


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimiser step, before clipping changes them if `max_grad_norm` is 0."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = model.named_parameters()
        self.steps.append({name: param.grad.clone() for name, param in named if param.grad is not None})


def gradients_alone(model: Any, samples: list[dict[str, Any]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of samples run one by one through the plain model, weighted by predicted tokens."""
    total, sums = 0, 0.0
    model.zero_grad()
    model.train()
    for sample in samples:
        input_ids, labels = (torch.tensor([list(sample[name])]) for name in ("input_ids", "labels"))
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = F.cross_entropy(logits[0, :-1].float(), labels[0, 1:], ignore_index=-100, reduction="sum")
        loss.backward()
        sums += float(loss.detach())
        total += int((labels[0, 1:] != -100).sum())
    gradients = {name: param.grad / total for name, param in model.named_parameters() if param.grad is not None}
    return sums / total, gradients


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Largest difference of two sets of gradients, as a share of the largest gradient."""
    assert first.keys() == second.keys()
    largest = max(float(gradient.abs().max()) for gradient in second.values())
    return max(float((first[name] - second[name]).abs().max()) for name in first) / largest


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
