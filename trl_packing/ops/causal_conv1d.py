"""
Short causal depthwise convolution that keeps the segments of a packed row apart.

Shapes: T tokens in the row, D channels, W convolution width.

`naive_causal_conv1d` is the definition for one segment, `causal_conv1d` the form for a whole row. Its arguments are those
of transformers' module-level `causal_conv1d_fn`, plus the boundaries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
    raise NotImplementedError


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
            Segment number of each token, integer of shape `[1, T]`. Used where `lengths` is not given; it is never read
            back to the host, so one compiled graph serves all layouts.

    Returns:
        `torch.Tensor`: Shape `[1, D, T]` in the dtype of `hidden_states`, computed in at least float32.

    Raises:
        [`PackingError`]: If the batch size is not 1, the boundaries do not fit the row, none are given, or the activation
            is unknown.
    """
    raise NotImplementedError
