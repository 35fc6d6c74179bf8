"""
Kimi delta attention (Kimi Linear) that keeps the segments of a packed row apart.

Shapes: T tokens in the row, H heads, K and V head widths, M chunks of C slots.

It is the gated delta rule with a decay of its own for each key channel. `naive_kimi_delta_attention` is the definition
for one segment, `kimi_delta_attention` the form for a whole row. Its arguments are those of transformers'
`chunk_kimi_delta_attention`, plus the boundaries.
"""

from __future__ import annotations

import torch

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
    scores, system = _decayed_products(torch.stack([q, k_beta]), k, cumulated, layout.segments)
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


def _decayed_products(
    rows: torch.Tensor, columns: torch.Tensor, cumulated: torch.Tensor, segments: torch.Tensor
) -> torch.Tensor:
    """
    Multiply each slot's row with the columns up to it, each channel decayed in between, segments apart.

    Built from single slots by doubling. What lies between the halves of a block is decayed from the column to the end
    of the first half and from there to the row: a plain product, where no exponent can be positive.

    Args:
        rows (`torch.Tensor`):
            Shape `[S, M, H, C, K]`.
        columns (`torch.Tensor`):
            Shape `[M, H, C, K]`.
        cumulated (`torch.Tensor`):
            Logarithm of the decay since the segment's start, shape `[M, H, C, K]`.
        segments (`torch.Tensor`):
            Integer of shape `[M, C]`.

    Returns:
        `torch.Tensor`: Shape `[S, M, H, C, C]`, 0 above the diagonal.
    """
    num_slots = segments.shape[1]
    segments = segments[:, None, :, None]
    blocks = (rows * columns).sum(-1)[..., None, None]  # [S, M, H, C / size, size, size]
    size = 1
    while size < num_slots:
        halves = [x.unflatten(-2, (-1, 2, size)).unbind(-3) for x in (rows, columns, cumulated, segments)]
        (_, row), (column, _), (decay, decay_after), (segment, segment_after) = halves
        middle, middle_segment = decay[..., -1:, :], segment[..., -1:, :]
        row = row * exp_where(segment_after == middle_segment, decay_after - middle)
        column = column * exp_where(segment == middle_segment, middle - decay)
        between = row @ column.mT
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        upper = torch.cat([first, torch.zeros_like(first)], dim=-1)
        blocks = torch.cat([upper, torch.cat([between, second], dim=-1)], dim=-2)
        size *= 2
    return blocks.squeeze(-3)
