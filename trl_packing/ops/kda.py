"""
Kimi delta attention (Kimi Linear) that keeps the segments of a packed row apart.

Shapes: T tokens in the row, H heads, K and V head widths, M chunks of C slots.

It is the gated delta rule with a decay of its own for each key channel. `naive_kimi_delta_attention` is the definition
for one segment, `kimi_delta_attention` the form for a whole row. Its arguments are those of transformers'
`chunk_kimi_delta_attention`, plus the boundaries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import PackingError
from .gated_delta_rule import delta_rule_over_waves, naive_gated_delta_rule, prepare_query_key, refuse_cache
from .layout import ChunkLayout, chunk_layout, cumsum_in_segments, exp_where, without_autocast


def naive_kimi_delta_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> torch.Tensor:
    """
    Run Kimi delta attention over one segment, token by token.

    Args:
        query (`torch.Tensor`):
            Shape `[B, T, H, K]`. It is scaled by `K ** -0.5`.
        key (`torch.Tensor`):
            Shape `[B, T, H, K]`.
        value (`torch.Tensor`):
            Shape `[B, T, H, V]`.
        g (`torch.Tensor`):
            Logarithm of the decay of each key channel, at most 0. Shape `[B, T, H, K]`.
        beta (`torch.Tensor`):
            Share of the error that a token corrects. Shape `[B, T, H]`.
        use_qk_l2norm_in_kernel (`bool`, *optional*, defaults to `False`):
            Whether to normalise `query` and `key` first.

    Returns:
        `torch.Tensor`: Shape `[B, T, H, V]` in the dtype of `query`, computed in at least float32.
    """
    return naive_gated_delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel)


def kimi_delta_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    lengths: tuple[int, ...] | None = None,
    seq_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """
    Run Kimi delta attention over every segment of a packed row on its own.

    Args:
        query (`torch.Tensor`):
            Shape `[1, T, H, K]`. It is scaled by `K ** -0.5`.
        key (`torch.Tensor`):
            Shape `[1, T, H, K]`.
        value (`torch.Tensor`):
            Shape `[1, T, H, V]`.
        g (`torch.Tensor`):
            Logarithm of the decay of each key channel, at most 0 and finite. Shape `[1, T, H, K]`.
        beta (`torch.Tensor`):
            Share of the error that a token corrects. Shape `[1, T, H]`.
        chunk_size (`int`, *optional*, defaults to `64`):
            Slots per chunk, a power of 2. It changes cost and rounding only.
        initial_state (`torch.Tensor`, *optional*):
            State of a cache. Refused, because a packed row has none.
        output_final_state (`bool`, *optional*, defaults to `False`):
            Whether a cache wants the last state. Refused.
        use_qk_l2norm_in_kernel (`bool`, *optional*, defaults to `False`):
            Whether to normalise `query` and `key` first.
        lengths (`tuple[int, ...]`, *optional*):
            Tokens in each segment, on the host. The fast form.
        seq_idx (`torch.Tensor`, *optional*):
            Segment number of each token, integer of shape `[1, T]`, equal numbers adjacent. Used where `lengths` is
            not given and under torch.compile; it is never read back to the host.

    Returns:
        `tuple`: The output of shape `[1, T, H, V]` in the dtype of `query`, computed in at least float32, and None.

    Raises:
        [`PackingError`]: If the batch size is not 1, the boundaries are missing or do not fit the row, a state is
            passed or asked for, or the chunk size is not a power of 2.
    """
    refuse_cache(initial_state, output_final_state)
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise PackingError(
            f"Chunks are halved again and again, so `chunk_size` must be a power of 2, but it is {chunk_size}. Leave "
            "the default."
        )
    layout = chunk_layout(lengths, seq_idx, value, chunk_size)
    with without_autocast(query):
        q, k = prepare_query_key(query, key, value, use_qk_l2norm_in_kernel)
        row = (q, k, *(tensor.to(q.dtype) for tensor in (value, g, beta)))
        # [1, T, H, ...] -> [M, H, C, ...]
        q, k, v, g, beta = (layout.to_chunks(tensor).transpose(1, 2).contiguous() for tensor in row)
        output = _chunked(layout, q, k, v, g, beta)
        return layout.to_row(output.transpose(1, 2)).to(query.dtype), None


def _chunked(
    layout: ChunkLayout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    cumulated = cumsum_in_segments(g, layout.segments)  # [M, H, C, K]
    since_start = exp_where(layout.continues[:, None, :, None], cumulated)
    until_end = exp_where(layout.hands_over[:, None, :, None], cumulated[..., -1:, :] - cumulated)
    k_beta = k * beta[..., None]
    products = _decayed_products(torch.stack([q, k_beta], dim=1), k, cumulated, layout.segments)
    scores, system = products.unbind(1)
    return delta_rule_over_waves(
        layout,
        system=system,
        scores=scores,
        v_beta=v * beta[..., None],
        reads=k_beta * since_start,
        queries=q * since_start,
        writes=k * until_end,
        carries=since_start[..., -1, :, None],
    )


@torch.library.custom_op("trl_packing::decayed_products", mutates_args=())
def _decayed_products(rows: Tensor, columns: Tensor, cumulated: Tensor, segments: Tensor) -> Tensor:
    """
    Multiply each slot's row with the columns up to it, each channel decayed in between, segments apart.

    Built from single slots by doubling. What lies between the halves of a block is decayed from the column to the end
    of the first half and from there to the row: a plain product, where no exponent can be positive. The backward pass
    is written by hand, because autograd would keep a row's worth of factors for each doubling.

    Args:
        rows (`torch.Tensor`):
            Shape `[M, S, H, C, K]`, for S products with the same columns.
        columns (`torch.Tensor`):
            Shape `[M, H, C, K]`.
        cumulated (`torch.Tensor`):
            Logarithm of the decay since the segment's start, shape `[M, H, C, K]`.
        segments (`torch.Tensor`):
            Integer of shape `[M, C]`.

    Returns:
        `torch.Tensor`: Shape `[M, S, H, C, C]`, 0 above the diagonal.
    """
    num_slots = segments.shape[1]
    products = rows.new_zeros(*rows.shape[:-1], num_slots)
    products.diagonal(dim1=-2, dim2=-1).copy_((rows * columns[:, None]).sum(-1))
    for size in _sizes(num_slots):
        from_middle, to_middle = _decays_at_middle(cumulated, segments, size)
        row, column = _halves(rows, size)[1] * from_middle[:, None], _halves(columns, size)[0] * to_middle
        _between_halves(products, size).copy_(row @ column[:, None].mT)
    return products


@torch.library.custom_op("trl_packing::decayed_products_backward", mutates_args=())
def _decayed_products_backward(
    grad: Tensor, rows: Tensor, columns: Tensor, cumulated: Tensor, segments: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    on_diagonal = grad.diagonal(dim1=-2, dim2=-1)[..., None]
    grad_rows, grad_columns = on_diagonal * columns[:, None], (on_diagonal * rows).sum(1)
    grad_cumulated = torch.zeros_like(cumulated, memory_format=torch.contiguous_format)
    for size in _sizes(segments.shape[1]):
        from_middle, to_middle = _decays_at_middle(cumulated, segments, size)
        row, column = _halves(rows, size)[1] * from_middle[:, None], _halves(columns, size)[0] * to_middle
        grad_between = _between_halves(grad, size)
        grad_row, grad_column = grad_between @ column[:, None], (grad_between.mT @ row).sum(1)
        _halves(grad_rows, size)[1].addcmul_(grad_row, from_middle[:, None])
        _halves(grad_columns, size)[0].addcmul_(grad_column, to_middle)
        grad_after, grad_before = (grad_row * row).sum(1), grad_column * column
        before, after = _halves(grad_cumulated, size)
        after += grad_after
        before -= grad_before
        before[..., -1, :] += (grad_before - grad_after).sum(-2)
    return grad_rows, grad_columns, grad_cumulated


def _sizes(num_slots: int) -> list[int]:
    return [1 << power for power in range(num_slots.bit_length() - 1)]


def _halves(slots: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """View `[..., C, K]` as first and second halves of blocks of `2 * size` slots: two of `[..., B, size, K]`."""
    first, second = slots.unflatten(-2, (-1, 2, size)).unbind(-3)
    return first, second


def _between_halves(matrix: Tensor, size: int) -> Tensor:
    """View `[..., C, C]` as the squares whose rows are second halves and columns the first: `[..., B, size, size]`."""
    blocks = matrix.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))
    return blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _decays_at_middle(cumulated: Tensor, segments: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Give the decay from the middle of each block to its second half, and from its first half to the middle."""
    (segment, segment_after), (decay, decay_after) = (
        _halves(segments[:, None, :, None], size),
        _halves(cumulated, size),
    )
    middle, middle_segment = decay[..., -1:, :], segment[..., -1:, :]
    from_middle = exp_where(segment_after == middle_segment, decay_after - middle)
    return from_middle, exp_where(segment == middle_segment, middle - decay)


@_decayed_products.register_fake
def _(rows: Tensor, columns: Tensor, cumulated: Tensor, segments: Tensor) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], segments.shape[1])


@_decayed_products_backward.register_fake
def _(
    grad: Tensor, rows: Tensor, columns: Tensor, cumulated: Tensor, segments: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return rows.new_empty(rows.shape), columns.new_empty(columns.shape), cumulated.new_empty(cumulated.shape)


def _save_for_products(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_products(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_decayed_products_backward(grad, *ctx.saved_tensors), None


_decayed_products.register_autograd(_differentiate_products, setup_context=_save_for_products)
