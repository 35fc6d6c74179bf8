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
from typing import Any, TypeAlias

import numpy as np

from .layers import (
    LINEAR_MIXERS,
    Reach,
    each_layer,
    first_set,
    has_mlp,
    head_widths,
    is_sparse,
    layer_kinds,
    mlp_width,
    num_experts,
    num_mlp_matrices,
    reach_of,
)

FloatArray: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

# Work of forward and backward against forward alone. Flash attention's backward has five products for the forward's
# two. A frozen matrix (LoRA) needs no weight gradient.
_ATTENTION_PASSES = 3.5
_TRAINED_PASSES, _FROZEN_PASSES = 3.0, 2.0
# Chunk of the Gated DeltaNet kernels.
_DELTA_CHUNK = 64


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
        for kind, layer in each_layer(config):
            reach = reach_of(layer, kind)
            if reach is not None:
                pair_work[reach] += first_set(layer, "num_attention_heads", default=1) * sum(head_widths(layer))
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
    for number, (kind, layer) in enumerate(each_layer(config)):
        if kind in LINEAR_MIXERS or kind == "hybrid":
            total += _linear_mixer(layer)
        if reach_of(layer, kind) is not None:
            total += _attention_matrices(layer)
        if kind in ("mlp", "moe") if single_blocks else has_mlp(layer, kind):
            sparse = kind == "moe" if single_blocks else is_sparse(layer, number)
            total += _experts(layer) if sparse else num_mlp_matrices(layer) * width * mlp_width(layer, number)
    return total


def _attention_matrices(config: Any) -> float:
    width, heads = config.hidden_size, first_set(config, "num_attention_heads", default=1)
    qk_width, v_width = head_widths(config)
    output = heads * v_width * width
    latent = first_set(config, "kv_lora_rank", default=0)
    if latent:
        query_latent = first_set(config, "q_lora_rank", default=0)
        query = query_latent * (width + heads * qk_width) if query_latent else width * heads * qk_width
        rope = first_set(config, "qk_rope_head_dim", default=0)
        return float(query + width * (latent + rope) + latent * heads * (qk_width - rope + v_width) + output)
    # Qwen3-Next and Qwen3.5 compute an output gate beside each query.
    query_outputs = 2 if str(getattr(config, "model_type", "")).startswith(("qwen3_next", "qwen3_5")) else 1
    kv_heads = first_set(config, "num_key_value_heads", default=heads)
    return float(width * (query_outputs * heads * qk_width + kv_heads * (qk_width + v_width)) + output)


def _linear_mixer(config: Any) -> float:
    """Matrices and scan of a layer whose work is linear in the tokens."""
    width = config.hidden_size
    heads = first_set(config, "linear_num_value_heads", "linear_num_heads", default=0)
    if heads:
        qk_heads = first_set(config, "linear_num_key_heads", default=heads)
        qk_width = first_set(config, "linear_key_head_dim", "linear_head_dim", default=0)
        v_width = first_set(config, "linear_value_head_dim", "linear_head_dim", default=0)
        matrices = width * (2 * qk_heads * qk_width + 3 * heads * v_width + 2 * heads)
        # Per chunk: three products over K and two over V inside it, three with the state.
        scan = heads * (_DELTA_CHUNK * (3 * qk_width + 2 * v_width) + 3 * qk_width * v_width)
        return float(matrices + scan)
    if getattr(config, "conv_L_cache", None):
        return float(4 * width**2)
    state = first_set(config, "mamba_d_state", "ssm_state_size", "state_size", default=0)
    if not state:
        return float(4 * width**2)
    heads = first_set(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads", default=0)
    inner = heads * first_set(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim", default=0)
    if not inner:
        # Mamba-1: a diagonal state per channel, and the step size through a low rank.
        inner = first_set(config, "mamba_expand", "expand", default=2) * width
        rank = first_set(config, "mamba_dt_rank", "time_step_rank", default=width // 16)
        return float(3 * width * inner + inner * (2 * rank + 2 * state) + 3 * inner * state)
    groups = first_set(config, "mamba_n_groups", "n_groups", "mamba_ngroups", default=1)
    chunk = first_set(config, "mamba_chunk_size", "chunk_size", default=256)
    return float(
        width * (3 * inner + 2 * groups * state + heads) + chunk * (groups * state + inner) + 2 * state * inner
    )


def _experts(config: Any) -> float:
    width, matrices = config.hidden_size, num_mlp_matrices(config)
    expert_width = first_set(config, "moe_intermediate_size", "intermediate_size", default=4 * width)
    chosen = first_set(config, "num_experts_per_tok", "num_experts_per_token", default=1)
    num_shared = first_set(config, "n_shared_experts", "num_shared_experts", default=0)
    shared_names = (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    )
    # Llama-4 names its dense layers' width apart and has one shared expert of `intermediate_size`.
    num_shared = max(num_shared, hasattr(config, "intermediate_size_mlp"))
    shared = first_set(config, *shared_names, default=num_shared * expert_width)
    return float(width * (matrices * (chosen * expert_width + shared) + num_experts(config)))
