"""The short convolution beyond the common contract: transformers' numbers, memory layouts, widths, activations."""

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from trl_packing import PackingError
from trl_packing.ops import causal_conv1d as module
from trl_packing.ops.causal_conv1d import causal_conv1d, naive_causal_conv1d

LENGTHS = (5, 1, 2, 30, 3)
TOKENS = sum(LENGTHS)


def _with_gradients(function, *tensors):
    output = function(*tensors)
    torch.manual_seed(1)
    return output, *torch.autograd.grad(output, tensors, torch.randn(output.shape, dtype=output.dtype))


def test_a_row_written_out():
    row = torch.tensor([[[1.0, 2.0, 3.0, 10.0, 20.0]]])
    weight = torch.tensor([[100.0, 10.0, 1.0]])
    assert causal_conv1d(row, weight, lengths=(3, 2)).tolist() == [[[1.0, 12.0, 123.0, 10.0, 120.0]]]


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_definition_agrees_with_transformers(activation, has_bias):
    torch.manual_seed(0)
    hidden_states, weight = torch.randn(2, 6, TOKENS), torch.randn(6, 4)
    bias = torch.randn(6) if has_bias else None
    ours = naive_causal_conv1d(hidden_states, weight, bias, activation)
    theirs = causal_conv1d_fn(hidden_states, weight, bias, activation=activation)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 60])
def test_any_width_longer_than_the_row_included(width):
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in [(1, 6, TOKENS), (6, width)]]
    packed = _with_gradients(lambda x, w: causal_conv1d(x, w, lengths=LENGTHS), *inputs)
    alone = _with_gradients(
        lambda x, w: torch.cat([naive_causal_conv1d(piece, w) for piece in x.split(LENGTHS, -1)], -1), *inputs
    )
    for ours, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layout", ["channels-first", "channels-last", "slice-of-a-projection"])
def test_memory_layout_does_not_matter(layout):
    torch.manual_seed(0)
    rows, weight = torch.randn(1, TOKENS, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    plain = _with_gradients(lambda x, w: causal_conv1d(x.transpose(1, 2), w, lengths=LENGTHS), rows, weight)

    def laid_out(x, w):
        if layout == "channels-first":
            x = x.transpose(1, 2).contiguous()
        elif layout == "channels-last":
            x = x.contiguous().transpose(1, 2)
        else:
            x = torch.cat([x, x, x], dim=-1).split([6, 12], dim=-1)[0].transpose(1, 2)
        return causal_conv1d(x, w, lengths=LENGTHS)

    for ours, expected in zip(_with_gradients(laid_out, rows, weight), plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_cutting_the_row_into_steps_changes_no_output(monkeypatch):
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in [(1, 6, TOKENS), (6, 4)]]
    whole = _with_gradients(lambda x, w: causal_conv1d(x, w, lengths=LENGTHS), *inputs)
    monkeypatch.setattr(module, "_ELEMENTS_PER_STEP", 6 * 7)
    cut = _with_gradients(lambda x, w: causal_conv1d(x, w, lengths=LENGTHS), *inputs)
    assert torch.equal(whole[0], cut[0])
    for ours, expected in zip(cut, whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_a_frozen_convolution_still_passes_the_gradient_on():
    torch.manual_seed(0)
    hidden_states, weight = torch.randn(1, 6, TOKENS, requires_grad=True), torch.randn(6, 4)
    frozen = _with_gradients(lambda x: causal_conv1d(x, weight, lengths=LENGTHS), hidden_states)
    weight.requires_grad_()
    trained = _with_gradients(lambda x, w: causal_conv1d(x, w, lengths=LENGTHS), hidden_states, weight)
    assert torch.equal(frozen[1], trained[1])


def test_an_unknown_activation_is_refused():
    with pytest.raises(PackingError, match="'gelu'"):
        causal_conv1d(torch.randn(1, 6, TOKENS), torch.randn(6, 4), activation="gelu", lengths=LENGTHS)
