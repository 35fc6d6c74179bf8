"""
Which functions of transformers' modeling files mix neighbouring tokens outside attention, and who takes their place.

transformers decorates each of them with `use_kernel_func_from_hub_with_fallback`. The wrapper that this makes is
recognised by what it is, in the modeling files of a loaded model, so no model is listed here. It holds the PyTorch
function, and the package's function where the package was there when the file was imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

from torch import nn

from ..ops.causal_conv1d import causal_conv1d
from ..ops.gated_delta_rule import gated_delta_rule
from ..ops.kda import kimi_delta_attention
from ..ops.mamba2_scan import mamba2_scan
from ..ops.selective_scan import selective_scan

Role = Literal["operation", "fused", "step", "unknown"]


@dataclass(frozen=True)
class Upstream:
    """
    A function of transformers that a package can replace.

    Args:
        name (`str`):
            The package's name of it, which transformers' wrapper carries.
        role (`str`):
            `"operation"` runs over a whole row; `"fused"` does several operations and a projection at once and may
            return None, upon which the layer runs them one by one; `"step"` continues a cache by one token;
            `"unknown"` is a function that this version of ours has never seen.
        ours (`Callable`, *optional*):
            Our operation. Only an `"operation"` has one.
        kernel_keyword (`str`, *optional*):
            Keyword in which the package's function takes boundaries. Without one it cannot keep segments apart.
    """

    name: str
    role: Role
    ours: Callable[..., Any] | None = None
    kernel_keyword: Literal["cu_seqlens", "seq_idx"] | None = None


UPSTREAM = {
    function.name: function
    for function in (
        Upstream("causal_conv1d_fn", "operation", causal_conv1d, "seq_idx"),
        Upstream("chunk_gated_delta_rule", "operation", gated_delta_rule, "cu_seqlens"),
        Upstream("chunk_kda", "operation", kimi_delta_attention, "cu_seqlens"),
        Upstream("mamba_chunk_scan_combined", "operation", mamba2_scan, "seq_idx"),
        Upstream("selective_scan_fn", "operation", selective_scan),
        Upstream("mamba_split_conv1d_scan_combined", "fused", kernel_keyword="seq_idx"),
        Upstream("mamba_inner_fn", "fused"),
        Upstream("causal_conv1d_update", "step"),
        Upstream("fused_recurrent_gated_delta_rule", "step"),
        Upstream("fused_recurrent_kda", "step"),
        Upstream("selective_state_update", "step"),
    )
}


# Arguments of transformers' functions that choose between equal implementations.
_WITHOUT_MEANING = frozenset({"use_mambapy", "use_associative_scan", "kwargs"})

# Layers of transformers 5.20 to 5.24 that mix neighbouring tokens by themselves, by class name, and how.
UNSUPPORTED = {
    "MiniMaxLightningAttention": "its lightning attention carries one state through the row",
    "RecurrentGemmaRecurrentBlock": "its convolution runs over the row",
    "RwkvSelfAttention": "its token shift and its state run through the row",
    "xLSTMLayer": "its state runs through the row",
    "ZayaCCAProjection": "its convolutions run over the row",
    "DeepseekV4HCACompressor": "it compresses tokens by their place in the row",
    "DeepseekV4CSACompressor": "it compresses tokens by their place in the row",
    "MptAttention": "its bias and its mask run over the row",
    "CpmAntModel": "it puts prompt tokens of its own in front of the row",
    "BltPatcher": "it cuts patches by the row's bytes",
    "LSHSelfAttention": "it sorts the row's tokens into buckets",
    "LocalSelfAttention": "it cuts the row into blocks",
}


@dataclass(frozen=True)
class HookedFunction:
    """
    One such function in one modeling file.

    Args:
        module (`ModuleType`):
            The modeling file.
        attribute (`str`):
            Name under which the file's layers call it.
        original (`Callable`):
            What stands there without us: a function, or a module where `kernels` is usable.
        torch_function (`Callable`):
            transformers' own PyTorch version, which knows no boundaries.
        kernel (`Callable`, *optional*):
            The package's function, or the one that `kernelize` put in place. `None` where there is neither.
        package (`str`):
            Name to import of the package.
        upstream ([`Upstream`]):
            What we know about it.
    """

    module: ModuleType
    attribute: str
    original: Callable[..., Any]
    torch_function: Callable[..., Any]
    kernel: Callable[..., Any] | None
    package: str
    upstream: Upstream


def find_hooked_functions(model: nn.Module, originals: dict[tuple[str, str], Any]) -> list[HookedFunction]:
    """
    Find the functions in every modeling file that a layer of the model comes from.

    Args:
        model (`nn.Module`):
            A loaded model. Adapters and wrappers around it do not matter.
        originals (`dict[tuple[str, str], Any]`):
            What stood at a file's name and attribute before our dispatcher took its place.

    Returns:
        `list[HookedFunction]`: In the order of the files.
    """
    hooked = []
    for module in modeling_files(model):
        for attribute, value in list(vars(module).items()):
            value = originals.get((module.__name__, attribute), value)
            wrapper = _wrapper_of(value)
            if wrapper is None:
                continue
            held = dict(inspect.getclosurevars(wrapper).nonlocals)
            name = held["func_name"]
            upstream = UPSTREAM.get(name, Upstream(name, "unknown"))
            if upstream.ours is not None and not _same_arguments(held["torch_function"], upstream.ours):
                upstream = Upstream(name, "unknown")
            kernel = _kernel_of(value, held)
            hooked.append(
                HookedFunction(module, attribute, value, held["torch_function"], kernel, held["package"], upstream)
            )
    return hooked


def calls_of(layer_class: type) -> frozenset[str]:
    """Give the global names that the methods of a layer class mention, those under a decorator included."""
    names: set[str] = set()
    for base in layer_class.__mro__:
        if base.__module__.startswith("torch."):
            break
        for value in vars(base).values():
            for code in _codes(value):
                names.update(code.co_names)
    return frozenset(names)


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Give the names of a function's arguments in order, or of those of a module's forward."""
    target = function.forward if isinstance(function, nn.Module) else function
    return tuple(inspect.signature(target).parameters)


def modeling_files(model: nn.Module) -> list[ModuleType]:
    """Give the modeling file of every class that a layer of the model has or inherits from."""
    names = {
        base.__module__: None
        for layer in model.modules()
        for base in type(layer).__mro__
        if not base.__module__.startswith(("torch.", "builtins"))
    }
    return [sys.modules[name] for name in names if name in sys.modules]


def _wrapper_of(value: Any) -> FunctionType | None:
    """Give transformers' wrapper behind a file's attribute, which is a module around it where `kernels` is usable."""
    if isinstance(value, nn.Module) and hasattr(type(value), "kernel_layer_name"):
        # The class is made around the function, which its forward holds on to.
        wrappers = map(_wrapper_of, inspect.getclosurevars(type(value).forward).nonlocals.values())
        return next((wrapper for wrapper in wrappers if wrapper is not None), None)
    if not isinstance(value, FunctionType) or not hasattr(value, "__wrapped__"):
        return None
    return value if {"torch_function", "implementation", "func_name"} <= set(value.__code__.co_freevars) else None


def _kernel_of(original: Any, held: dict[str, Any]) -> Callable[..., Any] | None:
    # `kernelize` replaces the forward of the object itself.
    if isinstance(original, nn.Module) and "forward" in vars(original):
        return original
    implementation: Callable[..., Any] = held["implementation"]
    return None if implementation is held["torch_function"] else implementation


def _same_arguments(torch_function: Callable[..., Any], ours: Callable[..., Any]) -> bool:
    """Whether ours knows every argument, so that a later transformers cannot add one which we would drop."""
    return set(parameters(torch_function)) - _WITHOUT_MEANING <= set(parameters(ours))


def _codes(value: Any) -> Iterator[CodeType]:
    if isinstance(value, property):
        value = value.fget
    while isinstance(value, FunctionType):
        yield value.__code__
        value = getattr(value, "__wrapped__", None)
