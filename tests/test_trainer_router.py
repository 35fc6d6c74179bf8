"""The load-balancing loss of experts is that of TRL on the same samples, padded: real tokens only."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import TINY_TYPES, tiny_config, tiny_model
from training import VOCAB_SIZE, conversations, model_of, packed_trainer
from transformers.models.mixtral import modeling_mixtral
from trl.trainer.utils import add_fused_lm_head

COEF = 0.5


def trainer_of(output_dir: Any, model_type: str, attention: str = "varlen", **overrides: Any) -> Any:
    model = model_of(attention, model_type, **overrides.pop("config", {}))
    overrides = {"router_aux_loss_coef": COEF, "pad_to_multiple_of": 512, **overrides}
    return packed_trainer(output_dir, conversations(9), model=model, **overrides)


def rows_of(trainer: Any) -> list[dict[str, Any]]:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return list(trainer.get_train_dataloader())


def padded(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same samples, one per row of a right-padded batch."""
    lengths = row["row_info"].boundaries.lengths
    if row["row_info"].boundaries.num_alignment_tokens:
        lengths = lengths[:-1]
    columns = {"input_ids": 0, "labels": -100}
    batch = {}
    for name, pad in columns.items():
        parts = row[name][0, : sum(lengths)].split(list(lengths))
        batch[name] = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=pad)
    ones = [torch.ones(length, dtype=torch.long) for length in lengths]
    return batch | {"attention_mask": torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "qwen3_next", "qwen3_5_moe_text"])
def test_loss_and_gradients_are_those_of_trl_on_padded_samples(model_type: str, tmp_path: Any) -> None:
    trainer = trainer_of(tmp_path, model_type)
    row = rows_of(trainer)[0]
    assert row["row_info"].boundaries.num_alignment_tokens > 100
    num_targets = torch.tensor(row["row_info"].num_targets)
    loss = trainer.compute_loss(trainer.model, row, num_items_in_batch=num_targets)
    loss.backward()
    plain = tiny_model(model_type, attn_implementation="eager", vocab_size=VOCAB_SIZE)
    add_fused_lm_head(plain)
    outputs = plain(**padded(row), fused_lm_head=True, output_router_logits=True)
    aux = trainer._sums["train"].sums["aux"].item()
    assert aux == pytest.approx(outputs.aux_loss.item(), rel=1e-5)
    wanted = -outputs.log_probs.sum() / num_targets + COEF * outputs.aux_loss
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    wanted.backward()
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (name, ours), theirs in zip(trainer.model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert float((ours.grad - theirs.grad).abs().max()) <= 1e-4 * largest, name


# Every type of transformers that declares the weight of a balancing loss, under any name for the number of experts.
# Left out: types that are refused, and those without experts by default.
BALANCED = (
    "ernie4_5_moe",
    "flex_olmo",
    "flint",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "jamba",
    "laguna",
    "mellum",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen4_exp_text",
)
# Their configuration has no weight, so it is the user's to set.
ON_REQUEST = ("dbrx", "deepseek_v3", "jetmoe", "nemotron_h")


def definition(model: Any, samples: list[torch.Tensor]) -> float:
    """
    The balancing loss by its definition, over the tokens of samples that are run one by one.

    Mixtral's: over all layers and tokens, the share of tokens that choose an expert times its mean probability.
    """
    config = model.config.get_text_config()
    top_k = getattr(config, "num_experts_per_tok", None) or config.ffn_config.moe_top_k
    parts = []
    with torch.no_grad():
        for sample in samples:
            outputs = model(sample[None], use_cache=False, output_router_logits=True)
            parts += list(outputs.router_logits)
    probabilities = torch.cat(parts).softmax(-1)
    chosen = torch.nn.functional.one_hot(probabilities.topk(top_k).indices, probabilities.shape[-1]).float()
    return float((chosen.mean(0) * probabilities.mean(0)).sum() * probabilities.shape[-1])


@pytest.mark.parametrize("model_type", [name for name in (*BALANCED, *ON_REQUEST) if name in TINY_TYPES])
def test_the_loss_is_the_definition_over_real_tokens(model_type: str, tmp_path: Any) -> None:
    # Sparse attention of Qwen4 has a mask of its own.
    attention = "eager" if model_type == "qwen4_exp_text" else "varlen"
    trainer = trainer_of(tmp_path, model_type, attention)
    config = copy.deepcopy(trainer.model.config.to_dict())
    row = rows_of(trainer)[0]
    lengths = row["row_info"].boundaries.lengths[:-1]
    assert row["row_info"].boundaries.num_alignment_tokens > 100
    trainer.compute_loss(trainer.model, row)
    plain = tiny_model(model_type, attn_implementation="eager", vocab_size=VOCAB_SIZE)
    samples = row["input_ids"][0, : sum(lengths)].split(list(lengths))
    assert trainer._sums["train"].sums["aux"].item() == pytest.approx(definition(plain, samples), rel=1e-5)
    assert trainer.model.config.to_dict() == config


@pytest.mark.slow
def test_no_type_is_left_out() -> None:
    left_out = {"deepseek_v4", "doge", "llama4", "llama4_text", "minimax", "qwen3_5_moe", "qwen4_exp"}
    configs = {name: tiny_config(name).get_text_config() for name in TINY_TYPES}
    declared = {name for name, config in configs.items() if getattr(config, "router_aux_loss_coef", None)}
    assert declared == {*BALANCED, *left_out}


def test_a_model_without_a_layer_of_experts_has_none(tmp_path: Any) -> None:
    """As granite-4.0-h-micro: it declares a balancing loss and is dense. Stock TRL stops with an error."""
    trainer = trainer_of(tmp_path, "granitemoehybrid", config={"num_local_experts": 0}, max_steps=1)
    trainer.train()
    assert trainer.isolation_report.ok
    assert not any("aux_loss" in entry for entry in trainer.state.log_history)


def test_alignment_tokens_would_change_it(tmp_path: Any) -> None:
    trainer = trainer_of(tmp_path, "qwen3_moe")
    row = rows_of(trainer)[0]
    trainer.compute_loss(trainer.model, row)
    ours = trainer._sums["train"].sums.pop("aux").item()
    all_tokens = {key: value for key, value in row.items() if key != "row_info"}
    outputs = trainer.model(**all_tokens, fused_lm_head=True, output_router_logits=True)
    assert abs(ours - outputs.aux_loss.item()) > 1e-3


def test_a_filler_row_adds_no_balancing_loss_and_no_step_to_its_mean(tmp_path: Any) -> None:
    trainer = trainer_of(tmp_path, "qwen3_moe")
    filler = trainer.get_train_dataloader().collate_fn([])
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, filler, num_items_in_batch=torch.tensor(7))
    assert loss.item() == 0.0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())
    assert trainer._sums["train"].sums["micro_steps"] == 0
    assert trainer._sums["train"].sums["aux"].item() == 0.0


def test_the_function_is_put_back(tmp_path: Any) -> None:
    before = modeling_mixtral.load_balancing_loss_func
    trainer = trainer_of(tmp_path, "qwen3_moe")
    trainer.compute_loss(trainer.model, rows_of(trainer)[0])
    with pytest.raises(ValueError, match="input_ids"):
        trainer.compute_loss(trainer.model, {"row_info": rows_of(trainer)[0]["row_info"]})
    assert modeling_mixtral.load_balancing_loss_func is before
