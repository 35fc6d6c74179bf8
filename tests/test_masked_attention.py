"""Attention from offsets on the device against its definition, and against the form with host lengths."""

import pytest
import torch
from test_attention import LAYOUTS, OPTIONS, heads, options_of, per_segment

from trl_packing import Boundaries
from trl_packing.ops import masked_attention as module
from trl_packing.ops.attention import segment_attention, split_into_chunks
from trl_packing.ops.masked_attention import masked_attention


def offsets(lengths, repeats=0):
    return Boundaries(tuple(lengths), num_offsets=len(lengths) + 1 + repeats).cu_seqlens


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("lengths", LAYOUTS, ids=lambda lengths: "seg" + "-".join(map(str, lengths)))
@pytest.mark.parametrize("repeats", [0, 3], ids=lambda repeats: f"tail{repeats}")
def test_masked_attention_equals_the_definition_per_segment(lengths, option, repeats):
    options = options_of(option, torch.float64)
    inputs = heads(sum(lengths), torch.float64)
    weights = torch.randn(1, 4, sum(lengths), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fast = masked_attention(*inputs, offsets(lengths, repeats), max(lengths), **options)
    expected = per_segment(*inputs, lengths, **options)
    torch.testing.assert_close(fast, expected, rtol=1e-9, atol=1e-10)
    gradients = torch.autograd.grad((fast * weights).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("bound", [20, 27, None], ids=str)
def test_any_bound_that_holds_the_longest_segment_gives_the_same(bound, monkeypatch):
    """With blocks far shorter than a segment, whose keys the bound limits."""
    monkeypatch.setattr(module, "_QUERY_BLOCK", 2)
    lengths = [5, 1, 20, 1]
    inputs = heads(27, torch.float64)
    expected = per_segment(*inputs, lengths)
    torch.testing.assert_close(masked_attention(*inputs, offsets(lengths), bound), expected, rtol=1e-9, atol=1e-10)


def test_chunks_are_cut_inside_segments():
    lengths = [11, 6, 1, 9]
    inputs = heads(27, torch.float64)
    expected = segment_attention(*inputs, split_into_chunks(lengths, 4))
    fast = masked_attention(*inputs, offsets(lengths), 11, chunk=4)
    torch.testing.assert_close(fast, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("option", ["causal", "window", "softcap", "sinks"])
def test_another_segment_moves_nothing_not_by_a_bit(option):
    options = options_of(option, torch.float32)
    inputs = [tensor.detach() for tensor in heads(27, torch.float32)]
    moved = [tensor.clone() for tensor in inputs]
    for tensor in moved:
        tensor[:, :, 11:17] += 1.0
    before, after = (masked_attention(*tensors, offsets([11, 6, 1, 9]), 11, **options) for tensors in (inputs, moved))
    assert torch.equal(before[:, :, :11], after[:, :, :11])
    assert torch.equal(before[:, :, 17:], after[:, :, 17:])
    assert not torch.equal(before[:, :, 11:17], after[:, :, 11:17])
