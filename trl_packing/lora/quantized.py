"""QLoRA: 4-bit weights that save memory and are read the right way, or a refusal that says why not."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

from ..errors import PackingError
from .targets import is_linear, is_quantized, output_head_name
from .weights import passed_by

# Of all weights. Above it, what bitsandbytes leaves alone decides how much memory a run needs.
_MOST_UNTOUCHED = 0.5


def quantizes_with_bitsandbytes(quantization_config: Any) -> bool:
    """
    Say whether a quantisation is one of bitsandbytes'.

    Args:
        quantization_config (`BitsAndBytesConfig` or `dict`, *optional*):
            As `from_pretrained` takes it.
    """
    read = quantization_config.get if isinstance(quantization_config, dict) else partial(getattr, quantization_config)
    return any(bool(read(name, False)) for name in ("load_in_4bit", "load_in_8bit"))


def refuse_idle_quantization(model: nn.Module) -> None:
    """
    Refuse to quantise a model of which bitsandbytes would leave most as it is.

    Args:
        model (`nn.Module`):
            The model before quantisation, on any device, or after it.

    Raises:
        [`PackingError`]: If experts in 3-D parameters are more than half of all weights.
    """
    experts, total, example = 0, 0, ""
    for name, module in model.named_modules():
        if is_linear(module) and is_quantized(module):
            total += module.in_features * module.out_features
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            total += parameter.numel()
            # Convolutions have three dimensions too, and a kernel of a few numbers.
            is_experts = parameter.ndim == 3 and parameter.is_floating_point() and "conv" not in name
            if is_experts and type(module).__name__ not in MODULES_TO_PATCH_FOR_QUANTIZATION:
                experts, example = experts + parameter.numel(), example or f"{name}.{leaf}"
    if experts > _MOST_UNTOUCHED * total:
        raise PackingError(
            f"Quantisation would save nothing on {type(model).__name__}: bitsandbytes quantises linear layers, and "
            f"{experts / total:.0%} of the weights are experts in 3-D parameters such as `{example}`, which it leaves "
            "as they are. Remove `load_in_4bit` or `load_in_8bit`, and divide the weights among GPUs with FSDP2 "
            "(`configs/accelerate/fsdp2.yaml`)."
        )


def check_quantized_layers(model: nn.Module) -> None:
    """
    Refuse a quantised model that saves nothing, or of which a layer would read packed bits as numbers.

    Args:
        model (`nn.Module`):
            Loaded, with the operations registered: they decide which path a layer takes. Nothing is checked if it is
            not quantised by bitsandbytes.

    Raises:
        [`PackingError`]: Naming the layers.
    """
    if not (getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)):
        return
    refuse_idle_quantization(model)
    head = output_head_name(model)
    readers = passed_by(model) | ({head: "the loss is computed from its weight"} if head else {})
    misread = [name for name in readers if is_linear(layer := model.get_submodule(name)) and is_quantized(layer)]
    if misread:
        leaves = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in (*misread, *([head] if head else []))}))
        raise PackingError(
            f"`{misread[0]}` ({len(misread)} such layers) is quantised, but {readers[misread[0]]}, and packed bits "
            f"are no numbers. Set `model_init_kwargs: {{quantization_config: {{load_in_4bit: true, "
            f"llm_int8_skip_modules: [{leaves}]}}}}` in place of `load_in_4bit`."
        )


def refuse_undivided_weights(model: nn.Module) -> None:
    """
    Refuse 4-bit weights that FSDP would leave whole on every GPU, without a word.

    Args:
        model (`nn.Module`):
            Loaded, before it is wrapped by FSDP.

    Raises:
        [`PackingError`]: If a weight is stored as whole numbers.
    """
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and hasattr(weight, "quant_state") and not weight.is_floating_point():
            raise PackingError(
                f"FSDP divides weights that are stored as floating-point numbers, but the 4 bits of `{name}` are "
                f"stored as {str(weight.dtype).removeprefix('torch.')}, and every GPU would hold all of them. Set "
                "`bnb_4bit_quant_storage: bfloat16`, the dtype of the other weights."
            )
