"""
What a decoder layer keeps of each token from its forward to its backward pass, in bytes.

The formulas follow transformers' layers as TRL trains them, with the operations of CUDA packages ("kernels") or ours
("torch"). D model width, H and HK query and key heads of width K, values of width V, HV value heads of a DeltaNet, G
groups of N states and HM heads of width P in a Mamba-2, X channels of the convolution before either, E experts of
which k are chosen, I inner width of an MLP, C slots in a chunk of our operations. c is the bytes of a matrix
product's result, s those of the residual stream, 4 those of float32.

| part | kept per token |
|---|---|
| norm over n channels | 4 n + 4 (the input in float32, and a root); s n more if its weight is trained |
| attention | c (2 H K + HK (K + V)) + 4 H; norms of queries and keys; with an output gate 2 c H V more |
| MLP | 3 c I (gate, activated gate, up); c I without a gate |
| experts | k times an MLP, c k D + 4 E + 64 k; c k (D + I) more if trained; with a shared expert its MLP and 2 c D |
| input of an adapter | c (D + r); adapters beside each other share the D unless autocast makes a copy for each |
| input of a trained matrix | c D, shared likewise |
| DeltaNet, kernels | c (2 X + 2 HV K + 64 HV + 2 HV V) + 16 HV |
| DeltaNet, torch | (8 + c) X + 8 HV K + 12 HV V + 4 HV (8 K + 5 V + 5 C + 9 + K V / C) |
| Mamba-2, kernels | c (3 HM P + 2 G N + HM) |
| Mamba-2, torch | (8 + c) X + 12 HM P + 4 (4.75 HM P + HM (2 C + 6) + G (2 N + C) + 1.6 HM P N / C) |
| other linear mixers | 8 c D |

The factors of our own operations were counted, and `benchmarks/memory.py` counts them again. Those of kernels are the
tensors that fla 0.5 and mamba-ssm 2.3 save in their sources; they have not been measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import nn

from ..layers import first_set, has_mlp, head_widths, is_sparse, mlp_width, num_experts, num_mlp_matrices, reach_of

# Chunk of our DeltaNet, and the largest of our Mamba-2.
_CHUNK = 64
# Projections back to the residual stream. Their input is a tensor of their own.
_OUTWARD = ("o_proj", "out_proj", "down_proj", "output_linear", "w2", "dense", "c_proj", "fc2", "wo")


@dataclass(frozen=True)
class Numerics:
    """
    What numbers are computed in, and by what.

    Args:
        compute (`int`):
            Bytes of a matrix product's result.
        residual (`int`):
            Bytes of an element of the residual stream.
        autocast (`bool`):
            Whether autocast converts inputs of matrices.
        kernels (`bool`):
            Whether recurrent layers run the CUDA packages' kernels.
        slots (`float`, *optional*, defaults to `1.0`):
            Slots per token in the chunks of our recurrent operations, which leave the ends of some chunks empty.
    """

    compute: int
    residual: int
    autocast: bool
    kernels: bool
    slots: float = 1.0


@dataclass(frozen=True)
class LayerBytes:
    """
    Memory of one decoder layer.

    Args:
        kept (`float`):
            Bytes per token from the layer's forward to its backward pass.
        transient (`float`):
            Bytes per token that its backward pass needs for a moment beside them.
        kept_weights (`float`):
            Bytes that don't depend on the tokens: copies of weights that autocast or adapters of experts make.
        transient_weights (`float`):
            The same, for a moment of the backward pass.
    """

    kept: float
    transient: float
    kept_weights: float
    transient_weights: float


def layer_bytes(layer: nn.Module, config: Any, kind: str, index: int, numerics: Numerics) -> LayerBytes:
    """
    Add up what a decoder layer keeps.

    Args:
        layer (`nn.Module`):
            The layer with its adapters, on any device, such as `"meta"`.
        config (`transformers.PretrainedConfig`):
            Text configuration.
        kind (`str`):
            What mixes tokens in it, from [`~trl_packing.cost.layer_kinds`].
        index (`int`):
            Its number.
        numerics ([`Numerics`]):
            Of the run.

    Returns:
        [`LayerBytes`]: Of that layer.
    """
    c, width = numerics.compute, config.hidden_size
    kept = _norms(layer, width, numerics) + _inputs(layer, numerics)
    if reach_of(config, kind) is not None:
        kept += _attention(layer, config, c)
    if kind in ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid"):
        kept += _linear_mixer(config, numerics)
    widest = 0
    if kind in ("mlp", "moe") or (has_mlp(config, kind) and not _has_single_blocks(config)):
        sparse = kind == "moe" or (kind != "mlp" and is_sparse(config, index))
        feed_forward, widest = _experts(layer, config, c) if sparse else _mlp(config, mlp_width(config, index), c)
        kept += feed_forward
    transient = c * (widest + 2 * width)
    adapted = [module for module in layer.modules() if isinstance(module, LoraLayer)]
    if numerics.autocast and adapted:
        # An adapter's float32 weights make PEFT convert its input, before autocast converts it back.
        transient += 4 * (widest + width)
    copies = _autocast_copies(layer, numerics)
    merged = c * sum(module.get_param().numel() for module in adapted if isinstance(module, ParamWrapper))
    return LayerBytes(kept, transient, copies + merged, 2 * merged)


def _norms(layer: nn.Module, width: int, numerics: Numerics) -> float:
    """Norms over the whole width; those of heads belong to the mixers."""
    total = 0.0
    for module in layer.modules():
        weight = getattr(module, "weight", None)
        if "Norm" in type(module).__name__ and weight is not None and weight.numel() == width:
            total += 4 * width + 4 + (numerics.residual * width if weight.requires_grad else 0)
    return total


def _inputs(layer: nn.Module, numerics: Numerics) -> float:
    """Inputs of adapters and of trained matrices."""
    total, shared = 0.0, set()
    for name, width, rank, weight in _trained_inputs(layer):
        parent, _, leaf = name.rpartition(".")
        converted = numerics.autocast and weight.element_size() != numerics.compute
        key = (name,) if converted or leaf in _OUTWARD else (parent, width)
        if key not in shared:
            total += numerics.compute * width
        shared.add(key)
        total += numerics.compute * rank
    return total


def _trained_inputs(layer: nn.Module) -> Iterator[tuple[str, int, int, nn.Parameter]]:
    """Name, input width, adapter rank and a trained weight of every matrix whose input is kept."""
    inside: list[str] = []
    for name, module in layer.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper):
            for adapter in module.lora_A.values():
                yield name, module.in_features, adapter.weight.shape[0], adapter.weight
            inside.append(f"{name}.")
        elif isinstance(module, nn.Linear) and module.weight.requires_grad and ".lora_" not in name:
            yield name, module.in_features, 0, module.weight


def _autocast_copies(layer: nn.Module, numerics: Numerics) -> float:
    """Autocast keeps a copy of each trained matrix as long as the graph lives."""
    if not numerics.autocast:
        return 0.0
    matrices = (weight for weight in layer.parameters() if weight.requires_grad and weight.ndim == 2)
    return sum(numerics.compute * weight.numel() for weight in matrices if weight.element_size() != numerics.compute)


def _attention(layer: nn.Module, config: Any, c: int) -> float:
    heads = first_set(config, "num_attention_heads", default=1)
    kv_heads = first_set(config, "num_key_value_heads", default=heads)
    qk_width, v_width = head_widths(config)
    kept = c * (heads * (qk_width + v_width) + kv_heads * (qk_width + v_width)) + 4 * heads
    names = {name.rsplit(".", 1)[-1] for name, _ in layer.named_modules()}
    if names & {"q_norm", "q_layernorm"}:
        kept += 4 * (heads + kv_heads) * (qk_width + 1)
    if str(getattr(config, "model_type", "")).startswith(("qwen3_next", "qwen3_5")):
        kept += 2 * c * heads * v_width
    return float(kept)


def _mlp(config: Any, inner: float, c: int) -> tuple[float, int]:
    """Bytes kept and the widest tensor, in elements."""
    return c * inner * (3 if num_mlp_matrices(config) == 3 else 1), int(inner)


def _experts(layer: nn.Module, config: Any, c: int) -> tuple[float, int]:
    width = config.hidden_size
    chosen = first_set(config, "num_experts_per_tok", "num_experts_per_token", default=1)
    inner = first_set(config, "moe_intermediate_size", "intermediate_size", default=4 * width)
    kept = chosen * _mlp(config, inner, c)[0] + c * chosen * width + 4 * num_experts(config) + 64 * chosen
    trained = [weight for weight in layer.parameters() if weight.ndim == 3 and weight.requires_grad]
    if trained:
        kept += trained[0].element_size() * chosen * (width + inner)
    shared_inner = first_set(
        config,
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
        default=first_set(config, "n_shared_experts", "num_shared_experts", default=0) * inner,
    )
    if shared_inner:
        kept += _mlp(config, shared_inner, c)[0] + 2 * c * width
    return kept, int(chosen * (inner + width))


def _linear_mixer(config: Any, numerics: Numerics) -> float:
    if first_set(config, "linear_num_value_heads", default=0):
        return _delta_net(config, numerics)
    heads = first_set(config, "mamba_n_heads", "mamba_num_heads", "num_heads", default=0)
    state = first_set(config, "mamba_d_state", "ssm_state_size", "state_size", default=0)
    if heads and state and getattr(config, "conv_L_cache", None) is None:
        return _mamba2(config, numerics, heads, state)
    return 8.0 * numerics.compute * config.hidden_size


def _delta_net(config: Any, numerics: Numerics) -> float:
    c, heads = numerics.compute, config.linear_num_value_heads
    qk_width, v_width = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * qk_width + heads * v_width
    if numerics.kernels:
        return float(c * (2 * channels + heads * (2 * qk_width + _CHUNK + 2 * v_width)) + 16 * heads)
    rule = delta_rule_values(qk_width, v_width) * numerics.slots
    return float((8 + c) * channels + heads * (8 * qk_width + 12 * v_width + 4 * rule))


def _mamba2(config: Any, numerics: Numerics, heads: int, state: int) -> float:
    c = numerics.compute
    width = first_set(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim", default=0)
    inner = heads * width
    groups = first_set(config, "mamba_n_groups", "n_groups", "mamba_ngroups", default=1)
    if numerics.kernels:
        return float(c * (3 * inner + 2 * groups * state + heads))
    chunk = min(_CHUNK, first_set(config, "mamba_chunk_size", "chunk_size", default=_CHUNK))
    scan = scan_values(heads, width, groups, state, chunk) * numerics.slots
    return float((8 + c) * (inner + 2 * groups * state) + 12 * inner + 4 * scan)


def delta_rule_values(qk_width: int, v_width: int) -> float:
    """Float32 values that our gated delta rule keeps per slot and head, its output included, in long segments."""
    return 8 * qk_width + 5 * v_width + 5 * _CHUNK + 9 + qk_width * v_width / _CHUNK


def scan_values(heads: int, width: int, groups: int, state: int, chunk: int) -> float:
    """Float32 values that our Mamba-2 scan keeps per slot, its output included, in long segments."""
    inner = heads * width
    return 4.75 * inner + heads * (2 * chunk + 6) + groups * (2 * state + chunk) + 1.6 * inner * state / chunk


def _has_single_blocks(config: Any) -> bool:
    """Nemotron-H has one block per layer: it mixes tokens or is an MLP."""
    kinds = first_set(config, "layer_types", "layers_block_type", default=())
    return not {"mlp", "moe"}.isdisjoint(kinds)
