"""Mamba-2 and Mamba-1 scans beyond the common contract: transformers' numbers, options, groups, caches."""

import pytest
import torch
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from trl_packing import PackingError
from trl_packing.ops.mamba2_scan import mamba2_scan, naive_mamba2_scan
from trl_packing.ops.selective_scan import naive_selective_scan, selective_scan

LENGTHS = (5, 1, 70, 30, 3)
TOKENS = sum(LENGTHS)


def _mamba2(dtype=torch.float64, batch=1, heads=4, groups=2):
    torch.manual_seed(0)
    x, dt = torch.randn(batch, TOKENS, heads, 6), torch.randn(batch, TOKENS, heads)
    grouped = [torch.randn(batch, TOKENS, groups, 5) / 2 for _ in range(2)]
    return [tensor.to(dtype).requires_grad_() for tensor in (x, dt, -torch.rand(heads) - 0.1, *grouped)]


def _mamba1(dtype=torch.float64, batch=1):
    torch.manual_seed(0)
    x, dt = torch.randn(2, batch, 6, TOKENS)
    grouped = torch.randn(2, batch, 5, TOKENS) / 2
    return [tensor.to(dtype).requires_grad_() for tensor in (x, dt, -torch.rand(6, 5) - 0.1, *grouped)]


def _with_gradients(function, tensors):
    output = function(*tensors)
    torch.manual_seed(1)
    return output, *torch.autograd.grad(output, tensors, torch.randn(output.shape, dtype=output.dtype))


def _assert_same(ours, expected, rtol=1e-9, atol=1e-10):
    for left, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol)


def _per_segment(function, dim, x, dt, A, B, C):
    pieces = zip(*(tensor.split(LENGTHS, dim) for tensor in (x, dt, B, C)), strict=True)
    return torch.cat([function(x, dt, A, B, C) for x, dt, B, C in pieces], dim)


MAMBA2_OPTIONS = {
    "none": {},
    "softplus": {"dt_softplus": True},
    "bias-and-limit": {"dt_softplus": True, "dt_bias": torch.linspace(-1, 1, 4), "dt_limit": (0.2, 0.9)},
    "skip-per-head": {"dt_softplus": True, "D": torch.linspace(-1, 1, 4)},
}


@pytest.mark.parametrize("options", MAMBA2_OPTIONS.values(), ids=MAMBA2_OPTIONS)
def test_mamba2_definition_agrees_with_transformers(options):
    tensors = _mamba2(torch.float32, batch=2)
    expected = _with_gradients(lambda *x: mamba2_chunk_scan(*x, chunk_size=32, **options), tensors)
    ours = _with_gradients(lambda *x: naive_mamba2_scan(*x, **options), tensors)
    _assert_same(ours, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("options", MAMBA2_OPTIONS.values(), ids=MAMBA2_OPTIONS)
@pytest.mark.parametrize("chunk_size", [1, 7, 256])
def test_mamba2_row_takes_every_option_and_chunk_size(options, chunk_size):
    tensors = _mamba2()
    packed = _with_gradients(lambda *x: mamba2_scan(*x, chunk_size, lengths=LENGTHS, **options), tensors)
    alone = _with_gradients(
        lambda *x: _per_segment(lambda *piece: naive_mamba2_scan(*piece, **options), 1, *x), tensors
    )
    _assert_same(packed, alone)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_mamba2_groups_equal_repeated_heads(groups):
    x, dt, A, B, C = _mamba2(groups=groups)
    repeated = (tensor.repeat_interleave(4 // groups, dim=2) for tensor in (B, C))
    grouped = mamba2_scan(x, dt, A, B, C, lengths=LENGTHS)
    torch.testing.assert_close(grouped, mamba2_scan(x, dt, A, *repeated, lengths=LENGTHS), rtol=1e-9, atol=1e-10)


def test_mamba2_skip_per_channel_and_gate():
    x, dt, A, B, C = _mamba2()
    D, z = torch.randn(4, 6, dtype=torch.float64), torch.randn(x.shape, dtype=torch.float64)
    plain = mamba2_scan(x, dt, A, B, C, lengths=LENGTHS)
    both = mamba2_scan(x, dt, A, B, C, D=D, z=z, lengths=LENGTHS)
    torch.testing.assert_close(both, (plain + x * D) * torch.nn.functional.silu(z), rtol=1e-9, atol=1e-10)


def test_mamba1_definition_agrees_with_transformers():
    tensors = _mamba1(torch.float32, batch=2)
    options = {
        "D": torch.randn(6),
        "z": torch.randn(2, 6, TOKENS),
        "delta_bias": torch.randn(6),
        "delta_softplus": True,
    }
    expected = _with_gradients(lambda *x: mamba_selective_scan(*x, **options), tensors)
    ours = _with_gradients(lambda *x: naive_selective_scan(*x, **options), tensors)
    _assert_same(ours, expected, rtol=1e-4, atol=1e-5)


def test_mamba1_row_without_options():
    tensors = _mamba1()
    # Raw steps can be negative; a scan that grows is no scan.
    tensors[1] = tensors[1].detach().abs().requires_grad_()
    packed = _with_gradients(lambda *x: selective_scan(*x, lengths=LENGTHS), tensors)
    alone = _with_gradients(lambda *x: _per_segment(naive_selective_scan, -1, *x), tensors)
    _assert_same(packed, alone)


@pytest.mark.parametrize("cache", [{"return_final_states": True}, {"initial_states": torch.zeros(1, 4, 6, 5)}])
def test_mamba2_refuses_a_cache(cache):
    with pytest.raises(PackingError, match="use_cache=False"):
        mamba2_scan(*_mamba2(), lengths=LENGTHS, **cache)


def test_mamba1_refuses_a_cache():
    with pytest.raises(PackingError, match="use_cache=False"):
        selective_scan(*_mamba1(), return_last_state=True, lengths=LENGTHS)


def test_mamba2_refuses_heads_that_are_no_multiple_of_the_groups():
    with pytest.raises(PackingError, match="4 heads and 3 groups"):
        mamba2_scan(*_mamba2(groups=3), lengths=LENGTHS)
