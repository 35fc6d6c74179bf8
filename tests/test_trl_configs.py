"""
What `trl sft` accepts means the same here, setting by setting.

Without packing the losses are those of TRL's padded run, in its sample order; with packing each row's loss is that of
its samples in TRL's padded batch.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from training import (
    as_dataset,
    byte_tokenizer,
    conversations,
    lora_config,
    losses,
    model_of,
    prompt_completions,
    settings,
)
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.quickstart.tiny import CHAT_TEMPLATE

pytestmark = pytest.mark.slow

NUM_SAMPLES, STEPS = 44, 10
CHATS = conversations(NUM_SAMPLES)
TEXTS = [{"text": f"{first['content']} {second['content']}"} for first, second in (c["messages"] for c in CHATS)]
PLAIN_PAIRS = [{"prompt": c["messages"][0]["content"], "completion": c["messages"][1]["content"]} for c in CHATS]
SHAREGPT = [
    {"conversations": [{"from": "user", "value": a["content"]}, {"from": "assistant", "value": b["content"]}]}
    for a, b in (c["messages"] for c in CHATS)
]
SYSTEM = [{"messages": [{"role": "system", "content": "Be brief."}, *c["messages"]]} for c in CHATS]
TOKENS = [{"input_ids": byte_tokenizer()(sample["text"]).input_ids} for sample in TEXTS]
MASKED = [{**sample, "completion_mask": [0] * 2 + [1] * (len(sample["input_ids"]) - 2)} for sample in TOKENS]
ONE = {"per_device_train_batch_size": 1}

# Name: data, settings of `trl sft`.
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    # data
    "conversations": (CHATS, {}),
    "system_turn": (SYSTEM, {"assistant_only_loss": True}),
    "sharegpt": (SHAREGPT, {}),
    "prompt_completion": (prompt_completions(NUM_SAMPLES), {}),
    "prompt_completion_whole": (prompt_completions(NUM_SAMPLES), {"completion_only_loss": False}),
    "plain_pairs": (PLAIN_PAIRS, {"completion_only_loss": True}),
    "text": (TEXTS, {}),
    "text_field": ([{"body": sample["text"]} for sample in TEXTS], {"dataset_text_field": "body"}),
    "tokens": (TOKENS, {}),
    "tokens_unprepared": (TOKENS, {"dataset_kwargs": {"skip_prepare_dataset": True}}),
    "completion_mask": (MASKED, {}),
    # tokens
    "assistant_only": (CHATS, {"assistant_only_loss": True}),
    "eos_token": (TEXTS, {"eos_token": "<|im_start|>"}),
    "pad_token": (TEXTS, {"pad_token": "<|im_start|>"}),
    "chat_template_path": (CHATS, {"chat_template_path": "shout.jinja"}),
    "max_length": (CHATS, {"max_length": 48}),
    "keep_end": (CHATS, {"max_length": 48, "truncation_mode": "keep_end", "assistant_only_loss": True}),
    "pad_to_multiple_of": (CHATS, {"pad_to_multiple_of": 16}),
    # steps
    "accumulation": (CHATS, {"gradient_accumulation_steps": 3, **ONE}),
    "accumulation_masked": (CHATS, {"gradient_accumulation_steps": 4, "assistant_only_loss": True, **ONE}),
    "sequential": (CHATS, {"train_sampling_strategy": "sequential"}),
    "data_seed": (CHATS, {"data_seed": 17}),
    "logging_every_5": (CHATS, {"logging_steps": 5}),
    "without_first_step": (CHATS, {"logging_first_step": True, "logging_steps": 4}),
    # optimisation
    "cosine_warmup": (CHATS, {"lr_scheduler_type": "cosine", "warmup_steps": 0.3}),
    "scheduler_kwargs": (
        CHATS,
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}, "warmup_steps": 2},
    ),
    "weight_decay": (CHATS, {"weight_decay": 0.3, "adam_beta2": 0.95, "adam_epsilon": 1e-6}),
    "adafactor": (CHATS, {"optim": "adafactor"}),
    "sgd_unclipped": (CHATS, {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0}),
    # loss
    "dft": (CHATS, {"loss_type": "dft"}),
    "smoothing": (CHATS, {"label_smoothing_factor": 0.1}),
    # A batch of one has no pads, so that the scale of the noise is the sample's in TRL too.
    "neftune": (CHATS, {"neftune_noise_alpha": 5.0, **ONE}),
    # model
    "checkpointing": (CHATS, {"gradient_checkpointing": True}),
    "lora": (CHATS, {"peft_config": True}),
    "lora_checkpointing": (CHATS, {"peft_config": True, "gradient_checkpointing": True, "assistant_only_loss": True}),
    # evaluation between the steps
    "evaluation": (CHATS, {"eval_strategy": "steps", "eval_steps": 4}),
}
# Here rows are not what TRL batches: an order of its own, noise, evaluation, or only the optimiser differs.
UNPACKED_ONLY = {"sequential", "neftune", "evaluation"}


def build(trainer_class: Any, config_class: Any, name: str, folder: Path, **overrides: Any) -> Any:
    data, changes = CASES[name]
    changes = copy.deepcopy(changes) | overrides
    lora = changes.pop("peft_config", False)
    if "chat_template_path" in changes:
        template = folder / changes["chat_template_path"]
        template.write_text(CHAT_TEMPLATE.replace("message['role'] + '", "message['role'] | upper + '!"))
        changes["chat_template_path"] = str(template)
    evaluates = "eval_strategy" in changes
    trainer = trainer_class(
        model=model_of("sdpa" if trainer_class is SFTTrainer else "varlen"),
        args=config_class(**settings(folder, **{"max_steps": STEPS, **changes})),
        train_dataset=as_dataset(data),
        eval_dataset=Dataset.from_list(data[:9]) if evaluates else None,
        processing_class=byte_tokenizer(),
        peft_config=lora_config(True) if lora else None,
    )
    if lora:
        # Not from the global generator, which TRL's sampler draws its order from.
        generator = torch.Generator().manual_seed(0)
        for parameter in (p for p in trainer.model.parameters() if p.requires_grad):
            parameter.data.normal_(std=0.1, generator=generator)
    return trainer


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*label_smoothing_factor:FutureWarning")
def test_losses_are_trls(name: str, tmp_path: Path) -> None:
    stock = build(SFTTrainer, SFTConfig, name, tmp_path)
    start = copy.deepcopy(stock.model.state_dict())
    stock.train()
    ours = build(PackedSFTTrainer, PackedSFTConfig, name, tmp_path)
    ours.train()
    assert len(losses(stock)) >= 2
    assert losses(ours) == pytest.approx(losses(stock), abs=1e-4)
    for key in ("learning_rate", "num_tokens"):
        for entry, expected in zip(ours.state.log_history, stock.state.log_history, strict=True):
            assert entry.get(key) == pytest.approx(expected.get(key)), key
    assert losses(ours)[0] != pytest.approx(losses(ours)[-1], abs=1e-4)
    if name in UNPACKED_ONLY:
        return
    budget = {"packing": True, "token_budget": 400, "isolation_check": "off"}
    packed = build(PackedSFTTrainer, PackedSFTConfig, name, tmp_path, **budget)
    stock.model.load_state_dict(start)
    for trainer in (stock, packed):
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
    fragments = packed._train_plan.fragments().fragments
    seen: list[int] = []
    for row in packed.get_train_dataloader():
        numbers = fragments[list(row["row_info"].fragments), 0].tolist()
        batch = stock.data_collator([stock.train_dataset[number] for number in numbers])
        with torch.no_grad():
            loss, expected = packed.compute_loss(packed.model, row), stock.compute_loss(stock.model, batch)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
        seen += numbers
    assert sorted(seen) == [*range(NUM_SAMPLES)]


def test_neftune_scales_by_the_samples_own_length(tmp_path: Path) -> None:
    """Noise of alpha / sqrt(tokens x width) at most, for each sample as if it ran alone, and none in evaluation."""
    trainer = build(PackedSFTTrainer, PackedSFTConfig, "conversations", tmp_path, neftune_noise_alpha=5.0)
    seen = []
    trainer.model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    row = next(iter(trainer.get_train_dataloader()))
    trainer.current_gradient_accumulation_steps = 1
    for training in (True, False):
        trainer.model.train(training)
        trainer.compute_loss(trainer.model, row)
    lengths = row["row_info"].boundaries.lengths
    assert len(lengths) == 4
    for noisy, plain in zip(*(hidden[0].split(list(lengths)) for hidden in seen), strict=True):
        bound = 5.0 / (noisy.numel() ** 0.5)
        largest = float((noisy - plain).abs().max())
        assert 0.98 * bound < largest <= bound * (1 + 1e-5)
