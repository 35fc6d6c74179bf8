"""
Dispatchers in place of transformers' module-level operations: each call goes where its boundaries are honoured.

One mechanism for all versions: the name in the modeling file is bound to a function of ours that decides per call, by
the boundaries among the call's keywords, by the device of its tensor and by what is installed. Nothing is stored on a
model, so copies, adapters, checkpointing and saving see no difference, and removal restores the very objects.

| call | goes to |
|---|---|
| without boundaries | the original; not on a GPU, and the original is a kernel: transformers' PyTorch function |
| on a GPU with a kernel that takes boundaries | that kernel, keywords as it wants them |
| convolution on a GPU with only flash-linear-attention there | its Triton convolution |
| fused Mamba path that cannot be used | nothing (None): the layer then calls the operations one by one |
| any other | our operation |
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..boundaries import BOUNDARY_KEYS, host_lengths
from ..errors import LeakError, MissingDependencyError, PackingError
from . import kernel_calls
from .attention import VARLEN, why_not_varlen
from .inventory import UNSUPPORTED, HookedFunction, calls_of, find_hooked_functions, parameters
from .kernel_calls import call_fla_convolution, call_kernel, fits_kernel, fla_convolution, takes_boundaries
from .relay import install_relays, relayed_boundaries, remove_relays

_KEYS = BOUNDARY_KEYS | {"cu_seqlens"}
_EXTRAS = {"fla": "gdn", "causal_conv1d": "gdn", "mamba_ssm": "mamba"}

_originals: dict[tuple[str, str], Any] = {}
_dispatchers: dict[tuple[str, str], Callable[..., Any]] = {}


@dataclass(frozen=True)
class LayerChoice:
    """
    What one operation of one kind of layer will run for a packed row.

    Args:
        layer (`str`):
            Class name of the layer.
        count (`int`):
            Layers of this class in the model.
        function (`str`):
            The operation, by the package's name. Empty for a layer without one that we know.
        implementation (`str`):
            `"kernel"`, `"fla convolution"`, `"torch"` (our operation), `"unfused"` for a fused path passed over, or
            `"refused"` where segments would mix.
        reason (`str`):
            Why.
    """

    layer: str
    count: int
    function: str
    implementation: str
    reason: str


def install_dispatchers(model: nn.Module, ops: str = "auto") -> list[HookedFunction]:
    """
    Put a dispatcher at every operation in the modeling files that the model's layers come from.

    It acts on the files, so it holds for every model built from them in this process. Calling it again replaces the
    earlier choice of `ops`, and repairs what a reload of a file undid.

    Args:
        model (`nn.Module`):
            A loaded model, wrapped or not.
        ops (`str`, *optional*, defaults to `"auto"`):
            `"auto"` takes a kernel where one fits and our operation elsewhere, `"kernels"` refuses to run our
            operation, `"torch"` always runs it for packed rows.

    Returns:
        `list[HookedFunction]`: What was replaced. Empty for a model without such layers.

    Raises:
        [`PackingError`]: If `ops` is none of the three.
        [`MissingDependencyError`]: If `ops="kernels"` and packages are missing. All of them are named at once.
    """
    if ops not in ("auto", "kernels", "torch"):
        raise PackingError(f'`ops` is one of "auto", "kernels" and "torch", but {ops!r} was passed.')
    hooked = find_hooked_functions(model, _live_originals())
    if ops == "kernels":
        _require_kernels(model, hooked)
    for function in hooked:
        key = (function.module.__name__, function.attribute)
        _originals[key] = function.original
        _dispatchers[key] = _dispatcher(function, ops)
        setattr(function.module, function.attribute, _dispatchers[key])
    install_relays(model)
    return hooked


def remove_dispatchers() -> None:
    """Bind every name to the object that stood there before, except names that someone else has bound since."""
    for (module_name, attribute), original in _live_originals().items():
        setattr(sys.modules[module_name], attribute, original)
    _originals.clear()
    _dispatchers.clear()
    remove_relays()


def describe_layers(model: nn.Module, ops: str = "auto") -> list[LayerChoice]:
    """
    Say what each kind of layer will run for a packed row on the model's device, and why.

    Args:
        model (`nn.Module`):
            A loaded model. Nothing is installed.
        ops (`str`, *optional*, defaults to `"auto"`):
            As for [`install_dispatchers`].

    Returns:
        `list[LayerChoice]`: One entry per layer class and operation; none for attention.
    """
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    choices = []
    for layer_class, count, functions in _layers_with_operations(model):
        layer = layer_class.__name__
        for base in layer_class.__mro__:
            if base.__name__ in UNSUPPORTED and base.__module__.startswith("transformers."):
                choices.append(LayerChoice(layer, count, "", "refused", UNSUPPORTED[base.__name__]))
        for function in functions:
            if function.upstream.role != "step":
                choices.append(LayerChoice(layer, count, function.upstream.name, *_choice(function, device, ops)))
    return choices


def refuse_unsupported(model: nn.Module) -> None:
    """
    Refuse a model with layers that are known not to keep segments apart, before anything is prepared for it.

    The check is by name, so it costs nothing and needs no forward. It is not a proof: [`check_isolation`] is.

    Args:
        model (`nn.Module`):
            A loaded model.

    Raises:
        [`LeakError`]: If it has such layers. All of them are named at once.
        [`PackingError`]: If it cannot run `varlen`, with which it was loaded.
    """
    config: Any = getattr(model, "config", None)
    reason = why_not_varlen(config)
    if reason is not None and getattr(config, "_attn_implementation", None) == VARLEN:
        raise PackingError(
            f"{type(model).__name__} cannot run `{VARLEN}` attention: {reason}. Load it with "
            '`attn_implementation="sdpa"`, or `"eager"` if it does not take that.'
        )
    refused = [choice for choice in describe_layers(model) if choice.implementation == "refused"]
    if refused:
        reasons = "; ".join(f"{choice.layer} ({choice.count} in the model): {choice.reason}" for choice in refused)
        raise LeakError(
            f"{type(model).__name__} cannot be trained on packed rows, because layers of it mix the segments of a "
            f"row. {reasons}. Train it on padded batches with TRL's own `SFTTrainer`."
        )


def _layers_with_operations(model: nn.Module) -> list[tuple[type, int, list[HookedFunction]]]:
    """Give each layer class, how many there are, and the hooked functions that its methods call."""
    hooked = find_hooked_functions(model, _live_originals())
    layers = []
    for layer_class, count in Counter(type(layer) for layer in model.modules()).items():
        names, files = calls_of(layer_class), {base.__module__ for base in layer_class.__mro__}
        functions = [
            function for function in hooked if function.attribute in names and function.module.__name__ in files
        ]
        layers.append((layer_class, count, functions))
    return layers


def _choice(function: HookedFunction, device: str, ops: str) -> tuple[str, str]:
    upstream, package = function.upstream, function.package
    if upstream.role == "unknown":
        return "refused", f"`{upstream.name}` is unknown to trl_packing"
    if device not in kernel_calls.KERNEL_DEVICES:
        obstacle = f"the model is on `{device}`, where `{package}` has no kernels"
    elif ops == "torch":
        obstacle = 'ops="torch"'
    elif function.kernel is None:
        obstacle = f"`{package}` is not installed"
    elif not takes_boundaries(function):
        obstacle = f"the kernel of `{package}` takes no boundaries, or lacks another package"
    else:
        return "kernel", f"`{package}` takes boundaries as `{upstream.kernel_keyword}`"
    if upstream.role == "fused":
        return "unfused", f"{obstacle}; the layer runs its operations one by one"
    if upstream.name == "causal_conv1d_fn" and device in kernel_calls.KERNEL_DEVICES and ops != "torch":
        return ("fla convolution" if fla_convolution() else "torch"), obstacle
    return "torch", obstacle


def _live_originals() -> dict[tuple[str, str], Any]:
    """The originals of those names at which our dispatcher still stands."""
    return {
        (module_name, attribute): original
        for (module_name, attribute), original in _originals.items()
        if getattr(sys.modules.get(module_name), attribute, None) is _dispatchers[module_name, attribute]
    }


def _require_kernels(model: nn.Module, hooked: list[HookedFunction]) -> None:
    missing = {
        function.package
        for _, _, functions in _layers_with_operations(model)
        for function in functions
        if function.upstream.role == "operation" and function.kernel is None
    }
    # flash-linear-attention brings a convolution of its own.
    if fla_convolution() is not None:
        missing.discard("causal_conv1d")
    if missing:
        extras = ",".join(sorted({_EXTRAS.get(package, package) for package in missing}))
        raise MissingDependencyError(
            f'ops="kernels" needs {", ".join(f"`{package}`" for package in sorted(missing))}, not installed here. '
            f"Install with `pip install 'trl-packing[{extras}]'`, or set ops=\"auto\"."
        )


def _dispatcher(function: HookedFunction, ops: str) -> Callable[..., Any]:
    upstream, original, kernel = function.upstream, function.original, function.kernel
    use_kernel = ops != "torch" and takes_boundaries(function)
    convolution = fla_convolution() if upstream.name == "causal_conv1d_fn" and ops != "torch" else None
    accepted = parameters(upstream.ours) if upstream.ours is not None else ()
    names = parameters(function.torch_function)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        on_gpu = args[0].device.type in kernel_calls.KERNEL_DEVICES
        cu_seqlens, seq_idx, host_offsets = _boundaries_of(kwargs)
        if upstream.role == "fused" and not _trains_what_it_reads(dict(zip(names, args, strict=False)) | kwargs):
            return None
        if cu_seqlens is None and seq_idx is None:
            if kernel is not None and not on_gpu:
                return function.torch_function(*args, **kwargs)
            return original(*args, **kwargs)

        kwargs = {name: value for name, value in kwargs.items() if name not in _KEYS}
        boundary = seq_idx if upstream.kernel_keyword == "seq_idx" else cu_seqlens
        if on_gpu and use_kernel and boundary is not None and fits_kernel(upstream.name, args, kwargs):
            return call_kernel(function, args, kwargs, boundary, host_offsets)
        if upstream.role == "fused":
            return None
        if upstream.ours is None:
            raise PackingError(
                f"`{upstream.name}` of {function.module.__name__} cannot keep segments apart, but got boundaries. "
                "Pack without a cache: call the model with `use_cache=False`."
            )
        if on_gpu and convolution is not None and cu_seqlens is not None:
            return call_fla_convolution(convolution, args, kwargs, cu_seqlens, host_offsets)
        if ops == "kernels":
            raise PackingError(
                f'ops="kernels", but no kernel takes this call of `{upstream.name}`: tensor {list(args[0].shape)} on '
                f'{args[0].device}. Set ops="auto" to run our operation.'
            )
        kwargs = {name: value for name, value in kwargs.items() if name in accepted}
        # Host lengths would be constants of the compiled graph, one graph per layout.
        if cu_seqlens is None or (seq_idx is not None and torch.compiler.is_compiling()):
            return upstream.ours(*args, **kwargs, seq_idx=seq_idx)
        return upstream.ours(*args, **kwargs, lengths=host_lengths(cu_seqlens, host_offsets))

    return dispatch


def _boundaries_of(kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, torch.Tensor | None, Sequence[int] | None]:
    """Read `cu_seqlens`, `seq_idx` and the host's offsets from a call's keywords, under any of transformers' names."""
    relayed = relayed_boundaries()

    # Only these keys are looked at: torch.compile makes a graph of its own for every number that is.
    def value_of(name: str) -> Any:
        value = kwargs.get(name)
        return relayed.get(name) if value is None else value

    cu_seqlens = value_of("cu_seqlens")
    return (
        value_of("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens,
        value_of("seq_idx"),
        value_of("cu_seqlens_cpu"),
    )


def _trains_what_it_reads(arguments: dict[str, Any]) -> bool:
    # The fused path reads the weights of projections and never calls them. A frozen one may carry an adapter, which
    # would get no gradient and no say.
    weights = (value for name, value in arguments.items() if name.endswith("proj_weight") and value is not None)
    return all(weight.requires_grad for weight in weights)
