"""Hybrid models keep the segments of a packed row apart: the same numbers as the samples alone, off CUDA too."""

from __future__ import annotations

import copy

import pytest
import torch
from comparing import (
    alone_logits,
    gradients_of,
    largest_difference,
    largest_foreign_gradient,
    largest_influence,
    packed_logits,
    relative_difference,
    summed_loss,
    token_ids,
)
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from torch import nn

from trl_packing import register_ops

# Shorter than the convolution, one token, and longer than the chunks of every scan (64 at most).
LENGTHS = (11, 6, 1, 70, 9)

# Those that issue 3 names. The rest share their operations, or need a relay.
HYBRIDS = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "bamba",
    "granitemoehybrid",
    "falcon_h1",
    "nemotron_h",
    "zamba2",
    "olmo_hybrid",
    "lfm2",
    "lfm2_moe",
    "kimi_linear",
)
RELATIVES = ("bailing_hybrid", "qwen4_exp_text", "mamba", "mamba2", "falcon_mamba", "jamba", "zamba", "inkling_text")
# A change of tokens changes how tokens are grouped by expert, and so the order of sums.
EXPERTS = {
    "qwen3_next",
    "qwen3_5_moe_text",
    "granitemoehybrid",
    "nemotron_h",
    "lfm2_moe",
    "kimi_linear",
    "bailing_hybrid",
    "qwen4_exp_text",
    "jamba",
    "inkling_text",
}
# transformers builds their attention mask without positions, so that only an attention that reads boundaries is exact.
MASK_WITHOUT_POSITIONS = {"granitemoehybrid"}


def hybrid(model_type: str, attention: str | None = "varlen") -> nn.Module:
    register_ops()
    model = tiny_model(model_type, attn_implementation=attention)
    register_ops(model)
    return model


def assert_packed_equals_alone(model: nn.Module, reference: nn.Module | None = None) -> None:
    reference = model if reference is None else reference
    ids = token_ids(LENGTHS)
    assert relative_difference(packed_logits(model, ids, LENGTHS), alone_logits(reference, ids, LENGTHS)) < 1e-5
    packed = gradients_of(model, lambda: summed_loss(packed_logits(model, ids, LENGTHS), ids, LENGTHS))
    alone = gradients_of(reference, lambda: summed_loss(alone_logits(reference, ids, LENGTHS), ids, LENGTHS))
    assert largest_difference(packed, alone) < 1e-5


def assert_isolated(model_type: str, model: nn.Module) -> None:
    ids = token_ids(LENGTHS)
    influence = largest_influence(model, ids, LENGTHS)
    assert influence < 1e-6 if model_type in EXPERTS else influence == 0.0
    assert largest_foreign_gradient(model, ids, LENGTHS) == 0.0


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_packed_row_equals_samples_alone(model_type: str, attention: str) -> None:
    model = hybrid(model_type, attention)
    if model_type in MASK_WITHOUT_POSITIONS and attention != "varlen":
        assert largest_influence(model, token_ids(LENGTHS), LENGTHS) > 1e-3
        return
    assert_packed_equals_alone(model)
    assert_isolated(model_type, model)


@pytest.mark.parametrize("model_type", RELATIVES)
def test_relatives_equal_samples_alone(model_type: str) -> None:
    model = hybrid(model_type, None)
    assert_packed_equals_alone(model)
    assert_isolated(model_type, model)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_rows_without_boundaries_do_mix(model_type: str) -> None:
    model, ids = hybrid(model_type), token_ids(LENGTHS)
    mixed = model(input_ids=ids, use_cache=False).logits
    assert relative_difference(mixed, alone_logits(model, ids, LENGTHS)) > 1e-2


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize("model_type", [*HYBRIDS, "mamba", "mamba2", "jamba", "zamba"])
def test_gradient_checkpointing_changes_no_gradient(model_type: str, reentrant: bool) -> None:
    model = hybrid(model_type, "varlen" if model_type in HYBRIDS else None)
    ids = token_ids(LENGTHS)
    plain = gradients_of(model, lambda: summed_loss(packed_logits(model, ids, LENGTHS), ids, LENGTHS))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    replayed = gradients_of(model, lambda: summed_loss(packed_logits(model, ids, LENGTHS), ids, LENGTHS))
    assert largest_difference(replayed, plain) < 1e-6


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_adapters_get_the_gradients_of_samples_alone(model_type: str) -> None:
    targets = r".*\.(in_proj\w*|q_proj|k_proj|v_proj)"
    model = get_peft_model(hybrid(model_type), LoraConfig(r=4, target_modules=targets, lora_dropout=0.0))
    # B starts at zero, where A gets no gradient and the adapter has no say.
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    assert_packed_equals_alone(model)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_evaluation_mode_equals_samples_alone(model_type: str) -> None:
    assert_packed_equals_alone(hybrid(model_type).eval())


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_bfloat16_differs_by_its_own_noise(model_type: str) -> None:
    model, ids = hybrid(model_type), token_ids(LENGTHS)
    exact = packed_logits(model, ids, LENGTHS)
    low = copy.deepcopy(model).bfloat16()
    packed, alone = packed_logits(low, ids, LENGTHS).float(), alone_logits(low, ids, LENGTHS).float()
    # The median over tokens: where a router's two best experts nearly tie, rounding sends the token to another one.
    error, noise = ((logits - exact).square().mean(-1).median() for logits in (packed, alone))
    assert error < 1.25 * noise
