"""
What a packed row costs, per layer kind. The unit is one token's linear work, so a model without attention costs T per
row.

Every matrix and every linear-time mixer (DeltaNet, Mamba, short convolution) works per token. Only attention works per
pair of tokens inside a segment: all causal pairs in full layers, a band in sliding layers, blocks in chunked ones. A
hybrid has few full layers, so its rows differ less in cost than those of a plain transformer with the same token
counts.

Shapes: D model width, H heads, K and V head widths, T tokens, N segments.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeAlias

import numpy as np

FloatArray: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Reach: TypeAlias = Literal["full", "sliding", "chunked"]

# Work of forward and backward against forward alone. Flash attention's backward has five products for the forward's
# two. A frozen matrix (LoRA) needs no weight gradient.
_ATTENTION_PASSES = 3.5
_TRAINED_PASSES, _FROZEN_PASSES = 3.0, 2.0
# Chunk of the Gated DeltaNet kernels.
_DELTA_CHUNK = 64
_LINEAR_MIXERS = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent"})
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


@dataclass(frozen=True)
class PairWork:
    """
    Work per pair of tokens that all layers of one reach do.

    Args:
        reach (`str`):
            Which pairs: `"full"` all causal ones, `"sliding"` those less than `width` apart, `"chunked"` those in the
            same block of `width` tokens.
        width (`float`):
            Tokens, infinite for full attention.
        weight (`float`):
            Cost of one pair, in tokens of linear work.
    """

    reach: Reach
    width: float
    weight: float

    def pairs(self, lengths: FloatArray) -> FloatArray:
        """Count the pairs in segments of these lengths, half a diagonal each, float64 of the same shape."""
        short = np.minimum(lengths, self.width)
        if self.reach == "chunked" and self.width < inf:
            blocks = lengths // self.width
            return (blocks * self.width**2 + (lengths - blocks * self.width) ** 2) / 2
        return short**2 / 2 + short * (lengths - short)


@dataclass(frozen=True)
class RowCost:
    """
    Cost of a packed row from the lengths of its segments.

    Args:
        pair_works (`tuple[PairWork, ...]`, *optional*, defaults to `()`):
            Attention by reach. Without any a row costs its tokens.

    Example:

    ```python
    >>> from trl_packing.cost import PairWork, RowCost
    >>> RowCost((PairWork("full", float("inf"), 0.01),))([100, 200])
    550.0

    ```
    """

    pair_works: tuple[PairWork, ...] = ()

    @classmethod
    def from_config(cls, config: Any, *, frozen_base: bool = False) -> RowCost:
        """
        Derive the cost from a transformers configuration.

        Args:
            config (`transformers.PretrainedConfig`):
                Of a causal language model. Only plain attributes are read; what a configuration doesn't say is filled
                in from the usual transformer.
            frozen_base (`bool`, *optional*, defaults to `False`):
                Whether the matrices are frozen, as under LoRA: the linear work then weighs less against attention.

        Returns:
            [`RowCost`]: In units of one token's linear work.
        """
        config = getattr(config, "text_config", None) or config
        if not hasattr(config, "hidden_size"):
            # Byte-level models nest several transformers. What they would cost is not worth guessing.
            return cls()
        pair_work: Counter[tuple[Reach, float]] = Counter()
        for kind, layer in _layers(config):
            reach = _reach(layer, kind)
            if reach is not None:
                pair_work[reach] += _first(layer, "num_attention_heads", default=1) * sum(_head_widths(layer))
        passes = _FROZEN_PASSES if frozen_base else _TRAINED_PASSES
        factor = _ATTENTION_PASSES / (linear_work(config) * passes)
        return cls(tuple(PairWork(reach, width, work * factor) for (reach, width), work in pair_work.items()))

    @property
    def quadratic(self) -> float:
        """Factor of `sum(len ** 2)` in the cost of rows whose segments are shorter than every window."""
        return sum(work.weight for work in self.pair_works) / 2

    def per_segment(self, lengths: Any) -> FloatArray:
        """
        Cost of each segment.

        Args:
            lengths (`Sequence[int]` or `np.ndarray`):
                Tokens in each segment, shape `[N]`.

        Returns:
            `np.ndarray`: float64 of shape `[N]`.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        cost = tokens.copy()
        for work in self.pair_works:
            cost += work.weight * work.pairs(tokens)
        return cost

    def per_row(self, lengths: Any, offsets: Any) -> FloatArray:
        """
        Cost of many rows at once.

        Args:
            lengths (`Sequence[int]` or `np.ndarray`):
                Tokens in each segment of all rows back to back, shape `[N]`.
            offsets (`Sequence[int]` or `np.ndarray`):
                First segment of each row and N, strictly increasing, shape `[rows + 1]`.

        Returns:
            `np.ndarray`: float64 of shape `[rows]`.
        """
        sums: FloatArray = np.add.reduceat(self.per_segment(lengths), np.asarray(offsets, dtype=np.int64)[:-1])
        return sums

    def __call__(self, lengths: Any) -> float:
        """Cost of one row from the tokens in each of its segments."""
        return float(self.per_segment(lengths).sum())


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
    kinds = _first(config, "layer_types", "layers_block_type", default=None)
    if kinds is not None:
        return list(kinds)
    num_layers = _first(config, "num_hidden_layers", default=1)
    attention_layers = _first(config, "attn_layer_indices", default=None)
    if attention_layers is not None:
        return ["full_attention" if layer in attention_layers else "linear_attention" for layer in range(num_layers)]
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * num_layers


def linear_work(config: Any) -> float:
    """
    Count the multiplications per token that don't depend on the segment, in one forward pass.

    Args:
        config (`transformers.PretrainedConfig`):
            Text configuration.

    Returns:
        `float`: Entries of all matrices a token passes through, the language-model head and the chosen experts
            included, and the work of linear-time scans.
    """
    width = config.hidden_size
    kinds = layer_kinds(config)
    # Nemotron-H has one block per layer: a layer either mixes tokens or is an MLP.
    single_blocks = not {"mlp", "moe"}.isdisjoint(kinds)
    total = float(width * config.vocab_size)
    for number, (kind, layer) in enumerate(_layers(config)):
        if kind in _LINEAR_MIXERS or kind == "hybrid":
            total += _linear_mixer(layer)
        if _reach(layer, kind) is not None:
            total += _attention_matrices(layer)
        if kind in ("mlp", "moe") if single_blocks else _has_mlp(layer, kind):
            sparse = kind == "moe" if single_blocks else _is_sparse(layer, number)
            total += _experts(layer) if sparse else _num_mlp_matrices(layer) * width * _mlp_width(layer, number)
    return total


def _layers(config: Any) -> list[tuple[str, Any]]:
    """Kind and configuration of each layer. Gemma 4 gives some attributes per layer only, from transformers 5.22."""
    kinds = layer_kinds(config)
    by_layer = getattr(config, "is_heterogeneous", False)
    return list(zip(kinds, config.per_layer_config if by_layer else [config] * len(kinds), strict=True))


def _reach(config: Any, kind: str) -> tuple[Reach, float] | None:
    """Which pairs of tokens a layer of this kind looks at, None if it doesn't work on pairs."""
    if kind in _LINEAR_MIXERS or kind in ("mlp", "moe"):
        return None
    if "chunked" in kind:
        return "chunked", float(_first(config, "attention_chunk_size", default=inf))
    window = _first(config, "sliding_window", "attention_window_size", default=inf)
    return (
        ("sliding", float(window)) if "sliding" in kind or hasattr(config, "attention_window_size") else ("full", inf)
    )


def _attention_matrices(config: Any) -> float:
    width, heads = config.hidden_size, _first(config, "num_attention_heads", default=1)
    qk_width, v_width = _head_widths(config)
    output = heads * v_width * width
    latent = _first(config, "kv_lora_rank", default=0)
    if latent:
        query_latent = _first(config, "q_lora_rank", default=0)
        query = query_latent * (width + heads * qk_width) if query_latent else width * heads * qk_width
        rope = _first(config, "qk_rope_head_dim", default=0)
        return float(query + width * (latent + rope) + latent * heads * (qk_width - rope + v_width) + output)
    # Qwen3-Next and Qwen3.5 compute an output gate beside each query.
    query_outputs = 2 if str(getattr(config, "model_type", "")).startswith(("qwen3_next", "qwen3_5")) else 1
    kv_heads = _first(config, "num_key_value_heads", default=heads)
    return float(width * (query_outputs * heads * qk_width + kv_heads * (qk_width + v_width)) + output)


def _head_widths(config: Any) -> tuple[int, int]:
    heads = _first(config, "num_attention_heads", default=1)
    head_width = _first(config, "attention_head_dim", "head_dim", default=config.hidden_size // heads)
    if _first(config, "kv_lora_rank", default=0):
        return _first(config, "qk_head_dim", default=head_width), _first(config, "v_head_dim", default=head_width)
    return head_width, head_width


def _linear_mixer(config: Any) -> float:
    """Matrices and scan of a layer whose work is linear in the tokens."""
    width = config.hidden_size
    heads = _first(config, "linear_num_value_heads", "linear_num_heads", default=0)
    if heads:
        qk_heads = _first(config, "linear_num_key_heads", default=heads)
        qk_width = _first(config, "linear_key_head_dim", "linear_head_dim", default=0)
        v_width = _first(config, "linear_value_head_dim", "linear_head_dim", default=0)
        matrices = width * (2 * qk_heads * qk_width + 3 * heads * v_width + 2 * heads)
        # Per chunk: three products over K and two over V inside it, three with the state.
        scan = heads * (_DELTA_CHUNK * (3 * qk_width + 2 * v_width) + 3 * qk_width * v_width)
        return float(matrices + scan)
    if getattr(config, "conv_L_cache", None):
        return float(4 * width**2)
    state = _first(config, "mamba_d_state", "ssm_state_size", "state_size", default=0)
    if not state:
        return float(4 * width**2)
    heads = _first(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads", default=0)
    inner = heads * _first(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim", default=0)
    if not inner:
        # Mamba-1: a diagonal state per channel, and the step size through a low rank.
        inner = _first(config, "mamba_expand", "expand", default=2) * width
        rank = _first(config, "mamba_dt_rank", "time_step_rank", default=width // 16)
        return float(3 * width * inner + inner * (2 * rank + 2 * state) + 3 * inner * state)
    groups = _first(config, "mamba_n_groups", "n_groups", "mamba_ngroups", default=1)
    chunk = _first(config, "mamba_chunk_size", "chunk_size", default=256)
    return float(
        width * (3 * inner + 2 * groups * state + heads) + chunk * (groups * state + inner) + 2 * state * inner
    )


def _has_mlp(config: Any, kind: str) -> bool:
    """Pure Mamba models have no MLP, and Zamba has one beside its attention only."""
    if getattr(config, "hybrid_layer_ids", None):
        return kind == "hybrid"
    return getattr(config, "num_attention_heads", None) is not None


def _is_sparse(config: Any, layer: int) -> bool:
    if _num_experts(config) < 2:
        return False
    kinds = _first(config, "mlp_layer_types", default=None)
    if kinds is not None:
        return bool(kinds[layer] == "sparse")
    moe_layers = _first(config, "moe_layers", default=None)
    if moe_layers is not None:
        return layer in moe_layers
    period = _first(config, "expert_layer_period", default=None)
    if period is not None:
        return bool(layer % period == _first(config, "expert_layer_offset", default=0))
    dense_first = _first(config, "first_k_dense_replace", "num_dense_layers", default=0)
    step = _first(config, "decoder_sparse_step", default=1)
    return layer >= dense_first and layer not in getattr(config, "mlp_only_layers", ()) and (layer + 1) % step == 0


def _experts(config: Any) -> float:
    width, matrices = config.hidden_size, _num_mlp_matrices(config)
    expert_width = _first(config, "moe_intermediate_size", "intermediate_size", default=4 * width)
    chosen = _first(config, "num_experts_per_tok", "num_experts_per_token", default=1)
    num_shared = _first(config, "n_shared_experts", "num_shared_experts", default=0)
    shared_names = (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    )
    # Llama-4 names its dense layers' width apart and has one shared expert of `intermediate_size`.
    num_shared = max(num_shared, hasattr(config, "intermediate_size_mlp"))
    shared = _first(config, *shared_names, default=num_shared * expert_width)
    return float(width * (matrices * (chosen * expert_width + shared) + _num_experts(config)))


def _num_experts(config: Any) -> int:
    return int(_first(config, "num_experts", "num_local_experts", "n_routed_experts", default=0))


def _mlp_width(config: Any, layer: int) -> int:
    # Dense layers of granitemoehybrid have the shared MLP only.
    names = ("shared_intermediate_size", "intermediate_size_mlp", "intermediate_size", "n_inner")
    widths = _first(config, *names, default=4 * config.hidden_size)
    width = int(widths[layer] if isinstance(widths, list | tuple) else widths)
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return width
    # LFM2 shrinks it to two thirds and rounds up when the model is built.
    multiple: int = config.block_multiple_of
    return -(-(width * 2 // 3) // multiple) * multiple


def _num_mlp_matrices(config: Any) -> int:
    return 2 if getattr(config, "model_type", None) in _PLAIN_MLPS else 3


def _first(config: Any, *names: str, default: Any) -> Any:
    """The first of these attributes that is set."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)
