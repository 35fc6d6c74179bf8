"""What a check may disturb, and how it is put back: random generators, train/eval flags, buffers, config."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

# Larger integer buffers are packed quantised weights: no forward writes them, and a copy could double the memory.
_LARGEST_COPIED_INTEGER_BUFFER = 2**16
_LONGEST = "max_seq_len_cached"


class RandomState:
    """
    The state of every random generator that a forward pass may draw from: Python, NumPy, torch on every device.

    Args:
        devices (`set[torch.device]`):
            Devices that hold the model.
    """

    def __init__(self, devices: set[torch.device]) -> None:
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = self._torch_states()

    def restore(self) -> None:
        """Set every generator back to where it was when this object was made."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch[0])
        for device, state in zip(self._devices, self._torch[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, *_device_argument(device))

    def is_drawn_from(self) -> bool:
        """Say whether somebody drew a random number since."""
        now = self._torch_states()
        return random.getstate() != self._python or any(
            not torch.equal(old, new) for old, new in zip(self._torch, now, strict=True)
        )

    def _torch_states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        for device in self._devices:
            states.append(torch.get_device_module(device).get_rng_state(*_device_argument(device)))
        return states


def _device_argument(device: torch.device) -> tuple[torch.device, ...]:
    # MPS has one device, and its functions take none.
    return () if device.type == "mps" else (device,)


@contextmanager
def kept_state(model: nn.Module) -> Iterator[RandomState]:
    """
    Put back everything that forward passes may change, also when one of them raises.

    Args:
        model (`nn.Module`):
            Its train/eval flag per module, `requires_grad` per parameter, buffers (the objects and their content) and
            `config.use_cache` are restored. Gradients are not touched by a check and therefore not copied.

    Yields:
        `RandomState`: The generators as they are now; restored at the end.
    """
    modules = list(model.modules())
    training = [module.training for module in modules]
    parameters = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
    contents = [(buffer, _copy_of(buffer)) for _, own in buffers for buffer in own.values() if buffer is not None]
    # Dynamic NTK keeps the longest length that it has seen.
    longest = [
        (module, name, value) for module in modules for name, value in vars(module).items() if name.endswith(_LONGEST)
    ]
    configs = [(config, config.use_cache) for config in _configs(model) if hasattr(config, "use_cache")]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    state = RandomState(devices)
    try:
        yield state
    finally:
        state.restore()
        for module, flag in zip(modules, training, strict=True):
            module.training = flag
        for parameter, requires_grad in parameters:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        for module, own in buffers:
            module._buffers.clear()
            module._buffers.update(own)
        with torch.no_grad():
            for buffer, content in contents:
                if content is not None and not torch.equal(buffer, content):
                    buffer.copy_(content)
        for module, name, value in longest:
            setattr(module, name, value)
        for config, use_cache in configs:
            config.use_cache = use_cache


@contextmanager
def mode(model: nn.Module, *, training: bool = True) -> Iterator[None]:
    """
    Run in the mode that training uses, without dropout, jitter or layer drop, so that equal inputs give equal outputs.

    Models choose code paths by `self.training` (fused kernels, checkpointing), so only the randomness is switched off.

    Args:
        model (`nn.Module`):
            Flags and probabilities are put back at the end.
        training (`bool`, *optional*, defaults to `True`):
            Whether to set train mode, else eval mode.
    """
    flags = [(module, module.training) for module in model.modules()]
    probabilities = [
        (module, name, value)
        for module, _ in flags
        for name, value in vars(module).items()
        if isinstance(value, float) and value != 0.0 and ("drop" in name or "jitter" in name)
    ]
    try:
        for module, _ in flags:
            module.training = training and not isinstance(module, _DropoutNd)
        for module, name, _ in probabilities:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, flag in flags:
            module.training = flag
        for module, name, value in probabilities:
            setattr(module, name, value)


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Switch transformers' gradient checkpointing off for a while."""
    layers = [module for module in model.modules() if vars(module).get("gradient_checkpointing") is True]
    try:
        for layer in layers:
            layer.gradient_checkpointing = False
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


def has_reentrant_checkpointing(model: nn.Module) -> bool:
    """Say whether gradient checkpointing of the kind that forbids `torch.autograd.grad` is on."""
    for module in model.modules():
        if vars(module).get("gradient_checkpointing") is True:
            function = vars(module).get("_gradient_checkpointing_func")
            if getattr(function, "keywords", {}).get("use_reentrant", function is not None):
                return True
    return False


def has_sharded_parameters(model: nn.Module) -> bool:
    """Say whether each rank holds a part of the weights, so that all ranks must run a forward pass together."""
    return any(
        hasattr(parameter, "ds_id") or hasattr(parameter, "placements") or hasattr(parameter, "_is_fsdp_flattened")
        for parameter in model.parameters()
    ) or any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def _copy_of(buffer: torch.Tensor) -> torch.Tensor | None:
    is_packed_weight = not buffer.is_floating_point() and buffer.numel() > _LARGEST_COPIED_INTEGER_BUFFER
    return None if is_packed_weight or buffer.is_meta else buffer.detach().clone()


def _configs(model: nn.Module) -> list[Any]:
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            configs.setdefault(id(config), config)
    return list(configs.values())
