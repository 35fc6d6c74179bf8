"""
Attention inside the segments of one packed row, without a T x T mask.

`naive_attention` is the definition for one segment. `segment_attention` runs a whole row: one call of torch's
`scaled_dot_product_attention` per segment, whose cost and memory follow the segments instead of the row. On CUDA in
half precision `varlen_attention` hands the row to torch's own varlen flash kernel.

Shapes: T tokens in the row, L tokens in a segment, H query heads, HK key and value heads, K and V head widths, N
segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ..errors import PackingError

# Queries handled at once where the scores are built explicitly: bounds the largest tensor to this many rows.
_QUERY_BLOCK = 512


def naive_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    query_start: int = 0,
) -> torch.Tensor:
    """
    Compute attention of one segment from its definition.

    Args:
        query (`torch.Tensor`):
            `[1, H, L, K]`, or the rows of it that start at `query_start`.
        key (`torch.Tensor`):
            `[1, HK, L, K]`, where HK divides H.
        value (`torch.Tensor`):
            `[1, HK, L, V]`.
        scale (`float`, *optional*):
            Factor of the scores. The default is `K ** -0.5`.
        causal (`bool`, *optional*, defaults to `True`):
            Whether a token sees only itself and earlier ones.
        window (`int`, *optional*):
            Tokens a query sees, itself included; to both sides if not causal.
        softcap (`float`, *optional*):
            Bound `c` of the scores `c * tanh(scores / c)`, as in Gemma 2.
        sinks (`torch.Tensor`, *optional*):
            `[H]`, one extra score per head that takes part in the softmax and has no value, as in gpt-oss.
        dropout_p (`float`, *optional*, defaults to `0.0`):
            Probability of dropping an attention weight.
        query_start (`int`, *optional*, defaults to `0`):
            Position of the first query in the segment.

    Returns:
        `torch.Tensor`: `[1, H, L, V]` in the dtype of `query`, computed in at least float32.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(query_start, query.shape[2], 0, key.shape[2], causal, window, query.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.to(dtype).view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return (weights @ value.to(dtype)).to(query.dtype)


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """
    Compute attention of every segment of a packed row, on any device.

    Args:
        query (`torch.Tensor`):
            `[1, H, T, K]`.
        key (`torch.Tensor`):
            `[1, HK, T, K]`, where HK divides H.
        value (`torch.Tensor`):
            `[1, HK, T, V]`.
        lengths (`Sequence[int]`):
            Tokens in each segment, on the host. They add up to T.
        scale, causal, window, softcap, sinks, dropout_p:
            As in [`naive_attention`].

    Returns:
        `torch.Tensor`: `[1, H, T, V]` in the dtype of `query`.

    Raises:
        [`PackingError`]: If there is more than one row, or the lengths do not add up to T.
    """
    _check_row(query, key, lengths)
    options: dict[str, Any] = {
        "scale": scale,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
    }
    # `split` is one autograd node with one concatenation behind it; slicing would fill a row of zeros per segment.
    parts = zip(*(tensor.split(list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([_one_segment(q, k, v, dropout_p=dropout_p, **options) for q, k, v in parts], dim=2)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """
    Compute attention of every segment of a packed row with torch's varlen flash kernel.

    Args:
        query (`torch.Tensor`):
            `[1, H, T, K]`, float16 or bfloat16, on CUDA.
        key (`torch.Tensor`):
            `[1, HK, T, K]`, where HK divides H.
        value (`torch.Tensor`):
            `[1, HK, T, K]`.
        cu_seqlens (`torch.Tensor`):
            int32 `[N + 1]` on the device of `query`; a repeated tail is legal.
        max_seqlen (`int`):
            Length of the longest segment or more.
        scale, causal, window:
            As in [`naive_attention`].

    Returns:
        `torch.Tensor`: `[1, H, T, K]`.
    """
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None else window - 1
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    out = varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scale,
        window_size=(left, 0 if causal else left),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(0, 1)[None]


def split_into_chunks(lengths: Sequence[int], chunk: int) -> list[int]:
    """
    Cut segment lengths at multiples of `chunk` inside each segment: chunked attention is full attention of the pieces.

    Args:
        lengths (`Sequence[int]`):
            Tokens in each segment.
        chunk (`int`):
            Most tokens in a piece.

    Returns:
        `list[int]`: Tokens in each piece, in row order.
    """
    pieces = []
    for length in lengths:
        pieces += [chunk] * (length // chunk) + ([length % chunk] if length % chunk else [])
    return pieces


def _one_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
) -> torch.Tensor:
    length = query.shape[2]
    windowed = window is not None and window < length
    explicit = softcap is not None or sinks is not None
    if not windowed and not explicit:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout_p,
            is_causal=causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    # Whole blocks of queries, each with only the keys it can see.
    block = _QUERY_BLOCK if window is None else max(window, _QUERY_BLOCK // 4)
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = max(0, start - window + 1) if window is not None else 0
        last = stop if causal else length if window is None else min(length, stop + window - 1)
        q, k, v = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
        if explicit:
            scores = partial(
                naive_attention,
                scale=scale,
                causal=causal,
                window=window,
                softcap=softcap,
                sinks=sinks,
                dropout_p=dropout_p,
                query_start=start - first,
            )
            # All blocks' scores together would be as many as tokens squared. They are computed again in the backward.
            if length > block and torch.is_grad_enabled():
                out = checkpoint(scores, q, k, v, use_reentrant=False, preserve_rng_state=dropout_p > 0.0)
            else:
                out = scores(q, k, v)
            outputs.append(out)
            continue
        mask = _visible(start, stop - start, first, last - first, causal, window, query.device)
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
        )
    return torch.cat(outputs, dim=2)


def _visible(
    query_start: int,
    num_queries: int,
    key_start: int,
    num_keys: int,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> torch.Tensor | None:
    if not causal and window is None:
        return None
    queries = torch.arange(query_start, query_start + num_queries, device=device)[:, None]
    distance = queries - torch.arange(key_start, key_start + num_keys, device=device)
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        visible = visible & (distance.abs() < window)
    return visible


def _check_row(query: torch.Tensor, key: torch.Tensor, lengths: Sequence[int]) -> None:
    if query.shape[0] != 1:
        raise PackingError(
            f"Segment boundaries describe one packed row, but the batch has {query.shape[0]} rows. Flatten the batch "
            "first."
        )
    if query.shape[2] != key.shape[2]:
        raise PackingError(
            f"A packed row needs as many keys as queries, but there are {key.shape[2]} keys for {query.shape[2]} "
            "queries. Packed training runs without a cache: set `use_cache=False`."
        )
    if sum(lengths) != query.shape[2]:
        raise PackingError(
            f"The segment lengths add up to {sum(lengths)}, but the row has {query.shape[2]} tokens. Pass the "
            "boundaries of this row."
        )
