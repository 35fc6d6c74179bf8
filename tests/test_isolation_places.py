"""Faults of one pair of segments, one head, one place or one direction are caught; what only looks like one is not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from trl_packing import check_isolation


def leak_from(source: int, target: int, lengths: tuple[int, ...], strength: float = 1e-2) -> Callable[..., Any]:
    """Add a mean of the source segment's outputs to the target's, in the forward pass only."""
    offsets = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    spans = [slice(offsets[segment], offsets[segment + 1]) for segment in (source, target)]

    def hook(module: nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        changed = output[0].clone()
        changed[:, spans[1]] += strength * output[0][:, spans[0]].mean(dim=1, keepdim=True).detach()
        return changed, *output[1:]

    return hook


@pytest.mark.parametrize("lengths", [(67, 1, 5, 70), (5, 1, 67), (3, 1, 4, 1, 9)], ids=["seg4", "seg3", "seg5"])
def test_leak_between_any_two_segments_is_caught_in_either_direction(lengths):
    model = tiny_model("llama")
    for source, target in permutations(range(len(lengths)), 2):
        handle = model.model.layers[1].self_attn.register_forward_hook(leak_from(source, target, lengths))
        report = check_isolation(model, lengths=lengths)
        handle.remove()
        leaks = [(leak.name, leak.source, leak.target) for leak in report.layers]
        assert leaks == [("model.layers.1.self_attn", source, target)]
        assert report.influence[source, target] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_leak_in_the_last_head_of_the_last_layer_is_caught(dtype):
    # In bf16 it moves the layer's output by less than two roundings would. Attention has no reason to move at all.
    model = tiny_model("llama", dtype, num_hidden_layers=6)

    def leak(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        heads = args[0].clone()
        heads[:, 68:, -16:] += 1e-2 * heads[:, :67, -16:].mean(dim=1, keepdim=True).detach()
        return (heads,)

    model.model.layers[-1].self_attn.o_proj.register_forward_pre_hook(leak)
    report = check_isolation(model)
    assert [leak.name for leak in report.layers] == ["model.layers.5.self_attn"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_leak_into_what_follows_a_segments_first_chunk_is_caught(dtype):
    model = tiny_model("llama", dtype)

    def leak(module: nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        late = torch.arange(output[0].shape[1])[:, None] >= 73 + 64
        leaked = output[0] + 1e-2 * output[0][:, :67].mean(dim=1, keepdim=True).detach()
        return torch.where(late, leaked, output[0]), *output[1:]

    model.model.layers[1].self_attn.register_forward_hook(leak)
    report = check_isolation(model)
    assert [(leak.name, leak.target) for leak in report.layers] == [("model.layers.1.self_attn", 3)]


def test_layer_that_looks_ahead_within_each_segment_is_no_leak():
    model = tiny_model("llama")

    def look_ahead(module: nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        lengths = [67, 1, 5, 70] if output[0].shape[1] == 143 else [output[0].shape[1]]
        parts = output[0].split(lengths, dim=1)
        return torch.cat([part + part.mean(dim=1, keepdim=True) for part in parts], dim=1), *output[1:]

    model.model.layers[1].self_attn.register_forward_hook(look_ahead)
    report = check_isolation(model)
    assert report.ok, report.to_text()
    assert report.max_leak == 0.0


# Layers that share keys and values, logits that are capped until all but flat, scaled down, or scaled by a thousand.
SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@pytest.mark.parametrize("leaks", [False, True], ids=["exact", "leaking"])
@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("gemma2", {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 5.0}),
        ("cohere", {"logit_scale": 1e-4, "tie_word_embeddings": True}),
        ("granite", {"logits_scaling": 1000.0}),
        ("gemma3n_text", SHARED | {"activation_sparsity_pattern": [0.0] * 4}),
        ("gemma4_text", SHARED),
    ],
)
def test_heads_and_shared_keys_hide_nothing(model_type, overrides, leaks, varlen):
    model = tiny_model(model_type, attn_implementation=varlen, **overrides).eval()
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0.self_attn"))
    if leaks:
        layer.register_forward_hook(leak_from(0, 3, (67, 1, 5, 70)))
    report = check_isolation(model)
    assert report.ok is not leaks, report.to_text()
    assert (report.max_leak > 0) is leaks
    assert not model.training
