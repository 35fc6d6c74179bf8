"""
Short causal depthwise convolution that keeps the segments of a packed row apart.

Shapes: T tokens in the row, D channels, W convolution width.

`naive_causal_conv1d` is the definition for one segment, `causal_conv1d` the form for a whole row. Its arguments are
those of transformers' module-level `causal_conv1d_fn`, plus the boundaries.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from ..boundaries import Boundaries
from ..errors import PackingError
from .layout import check_boundaries, computation_dtype, without_autocast

# Elements of the row that are convolved at a time on a CPU: the temporaries of a step stay in its cache.
_ELEMENTS_PER_STEP = 2**18


def naive_causal_conv1d(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """
    Convolve one segment with the tokens before it, by the definition.

    Args:
        hidden_states (`torch.Tensor`):
            Shape `[B, D, T]`. Tokens before the first count as zeros.
        weight (`torch.Tensor`):
            Shape `[D, W]`. The last column meets the token itself.
        bias (`torch.Tensor`, *optional*):
            Shape `[D]`.
        activation (`str`, *optional*):
            `"silu"` or `"swish"`. The default applies none.

    Returns:
        `torch.Tensor`: Shape `[B, D, T]` in the dtype of `hidden_states`, computed in at least float32.
    """
    dtype = computation_dtype(hidden_states)
    num_channels, width = weight.shape
    with without_autocast(hidden_states):
        padded = F.pad(hidden_states.to(dtype), (width - 1, 0))
        bias = None if bias is None else bias.to(dtype)
        output = F.conv1d(padded, weight.to(dtype)[:, None], bias, groups=num_channels)
        return _activate(output, activation).to(hidden_states.dtype)


def causal_conv1d(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    lengths: tuple[int, ...] | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Convolve every segment of a packed row on its own.

    Args:
        hidden_states (`torch.Tensor`):
            Shape `[1, D, T]`, any strides.
        weight (`torch.Tensor`):
            Shape `[D, W]`. The last column meets the token itself.
        bias (`torch.Tensor`, *optional*):
            Shape `[D]`.
        activation (`str`, *optional*):
            `"silu"` or `"swish"`. The default applies none.
        lengths (`tuple[int, ...]`, *optional*):
            Tokens in each segment, on the host. Preferred in eager mode.
        seq_idx (`torch.Tensor`, *optional*):
            Segment number of each token, integer of shape `[1, T]`. Used where `lengths` is not given; it is never
            read back to the host, so one compiled graph serves all layouts.

    Returns:
        `torch.Tensor`: Shape `[1, D, T]` in the dtype of `hidden_states`, computed in at least float32.

    Raises:
        [`PackingError`]: If the batch size is not 1, the boundaries do not fit the row, none are given, or the
            activation is unknown.
    """
    check_boundaries(lengths, seq_idx, hidden_states.shape[0], hidden_states.shape[-1])
    if seq_idx is None:
        assert lengths is not None
        seq_idx = _seq_idx(lengths, hidden_states.device)
    dtype = computation_dtype(hidden_states)
    with without_autocast(hidden_states):
        rows = hidden_states[0].T.to(dtype)
        output = _SegmentConvolution.apply(rows, weight.T.to(dtype).contiguous(), seq_idx[0])
        if bias is not None:
            output = output + bias.to(dtype)
        return _activate(output.T[None], activation).to(hidden_states.dtype)


class _SegmentConvolution(torch.autograd.Function):  # type: ignore[misc]
    """Sum shifted `rows` `[T, D]` times `taps` `[W, D]`. Written out because autograd would keep W copies of a row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, taps: torch.Tensor, seq_idx: torch.Tensor) -> torch.Tensor:
        # joined[d - 1][t]: whether tokens t and t + d are of one segment.
        joined = [
            (seq_idx[shift:] == seq_idx[:-shift]).to(rows.dtype)[:, None]
            for shift in range(1, min(len(taps), len(rows)))
        ]
        ctx.save_for_backward(rows, taps, *joined)
        output = torch.empty_like(rows)
        for start, stop in _steps(rows, taps):
            torch.mul(rows[start:stop], taps[-1], out=output[start:stop])
            for shift, mask in enumerate(joined, start=1):
                first = max(start, shift)
                seen = slice(first - shift, stop - shift)
                output[first:stop].addcmul_(rows[seen] * mask[seen], taps[-1 - shift])
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (grad,) = grads
        rows, taps, *joined = ctx.saved_tensors
        grad_rows, grad_taps = torch.zeros_like(rows), torch.zeros_like(taps)
        for start, stop in _steps(rows, taps):
            grad_rows[start:stop].addcmul_(grad[start:stop], taps[-1])
            if ctx.needs_input_grad[1]:
                grad_taps[-1] += (grad[start:stop] * rows[start:stop]).sum(0)
            for shift, mask in enumerate(joined, start=1):
                first = max(start, shift)
                seen = slice(first - shift, stop - shift)
                passed = grad[first:stop] * mask[seen]
                grad_rows[seen].addcmul_(passed, taps[-1 - shift])
                if ctx.needs_input_grad[1]:
                    grad_taps[-1 - shift] += (passed * rows[seen]).sum(0)
        return grad_rows, grad_taps if ctx.needs_input_grad[1] else None, None


def _steps(rows: torch.Tensor, taps: torch.Tensor) -> list[tuple[int, int]]:
    num_tokens, num_channels = rows.shape
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return [(0, num_tokens)]
    size = max(len(taps), _ELEMENTS_PER_STEP // num_channels)
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


@lru_cache(maxsize=8)
def _seq_idx(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # The tensor outlives this call, and one made in inference mode cannot be used in a later backward pass.
    with torch.inference_mode(False):
        return Boundaries(lengths).seq_idx.to(device)


def _activate(output: torch.Tensor, activation: str | None) -> torch.Tensor:
    if activation is None:
        return output
    if activation not in ("silu", "swish"):
        raise PackingError(
            f"The convolution knows the activations `silu` and `swish`, but `activation` is {activation!r}. Pass "
            "None and apply it to the result."
        )
    return F.silu(output)
