"""
The `varlen` attention implementation: packed rows segment by segment, everything else through transformers' SDPA.

Registered under one name in transformers' `AttentionInterface` and `AttentionMaskInterface`, so any model that
supports attention backends takes `attn_implementation="varlen"`. Boundaries come from the call's keywords only. A row
that is packed by `position_ids` alone is refused: boundaries are never inferred.

transformers looks at the values of `position_ids` before every forward, to see whether a row is packed. For `varlen`
and flash attention, which need no mask where nothing is padded, that device read is left out.

Shapes: B batch rows, T tokens in the row, H query heads, HK key and value heads, K head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..boundaries import host_lengths
from ..errors import PackingError
from ..ops.attention import naive_attention, segment_attention, split_into_chunks, varlen_attention
from ..ops.masked_attention import masked_attention

VARLEN = "varlen"

# Types in transformers 5.20 to 5.24 whose layers need a dense mask, which `varlen` never builds, and why.
_INDEXER = "its indexer reads a dense mask"
WITHOUT_VARLEN = {
    "axk2": _INDEXER,
    "deepseek_v32": _INDEXER,
    "doge": "its attention makes a mask of its own out of a dense one",
    "gemma4_unified": "it overlays masks",
    "glm_moe_dsa": _INDEXER,
    "hy_v4": _INDEXER,
    "inkling_text": "its attention has a position bias",
    "nemotron": "its layers do not hand the boundaries to attention",
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "stablelm": "its layers do not hand the boundaries to attention",
}

# Keywords that change what attention computes and that a segment-wise kernel cannot honour.
_UNSUPPORTED = ("position_bias", "head_mask", "attention_bias")


_PREPROCESS = "_preprocess_mask_arguments"
_original_preprocess: Callable[..., Any] | None = None


def register_attention() -> None:
    """Register `varlen`. Calling it again changes nothing."""
    global _original_preprocess
    AttentionInterface.register(VARLEN, varlen_attention_forward)
    AttentionMaskInterface.register(VARLEN, varlen_mask)
    if _original_preprocess is None:
        _original_preprocess = getattr(masking_utils, _PREPROCESS)
        setattr(masking_utils, _PREPROCESS, _without_reading(_original_preprocess))


def why_not_varlen(config: Any) -> str | None:
    """Say why the model of a config cannot run `varlen`, or give `None` if nothing is known against it."""
    return WITHOUT_VARLEN.get(getattr(config, "model_type", ""))


def unregister_attention() -> None:
    """Take `varlen` out of both registries, and give transformers its own look at positions back."""
    global _original_preprocess
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(VARLEN, None)
    if _original_preprocess is not None:
        setattr(masking_utils, _PREPROCESS, _original_preprocess)
        _original_preprocess = None


def _without_reading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the segment numbers that `position_ids` imply on the device, where they stand in for a mask of ones."""

    @functools.wraps(original)
    def preprocess(*args: Any, **kwargs: Any) -> Any:
        config, inputs_embeds, attention_mask, cache, position_ids = (*args, *[None] * 5)[:5]
        is_varlen = getattr(config, "_attn_implementation", None) == VARLEN
        if (
            attention_mask is not None
            or cache is not None
            or position_ids is None
            or not (is_varlen or masking_utils.is_flash_attention_requested(config))
        ):
            return original(*args, **kwargs)
        early_exit, mask, _, *sizes = original(*args[:4], None, *args[5:], **kwargs)
        if early_exit or not is_varlen:
            return early_exit, mask, None, *sizes
        segments = (torch.diff(position_ids, dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1) + 1
        segments = segments.expand(inputs_embeds.shape[0], -1)
        return early_exit, segments, segments, *sizes

    return preprocess


def varlen_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """
    Build a mask only where one is needed. Signature of `transformers.masking_utils.sdpa_mask`.

    Returns:
        `torch.Tensor` or `None`: `None` where no token is masked; the segment numbers that positions imply, int64
            `[B, 1, 1, T]`, where nothing else was passed (the attention then insists on boundaries if there is more
            than one segment); else what `sdpa_mask` builds.
    """
    has_segments = attention_mask is not None and attention_mask.dtype != torch.bool
    # An overlay that lets tokens see later ones is in no other argument.
    is_overlaid = use_vmap or getattr(kwargs.get("mask_function"), "__qualname__", "").startswith("or_masks.")
    if q_length == kv_length and not is_overlaid:
        if has_segments:
            assert attention_mask is not None
            # Four dimensions like any mask: transformers 5.24 takes slices of them for layers that share keys.
            return attention_mask[:, None, None]
        if attention_mask is None and allow_is_causal_skip:
            return None
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=None if has_segments else attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        device=device,
        **kwargs,
    )


def varlen_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    cu_seqlens_cpu: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attend inside segments. Signature of transformers' attention functions.

    Args:
        module (`nn.Module`):
            The attention layer.
        query (`torch.Tensor`):
            `[B, H, T, K]`; B is 1 where boundaries are passed.
        key, value (`torch.Tensor`):
            `[B, HK, T, K]`.
        attention_mask (`torch.Tensor`, *optional*):
            What `varlen_mask` gave. A real mask beside boundaries is refused.
        cu_seq_lens_q (`torch.Tensor`, *optional*):
            int32 `[N + 1]`, the boundaries.
        max_length_q (`int`, *optional*):
            Longest segment.
        cu_seqlens_cpu (`Sequence[int]`, *optional*):
            The boundaries on the host; without it they are read from `cu_seq_lens_q` once per row.
        scaling, dropout, is_causal, sliding_window, softcap, s_aux:
            As transformers passes them.

    Returns:
        `tuple[torch.Tensor, None]`: `[B, T, H, K]`, and no attention weights.

    Raises:
        [`PackingError`]: If the row is packed but boundaries are missing, a mask is passed beside them, or the layer
            asks for something a segment-wise attention cannot compute.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise PackingError(
                f"`{VARLEN}` attention cannot honour `{name}`, which {type(module).__name__} passes. Choose another "
                "`attn_implementation`."
            )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window, chunk = _layer_span(module, sliding_window)
    options: dict[str, Any] = {"scale": scaling, "causal": causal, "window": window}
    if cu_seq_lens_q is not None:
        if attention_mask is not None and not _holds_segments(attention_mask):
            raise PackingError(
                f"{type(module).__name__} got an attention mask beside segment boundaries, and only one of them can "
                "be right. Remove `attention_mask` from the batch, or overlay masks from the model call."
            )
        extras = {"softcap": softcap, "sinks": s_aux, "dropout_p": dropout}
        out = _packed(query, key, value, cu_seq_lens_q, max_length_q, cu_seqlens_cpu, chunk, options, extras)
        return out.transpose(1, 2).contiguous(), None
    if attention_mask is not None and _holds_segments(attention_mask):
        if bool((attention_mask[..., -1] != 1).any()):
            raise PackingError(
                f"`position_ids` say that the row is packed, but {type(module).__name__} got no boundaries, and "
                "samples would mix. Pass all of `Boundaries.to_model_kwargs()`, or check that the model hands its "
                "keywords to the layers."
            )
        attention_mask = None
    if softcap is not None or s_aux is not None:
        return _masked_explicit(query, key, value, attention_mask, softcap, s_aux, dropout, options), None
    span = window if chunk is None else chunk
    if attention_mask is None and span is not None and span < key.shape[2] == query.shape[2]:
        lengths = [key.shape[2]] if chunk is None else split_into_chunks([key.shape[2]], chunk)
        rows = [
            segment_attention(q[None], k[None], v[None], lengths, dropout_p=dropout, **options)
            for q, k, v in zip(query, key, value, strict=True)
        ]
        return torch.cat(rows).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


def _holds_segments(attention_mask: torch.Tensor) -> bool:
    """Tell the segment numbers of `varlen_mask` from masks, which are bool or additive."""
    return attention_mask.ndim == 4 and attention_mask.dtype == torch.int64


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None,
    host_offsets: Sequence[int] | None,
    chunk: int | None,
    options: dict[str, Any],
    extras: dict[str, Any],
) -> torch.Tensor:
    kernel_fits = (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] == value.shape[-1] <= 256
        and chunk is None
        and not any(value is not None and value != 0.0 for value in extras.values())
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
    if kernel_fits:
        longest = max_seqlen if max_seqlen is not None else query.shape[2]
        return varlen_attention(query, key, value, cu_seqlens, longest, **options)
    if host_offsets is None and torch.compiler.is_compiling():
        return masked_attention(query, key, value, cu_seqlens, max_seqlen, chunk=chunk, **options, **extras)
    lengths: Sequence[int] = host_lengths(cu_seqlens, host_offsets)
    if chunk is not None:
        lengths = split_into_chunks(lengths, chunk)
    return segment_attention(query, key, value, lengths, **options, **extras)


def _layer_span(module: nn.Module, sliding_window: int | None) -> tuple[int | None, int | None]:
    """Window and chunk size of the layer. Not every model passes them to its attention function."""
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    layer_idx = getattr(module, "layer_idx", None)
    layer_type = (
        layer_types[layer_idx] if layer_types and layer_idx is not None and layer_idx < len(layer_types) else None
    )
    if layer_type == "chunked_attention":
        return None, config.attention_chunk_size
    if layer_type == "sliding_attention" and sliding_window is None:
        return config.sliding_window, None
    if layer_type == "full_attention":
        return None, None
    return sliding_window, None


def _masked_explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> torch.Tensor:
    """Padded batches of models with softcap or sinks, which SDPA has no argument for."""
    if attention_mask is None:
        start = key.shape[2] - query.shape[2]
        out = naive_attention(
            query, key, value, softcap=softcap, sinks=sinks, dropout_p=dropout, query_start=start, **options
        )
        return out.transpose(1, 2)
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scale = query.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # The lowest finite number, not -inf: a row that is padding altogether has no visible key.
    scores = scores.masked_fill(~attention_mask[..., : key.shape[2]], torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    weights = nn.functional.dropout(weights, dropout)
    return (weights.to(value.dtype) @ value).transpose(1, 2)
