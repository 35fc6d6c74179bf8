"""`lora_target_modules: auto`: every linear layer of the decoder that is called in training, by the shortest names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import PackingError
from .weights import passed_by

# Parts that a decoder trained on its own does not call: attention over an encoder, an encoder's pooler, and the
# projections that a shared block of Zamba2 keeps for every one of its places.
_NOT_CALLED = ("encoder_attn", "crossattention", "cross_attn", "pooler", "adapter_list")


def safe_lora_targets(model: nn.Module) -> list[str]:
    """
    Choose `target_modules` for which every adapter trains, whatever the architecture.

    Taken is every linear layer of the decoder that is called in training. Never taken: the output head, routers and
    their gates, sparse-attention indexers, convolutions, experts (ask for them with PEFT's `target_parameters`),
    projections whose weight a kernel reads, and names that PEFT refuses on this architecture or turns into others.

    Args:
        model (`nn.Module`):
            A loaded transformers model without adapters, after [`register_ops`].

    Returns:
        `list[str]`: Sorted endings of module names, each as short as it can be without matching any other module.

    Raises:
        [`PackingError`]: If the model has no such layer, or carries adapters already.

    Example:

    ```python
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from trl_packing import safe_lora_targets
    >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...                      num_attention_heads=2)
    >>> safe_lora_targets(LlamaForCausalLM(config))
    ['down_proj', 'gate_proj', 'k_proj', 'o_proj', 'q_proj', 'up_proj', 'v_proj']

    ```
    """
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise PackingError("`safe_lora_targets` chooses targets for a model without adapters. Pass the base model.")
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    head, decoder, refused = output_head_name(model), _decoder_prefix(model), passed_by(model)
    towers = _tower_prefixes(model, decoder)
    safe = [
        name
        for name, module in linears.items()
        if name.startswith(decoder)
        and not name.startswith(towers)
        and name != head
        and name not in refused
        and not is_router(name, module)
        and "experts" not in name.split(".")
        and not any(part in name for part in _NOT_CALLED)
    ]
    leaves = {name.rsplit(".", 1)[-1]: name for name in safe}
    accepted = {leaf for leaf, name in leaves.items() if _peft_adapts(model, name)}
    safe = [name for name in safe if name.rsplit(".", 1)[-1] in accepted]
    if not safe:
        raise PackingError(
            f"No linear layer of {type(model).__name__} is safe to adapt: {len(linears)} were found. Name the targets "
            "in `lora_target_modules`."
        )
    return _shortest_endings(safe, (name for name, _ in model.named_modules()))


def is_linear(module: nn.Module) -> bool:
    """Say whether a module multiplies by a two-dimensional weight, quantised ones included."""
    return isinstance(module, nn.Linear | Conv1D) or (
        hasattr(module, "in_features") and hasattr(module, "out_features")
    )


def is_quantized(module: nn.Module) -> bool:
    """Say whether a linear layer's weight is packed: whole numbers, or bitsandbytes' 4 bits, stored in any dtype."""
    weight = getattr(module, "weight", None)
    return not (isinstance(weight, torch.Tensor) and weight.is_floating_point()) or hasattr(weight, "quant_state")


def is_router(name: str, module: nn.Module) -> bool:
    """Say whether a linear layer chooses experts or keys for a token, or weighs what a shared expert says."""
    parts = name.split(".")
    if any("router" in part or part in ("gate", "indexer") for part in parts):
        return True
    return parts[-1].endswith("_gate") and getattr(module, "out_features", 0) == 1


def output_head_name(model: nn.Module) -> str | None:
    """Give the name of the output embeddings, if the model has them."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return next((name for name, module in model.named_modules() if module is head), None) if head is not None else None


def _decoder_prefix(model: nn.Module) -> str:
    """Name of the text decoder with a dot: a vision or an audio tower gets no token of a text run."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    # ModernBERT's decoder class calls its output head so.
    if decoder is None or is_linear(decoder):
        return ""
    name = next((name for name, module in model.named_modules() if module is decoder), "")
    return f"{name}." if name else ""


def _tower_prefixes(model: nn.Module, decoder: str) -> tuple[str, ...]:
    """Names of the models inside the model that read images or sound, with a dot; not those around the decoder."""
    return tuple(
        f"{name}."
        for name, module in model.named_modules()
        if name
        and isinstance(module, PreTrainedModel)
        and module.main_input_name != "input_ids"
        and not decoder.startswith(f"{name}.")
    )


def _peft_adapts(model: nn.Module, name: str) -> bool:
    """Let PEFT adapt a layer of this name in an empty model with the same config, and look whether it did."""
    *path, leaf = name.split(".")
    parent = root = nn.Module()
    for part in path:
        child = nn.Module()
        parent.add_module(part, child)
        parent = child
    parent.add_module(leaf, nn.Linear(1, 1))
    root.config = model.config
    try:
        inject_adapter_in_model(LoraConfig(target_modules=[name]), root)
    except ValueError:
        return False
    return isinstance(root.get_submodule(name), BaseTunerLayer)


def _shortest_endings(chosen: list[str], all_names: Iterable[str]) -> list[str]:
    """Give endings that match every chosen name and no other, the way PEFT matches: whole parts between dots."""
    wanted = set(chosen)
    taken = {ending for name in all_names if name not in wanted for ending in _endings(name)}
    return sorted({next(ending for ending in _endings(name) if ending not in taken) for name in chosen})


def _endings(name: str) -> list[str]:
    parts = name.split(".")
    endings = (parts[start:] for start in range(len(parts) - 1, -1, -1))
    # A number alone says nothing to a reader.
    return [".".join(ending) for ending in endings if not all(part.isdecimal() for part in ending)]
