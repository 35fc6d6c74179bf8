"""Load a model to check it: with its weights where they are here, whole where it fits, else one layer of each kind."""

from __future__ import annotations

import copy
from typing import Any

import psutil
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ..errors import PackingError

# Weights, and the activations of a row of some hundred tokens.
_HEADROOM = 1.2


def load_model(
    name: str, config: PretrainedConfig, device: torch.device, *, trust_remote_code: bool = False, **kwargs: Any
) -> tuple[nn.Module, str]:
    """
    Load a model for a check, without fetching anything.

    Whether a layer keeps samples apart depends on its kind, the kernels and the dtype, not on the values of weights or
    on how many such layers there are.

    Args:
        name (`str`):
            Hub id or folder.
        config ([`~transformers.PretrainedConfig`]):
            The model's. It is not modified.
        device (`torch.device`):
            Where the model goes.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            As in transformers.
        **kwargs:
            `dtype`, `attn_implementation`, and what else `from_pretrained` takes.

    Returns:
        `tuple[nn.Module, str]`: The model and what its weights are, for people.

    Raises:
        [`PackingError`]: If not even one layer of each kind fits.
    """
    model_class = _model_class(config)
    built = {key: kwargs[key] for key in ("dtype", "attn_implementation")} | {"trust_remote_code": trust_remote_code}
    free = _free_bytes(device)
    skeleton = _build(model_class, config, torch.device("meta"), built)
    extent = "all layers"
    if _num_bytes(skeleton) * _HEADROOM > free:
        num_layers = config.get_text_config().num_hidden_layers
        depth = depth_with_all_kinds(skeleton, config)
        config = with_depth(config, depth)
        skeleton = _build(model_class, config, torch.device("meta"), built)
        extent = f"the first {depth} of {num_layers} layers, one of each kind, because all do not fit"
    if (needed := _num_bytes(skeleton) * _HEADROOM) > free:
        raise PackingError(
            f"One layer of each kind needs {needed / 2**30:.1f} GiB, but {device.type} has {free / 2**30:.1f} GiB "
            "free. Run the doctor where you train."
        )
    try:
        kwargs |= {"trust_remote_code": trust_remote_code, "local_files_only": True}
        model = model_class.from_pretrained(name, config=config, device_map={"": device}, **kwargs)
        return model, f"real weights, {extent}"
    except OSError:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _build(model_class, config, device, built), f"random weights, {extent}; the real ones are not here"


def depth_with_all_kinds(model: nn.Module, config: PretrainedConfig) -> int:
    """
    Count the first layers among which every kind of layer occurs.

    Args:
        model (`nn.Module`):
            Weights are not needed.
        config ([`~transformers.PretrainedConfig`]):
            The model's.

    Returns:
        `int`: At least 1; all layers where no list of them is found.
    """
    text = config.get_text_config()
    num_layers = text.num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers)
    layers = next(lists, None)
    if layers is None:
        return int(num_layers)
    types = getattr(text, "layer_types", None) or [None] * num_layers
    kinds = [
        (kind, *(type(module).__name__ for module in layer.modules()))
        for kind, layer in zip(types, layers, strict=True)
    ]
    return 1 + max(kinds.index(kind) for kind in set(kinds))


def with_depth(config: PretrainedConfig, depth: int) -> PretrainedConfig:
    """
    Give the config of a model that ends after its first layers.

    Args:
        config ([`~transformers.PretrainedConfig`]):
            The whole model's. It is not modified.
        depth (`int`):
            Layers to keep.

    Returns:
        [`~transformers.PretrainedConfig`]: A copy. Lists with an entry per layer are shortened too.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    num_layers = text.num_hidden_layers
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(text, key, value[:depth])
    text.num_hidden_layers = depth
    return config


def _model_class(config: PretrainedConfig) -> Any:
    # As TRL finds it.
    return getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)


def _build(model_class: Any, config: PretrainedConfig, device: torch.device, kwargs: dict[str, Any]) -> nn.Module:
    with torch.device(device):
        if hasattr(model_class, "from_config"):
            model: nn.Module = model_class.from_config(copy.deepcopy(config), **kwargs)
        else:
            own = {key: value for key, value in kwargs.items() if key != "trust_remote_code"}
            model = model_class._from_config(copy.deepcopy(config), **own)
    return model


def _num_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
