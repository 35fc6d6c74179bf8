"""
Attention inside the segments of one packed row without host lengths: the form for `torch.compile`.

Segment lengths in Python would be constants of a compiled graph, one graph per layout. Here the row is cut into blocks
of queries, each of which sees the keys that a segment of at most `max_seqlen` tokens can reach, and a mask made from
the offsets on the device hides those of other segments. One graph serves every layout with the same bound, at a cost
of `T * (max_seqlen + block)` scores where `segment_attention` pays for the segments alone.

Shapes: T tokens in the row, H query heads, HK key and value heads, K and V head widths, N segments.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

# Fewest queries in a block, and most blocks in a row: a compiled graph holds every block.
_QUERY_BLOCK = 512
_MAX_BLOCKS = 32


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """
    Compute attention of every segment of a packed row from offsets that stay on the device.

    Args:
        query (`torch.Tensor`):
            `[1, H, T, K]`.
        key (`torch.Tensor`):
            `[1, HK, T, K]`, where HK divides H.
        value (`torch.Tensor`):
            `[1, HK, T, V]`.
        cu_seqlens (`torch.Tensor`):
            int32 `[N + 1]` on the device of `query`, from 0 to T. A repeated tail is legal: it holds no token.
        max_seqlen (`int`, *optional*):
            Length of the longest segment or more. The default is T. Too small a bound hides tokens.
        chunk (`int`, *optional*):
            Cut each segment into pieces of this many tokens that do not see one another, as Llama 4 does.
        scale, causal, window, softcap, sinks, dropout_p:
            As in [`~trl_packing.ops.attention.naive_attention`].

    Returns:
        `torch.Tensor`: `[1, H, T, V]` in the dtype of `query`.
    """
    total = query.shape[2]
    tokens = torch.arange(total, device=query.device, dtype=cu_seqlens.dtype)
    # First token of each token's segment, or of its piece: equal for two tokens exactly if they may see each other.
    first = cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1]
    if chunk is not None:
        first = tokens - (tokens - first) % chunk
    # `int`: a symbolic bound would make a symbolic number of keys, for which no kernel can be picked.
    reach = min(int(bound) for bound in (total, max_seqlen, window, chunk) if bound is not None)
    block = max(_QUERY_BLOCK, -(-total // _MAX_BLOCKS))
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "dropout_p": dropout_p}
    outputs = []
    for start in range(0, total, block):
        stop = min(start + block, total)
        low, high = max(0, start - reach + 1), stop if causal else min(total, stop + reach - 1)
        distance = tokens[start:stop, None] - tokens[low:high]
        visible = first[start:stop, None] == first[low:high]
        if causal:
            visible = visible & (distance >= 0)
        if window is not None:
            visible = visible & (distance.abs() < window)
        q, k, v = query[:, :, start:stop], key[:, :, low:high], value[:, :, low:high]
        outputs.append(_attend(q, k, v, visible, **options))
    return torch.cat(outputs, dim=2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
) -> torch.Tensor:
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=visible,
            dropout_p=dropout_p,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    dtype = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.to(dtype).view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return (F.dropout(weights, dropout_p) @ value.to(dtype)).to(query.dtype)
