"""
Gated delta rule (Qwen3-Next, Qwen3.5, OLMo hybrid) that keeps the segments of a packed row apart.

Shapes: T tokens in the row, H key heads, HV value heads, K and V head widths, M chunks of C slots.

`naive_gated_delta_rule` is the definition for one segment, `gated_delta_rule` the form for a whole row. Its arguments
are those of transformers' `torch_chunk_gated_delta_rule`, plus the boundaries. Inside a chunk the updates are
condensed by one triangular solve (Yang et al., "Gated Delta Networks", 2024); `layout` says how the chunks follow one
another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import PackingError
from .layout import ChunkLayout, chunk_layout, computation_dtype, cumsum_in_segments, exp_where, without_autocast
from .walk import delta_walk

_NORM_EPS = 1e-6


def naive_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> torch.Tensor:
    """
    Run the gated delta rule over one segment, token by token.

    Args:
        query (`torch.Tensor`):
            Shape `[B, T, H, K]`. It is scaled by `K ** -0.5`.
        key (`torch.Tensor`):
            Shape `[B, T, H, K]`.
        value (`torch.Tensor`):
            Shape `[B, T, HV, V]`, HV a multiple of H.
        g (`torch.Tensor`):
            Logarithm of the decay, at most 0. Shape `[B, T, HV]`, or `[B, T, HV, K]` for a decay per channel.
        beta (`torch.Tensor`):
            Share of the error that a token corrects. Shape `[B, T, HV]`.
        use_qk_l2norm_in_kernel (`bool`, *optional*, defaults to `False`):
            Whether to normalise `query` and `key` first.

    Returns:
        `torch.Tensor`: Shape `[B, T, HV, V]` in the dtype of `query`, computed in at least float32.
    """
    with without_autocast(query):
        q, k = prepare_query_key(query, key, value, use_qk_l2norm_in_kernel)
        v, g, beta = (tensor.to(q.dtype) for tensor in (value, g, beta))
        decay = g.exp().reshape(*g.shape[:3], -1, 1)  # [B, T, HV, 1 or K, 1]
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
        outputs = []
        for t in range(v.shape[1]):
            state = state * decay[:, t]
            error = v[:, t] - (state * k[:, t, :, :, None]).sum(-2)
            state = state + k[:, t, :, :, None] * (error * beta[:, t, :, None])[:, :, None]
            outputs.append((state * q[:, t, :, :, None]).sum(-2))
        return torch.stack(outputs, dim=1).to(query.dtype)


def gated_delta_rule(
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
    Run the gated delta rule over every segment of a packed row on its own.

    Args:
        query (`torch.Tensor`):
            Shape `[1, T, H, K]`. It is scaled by `K ** -0.5`.
        key (`torch.Tensor`):
            Shape `[1, T, H, K]`.
        value (`torch.Tensor`):
            Shape `[1, T, HV, V]`, HV a multiple of H.
        g (`torch.Tensor`):
            Logarithm of the decay, at most 0 and finite. Shape `[1, T, HV]`.
        beta (`torch.Tensor`):
            Share of the error that a token corrects. Shape `[1, T, HV]`.
        chunk_size (`int`, *optional*, defaults to `64`):
            Slots per chunk. It changes cost and rounding only.
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
        `tuple`: The output of shape `[1, T, HV, V]` in the dtype of `query`, computed in at least float32, and None.

    Raises:
        [`PackingError`]: If the batch size is not 1, the boundaries are missing or do not fit the row, a state is
            passed or asked for, or HV is not a multiple of H.
    """
    refuse_cache(initial_state, output_final_state)
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
    cumulated = cumsum_in_segments(g, layout.segments)  # [M, H, C]
    since = exp_where(layout.attends[:, None], cumulated[..., :, None] - cumulated[..., None, :])  # [M, H, C, C]
    since_start = exp_where(layout.continues[:, None], cumulated)
    until_end = exp_where(layout.hands_over[:, None], cumulated[..., -1:] - cumulated)
    k_beta = k * beta[..., None]
    return delta_rule_over_waves(
        layout,
        system=(k_beta @ k.mT) * since,
        scores=(q @ k.mT) * since,
        v_beta=v * beta[..., None],
        reads=k_beta * since_start[..., None],
        queries=q * since_start[..., None],
        writes=k * until_end[..., None],
        carries=since_start[..., -1:, None],
    )


def delta_rule_over_waves(
    layout: ChunkLayout,
    *,
    system: torch.Tensor,
    scores: torch.Tensor,
    v_beta: torch.Tensor,
    reads: torch.Tensor,
    queries: torch.Tensor,
    writes: torch.Tensor,
    carries: torch.Tensor,
) -> torch.Tensor:
    """
    Solve each chunk's updates and walk over the waves, all factors decayed and masked already.

    Args:
        layout ([`ChunkLayout`]):
            Of the row.
        system (`torch.Tensor`):
            How a token's update depends on those before it in the chunk, shape `[M, H, C, C]`; only what lies below
            the diagonal is read.
        scores (`torch.Tensor`):
            What a token reads of the updates in its chunk, shape `[M, H, C, C]`.
        v_beta (`torch.Tensor`):
            Values times beta, shape `[M, H, C, V]`.
        reads (`torch.Tensor`):
            What the updates correct of the state handed to the chunk, shape `[M, H, C, K]`.
        queries (`torch.Tensor`):
            What the outputs read of that state, shape `[M, H, C, K]`.
        writes (`torch.Tensor`):
            What the updates add to the state handed on, shape `[M, H, C, K]`.
        carries (`torch.Tensor`):
            Decay of the state across the whole chunk, shape `[M, H, 1 or K, 1]`.

    Returns:
        `torch.Tensor`: Shape `[M, H, C, V]`.
    """
    solved = torch.linalg.solve_triangular(system, torch.cat([v_beta, reads], dim=-1), upper=False, unitriangular=True)
    values, reads = solved.split([v_beta.shape[-1], reads.shape[-1]], dim=-1)
    first = layout.num_first
    writes, carries = layout.handing_on(writes), layout.handing_on(carries)
    updates, states = delta_walk(values, reads[first:], writes, carries, layout.waves)
    return scores @ updates + F.pad(queries[first:] @ states, (0, 0, 0, 0, 0, 0, first, 0))


def prepare_query_key(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, use_qk_l2norm: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring `query` and `key` to the computation's dtype, normalise, scale, and repeat them for the value heads."""
    # Not divmod, which torch.compile cannot trace where sizes vary.
    num_repeats = value.shape[2] // key.shape[2]
    if value.shape[2] % key.shape[2] or query.shape != key.shape:
        raise PackingError(
            f"Value heads must be a multiple of key heads, and `query` shaped like `key`, but the shapes are "
            f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}."
        )
    dtype = computation_dtype(query)
    q, k = query.to(dtype), key.to(dtype)
    if use_qk_l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _NORM_EPS) for x in (q, k))
    q = q * k.shape[-1] ** -0.5
    if num_repeats > 1:
        q, k = (x.repeat_interleave(num_repeats, dim=2) for x in (q, k))
    return q, k


def refuse_cache(initial_state: torch.Tensor | None, output_final_state: bool) -> None:
    """Raise [`PackingError`] if a cache is in play, whose one state per row cannot belong to several segments."""
    if initial_state is not None or output_final_state:
        raise PackingError(
            "A packed row has no cache, but a state was passed or asked for. Set `use_cache=False` and pass no "
            "`past_key_values`."
        )
