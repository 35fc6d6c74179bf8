"""
What a configuration says about a model's layers, under all the names that transformers has for it.

Only plain attributes are read. What a configuration does not say is that of the usual transformer.
"""

from __future__ import annotations

from math import inf
from typing import Any, Literal, TypeAlias

Reach: TypeAlias = Literal["full", "sliding", "chunked"]

LINEAR_MIXERS = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent"})
# Only these have two matrices in their MLP. All newer ones are gated, with three.
_PLAIN_MLPS = frozenset(
    {
        "gpt2",
        "gpt_neox",
        "gpt_neox_japanese",
        "gptj",
        "gpt_bigcode",
        "opt",
        "phi",
        "starcoder2",
        "nemotron",
        "nemotron_h",
    }
)


def layer_kinds(config: Any) -> list[str]:
    """
    Name what mixes tokens in each layer, in transformers' words.

    Args:
        config (`transformers.PretrainedConfig`):
            Text configuration.

    Returns:
        `list[str]`: Such as `"full_attention"`, `"sliding_attention"`, `"linear_attention"`, `"hybrid"` for attention
            beside a linear mixer, `"mlp"` or `"moe"` where a layer mixes nothing.
    """
    kinds = first_set(config, "layer_types", "layers_block_type", default=None)
    if kinds is not None:
        return list(kinds)
    num_layers = first_set(config, "num_hidden_layers", default=1)
    attention_layers = first_set(config, "attn_layer_indices", default=None)
    if attention_layers is not None:
        return ["full_attention" if layer in attention_layers else "linear_attention" for layer in range(num_layers)]
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * num_layers


def each_layer(config: Any) -> list[tuple[str, Any]]:
    """Kind and configuration of each layer. Gemma 4 gives some attributes per layer only, from transformers 5.22."""
    kinds = layer_kinds(config)
    by_layer = getattr(config, "is_heterogeneous", False)
    return list(zip(kinds, config.per_layer_config if by_layer else [config] * len(kinds), strict=True))


def reach_of(config: Any, kind: str) -> tuple[Reach, float] | None:
    """Which pairs of tokens a layer of this kind looks at, None if it doesn't work on pairs."""
    if kind in LINEAR_MIXERS or kind in ("mlp", "moe"):
        return None
    if "chunked" in kind:
        return "chunked", float(first_set(config, "attention_chunk_size", default=inf))
    window = first_set(config, "sliding_window", "attention_window_size", default=inf)
    return (
        ("sliding", float(window)) if "sliding" in kind or hasattr(config, "attention_window_size") else ("full", inf)
    )


def head_widths(config: Any) -> tuple[int, int]:
    """Width of a head's queries and keys, and of its values."""
    heads = first_set(config, "num_attention_heads", default=1)
    head_width = first_set(config, "attention_head_dim", "head_dim", default=config.hidden_size // heads)
    if first_set(config, "kv_lora_rank", default=0):
        return first_set(config, "qk_head_dim", default=head_width), first_set(
            config, "v_head_dim", default=head_width
        )
    return head_width, head_width


def has_mlp(config: Any, kind: str) -> bool:
    """Pure Mamba models have no MLP, and Zamba has one beside its attention only."""
    if getattr(config, "hybrid_layer_ids", None):
        return kind == "hybrid"
    return getattr(config, "num_attention_heads", None) is not None


def is_sparse(config: Any, layer: int) -> bool:
    """Whether the MLP of this layer is a choice of experts."""
    if num_experts(config) < 2:
        return False
    kinds = first_set(config, "mlp_layer_types", default=None)
    if kinds is not None:
        return bool(kinds[layer] == "sparse")
    moe_layers = first_set(config, "moe_layers", default=None)
    if moe_layers is not None:
        return layer in moe_layers
    period = first_set(config, "expert_layer_period", default=None)
    if period is not None:
        return bool(layer % period == first_set(config, "expert_layer_offset", default=0))
    dense_first = first_set(config, "first_k_dense_replace", "num_dense_layers", default=0)
    step = first_set(config, "decoder_sparse_step", default=1)
    return layer >= dense_first and layer not in getattr(config, "mlp_only_layers", ()) and (layer + 1) % step == 0


def num_experts(config: Any) -> int:
    """Experts that a token may be sent to, 0 in a dense model."""
    return int(first_set(config, "num_experts", "num_local_experts", "n_routed_experts", default=0))


def mlp_width(config: Any, layer: int) -> int:
    """Inner width of this layer's dense MLP."""
    # Dense layers of granitemoehybrid have the shared MLP only.
    names = ("shared_intermediate_size", "intermediate_size_mlp", "intermediate_size", "n_inner")
    widths = first_set(config, *names, default=4 * config.hidden_size)
    width = int(widths[layer] if isinstance(widths, list | tuple) else widths)
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return width
    # LFM2 shrinks it to two thirds and rounds up when the model is built.
    multiple: int = config.block_multiple_of
    return -(-(width * 2 // 3) // multiple) * multiple


def num_mlp_matrices(config: Any) -> int:
    """Matrices of an MLP: 3 with a gate, else 2."""
    return 2 if getattr(config, "model_type", None) in _PLAIN_MLPS else 3


def first_set(config: Any, *names: str, default: Any) -> Any:
    """The first of these attributes that is set."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)
