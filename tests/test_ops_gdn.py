"""Gated delta rule and Kimi delta attention beyond the common contract: transformers' numbers, heads, chunks."""

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from trl_packing import PackingError
from trl_packing.ops.gated_delta_rule import gated_delta_rule, naive_gated_delta_rule
from trl_packing.ops.kda import kimi_delta_attention, naive_kimi_delta_attention

LENGTHS = (5, 1, 70, 30, 3)
TOKENS = sum(LENGTHS)
OPS = {"gdn": (gated_delta_rule, naive_gated_delta_rule), "kda": (kimi_delta_attention, naive_kimi_delta_attention)}
each_op = pytest.mark.parametrize("name", OPS)


def _inputs(name, dtype=torch.float64, batch=1, key_heads=2, value_heads=2):
    torch.manual_seed(0)
    shapes = [(key_heads, 8), (key_heads, 8), (value_heads, 6)]
    tensors = [torch.randn(batch, TOKENS, *shape) for shape in shapes]
    channels = (8,) if name == "kda" else ()
    tensors += [-torch.rand(batch, TOKENS, value_heads, *channels), torch.rand(batch, TOKENS, value_heads)]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def _with_gradients(function, tensors):
    output = function(*tensors)
    torch.manual_seed(1)
    return output, *torch.autograd.grad(output, tensors, torch.randn(output.shape, dtype=output.dtype))


def _assert_same(ours, expected, rtol=1e-9, atol=1e-10):
    for left, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol)


@each_op
@pytest.mark.parametrize("norm", [True, False], ids=["l2norm", "no-norm"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunk", "recurrent"])
def test_definition_agrees_with_transformers(name, norm, chunked):
    theirs = {
        ("gdn", True): torch_chunk_gated_delta_rule,
        ("gdn", False): torch_recurrent_gated_delta_rule,
        ("kda", True): chunk_kimi_delta_attention,
        ("kda", False): recurrent_kimi_delta_attention,
    }[name, chunked]
    tensors = _inputs(name, torch.float32, batch=2)
    if not norm:
        # Without the norm, keys of any length would make the updates diverge.
        tensors[1] = (tensors[1].detach() / 4).requires_grad_()
    options = {} if chunked else {"initial_state": None, "output_final_state": False}
    expected = _with_gradients(lambda *x: theirs(*x, use_qk_l2norm_in_kernel=norm, **options)[0], tensors)
    ours = _with_gradients(lambda *x: OPS[name][1](*x, use_qk_l2norm_in_kernel=norm), tensors)
    _assert_same(ours, expected, rtol=1e-4, atol=1e-5)


@each_op
@pytest.mark.parametrize("chunk_size", [1, 2, 16, 128])
def test_chunk_size_changes_rounding_only(name, chunk_size):
    tensors = _inputs(name)
    row, naive = OPS[name]
    packed = _with_gradients(lambda *x: row(*x, chunk_size, lengths=LENGTHS)[0], tensors)
    alone = _with_gradients(
        lambda *x: torch.cat([naive(*piece) for piece in zip(*(y.split(LENGTHS, 1) for y in x), strict=True)], 1),
        tensors,
    )
    _assert_same(packed, alone)


@each_op
def test_grouped_value_heads_equal_repeated_key_heads(name):
    query, key, *rest = _inputs(name, key_heads=2, value_heads=6)
    repeated = [x.detach().repeat_interleave(3, dim=2).requires_grad_() for x in (query, key)]
    grouped = _with_gradients(lambda *x: OPS[name][0](*x, lengths=LENGTHS)[0], [query, key, *rest])
    expected = _with_gradients(lambda *x: OPS[name][0](*x, lengths=LENGTHS)[0], [*repeated, *rest])
    _assert_same(grouped[0:1] + grouped[3:], expected[0:1] + expected[3:])
    for ours, theirs in zip(grouped[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(ours, theirs.unflatten(2, (2, 3)).sum(3), rtol=1e-9, atol=1e-10)


@each_op
@pytest.mark.parametrize("cache", [{"output_final_state": True}, {"initial_state": torch.zeros(1, 2, 8, 6)}])
def test_a_cache_is_refused(name, cache):
    with pytest.raises(PackingError, match="use_cache=False"):
        OPS[name][0](*_inputs(name), lengths=LENGTHS, **cache)


@each_op
def test_value_heads_that_are_no_multiple_of_the_key_heads_are_refused(name):
    with pytest.raises(PackingError, match="multiple of key heads"):
        OPS[name][0](*_inputs(name, key_heads=2, value_heads=3), lengths=LENGTHS)


def test_kimi_refuses_chunks_it_cannot_halve():
    with pytest.raises(PackingError, match="power of 2, but it is 48"):
        kimi_delta_attention(*_inputs("kda"), 48, lengths=LENGTHS)


def test_kimi_with_one_decay_for_all_channels_is_the_gated_delta_rule():
    tensors = _inputs("gdn")
    expected = gated_delta_rule(*tensors, lengths=LENGTHS)[0]
    tensors[3] = tensors[3][..., None].expand(-1, -1, -1, 8)
    torch.testing.assert_close(kimi_delta_attention(*tensors, lengths=LENGTHS)[0], expected, rtol=1e-9, atol=1e-10)
