"""The model of an estimate: built on the meta device, with its adapters, and the bytes its weights will take."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from ..errors import PackingError
from ..lora import safe_lora_targets

# bitsandbytes: half a byte per weight and a float32 scale per 64 of them; with double quantisation the scale is a
# byte, with a float32 per 256 of those.
_4_BIT, _4_BIT_TWICE = 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / 64 / 256
_8_BIT = 1.0


def build_on_meta(config: Any, dtype: torch.dtype, peft_config: Any, quantization_config: Any = None) -> Any:
    """
    Build a model without memory for its weights.

    Args:
        config (`transformers.PretrainedConfig`):
            Of the model. It is modified.
        dtype (`torch.dtype`):
            Of the weights.
        peft_config (`peft.PeftConfig`, *optional*):
            Adapters to add as TRL does: in float32, but in bfloat16 on a quantised model.
        quantization_config (`transformers.BitsAndBytesConfig`, *optional*):
            Of the frozen weights. They stay as they are; [`stored_bytes`] counts them quantised.

    Returns:
        [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]: With the base frozen if there are adapters.
    """
    names = getattr(config, "architectures", None) or [""]
    model_class = getattr(transformers, names[0], None)
    with torch.device("meta"):
        if model_class is not None and hasattr(model_class, "_from_config"):
            model = model_class._from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if peft_config is not None:
            peft_config = copy.copy(peft_config)
            if getattr(peft_config, "target_modules", None) in ("auto", {"auto"}):
                peft_config.target_modules = set(safe_lora_targets(model))
            model = get_peft_model(model, peft_config)
            if _bytes_per_weight(quantization_config) is not None:
                for weight in model.parameters():
                    if weight.requires_grad:
                        weight.data = weight.data.to(torch.bfloat16)
    return model


def decoder_layers(model: Any, config: Any) -> list[nn.Module]:
    """
    Find the decoder's layers.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            On any device.
        config (`transformers.PretrainedConfig`):
            Text configuration.

    Returns:
        `list[nn.Module]`: In order.

    Raises:
        [`PackingError`]: If the model has none.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    decoder = base.get_decoder() or base
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    layers = next((layers for layers in lists if len(layers) == config.num_hidden_layers), None)
    if layers is None:
        raise PackingError(
            f"The estimate needs a decoder of {config.num_hidden_layers} layers, but {type(base).__name__} has no "
            "list of so many modules. Estimate it by hand."
        )
    return list(layers)


def stored_bytes(module: nn.Module, quantization_config: Any = None) -> tuple[int, int]:
    """
    Count the bytes of a module's weights.

    Args:
        module (`nn.Module`):
            On any device.
        quantization_config (`transformers.BitsAndBytesConfig`, *optional*):
            How its frozen linear layers are stored.

    Returns:
        `tuple[int, int]`: Frozen and trained.
    """
    per_weight = _bytes_per_weight(quantization_config)
    quantised = set(quantised_weights(module, quantization_config))
    frozen, trained = 0.0, 0
    for weight in module.parameters():
        if weight.requires_grad:
            trained += weight.numel() * weight.element_size()
        else:
            size = per_weight if weight in quantised else weight.element_size()
            frozen += weight.numel() * (size or 0)
    return int(frozen), trained


def quantised_weights(module: nn.Module, quantization_config: Any) -> list[nn.Parameter]:
    """
    List the weights that bitsandbytes stores in fewer bits: of frozen linear layers, but never experts in one tensor.

    Args:
        module (`nn.Module`):
            On any device.
        quantization_config (`transformers.BitsAndBytesConfig`, *optional*):
            With the names it skips.

    Returns:
        `list[nn.Parameter]`: None without a configuration.
    """
    if _bytes_per_weight(quantization_config) is None:
        return []
    skipped = {"lm_head", *(getattr(quantization_config, "llm_int8_skip_modules", None) or ())}
    return [
        linear.weight
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear) and not linear.weight.requires_grad and not skipped & set(name.split("."))
    ]


def _bytes_per_weight(quantization_config: Any) -> float | None:
    if getattr(quantization_config, "load_in_4bit", False):
        return _4_BIT_TWICE if quantization_config.bnb_4bit_use_double_quant else _4_BIT
    return _8_BIT if getattr(quantization_config, "load_in_8bit", False) else None
