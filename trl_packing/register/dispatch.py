"""
Dispatchers in place of transformers' module-level operations: each call goes where its boundaries are honoured.

One mechanism for all versions: the name in the modeling file is bound to a function of ours that decides per call, by the
boundaries among the call's keywords, by the device of its tensor and by what is installed. Nothing is stored on a model,
so copies, adapters, checkpointing and saving see no difference, and removing the dispatchers restores the very objects.

| call | goes to |
|---|---|
| without boundaries | the original; transformers' PyTorch function where a package was chosen but the tensor is not on a GPU |
| on a GPU, and the kernel takes boundaries | that kernel, keywords as it wants them |
| convolution on a GPU with only flash-linear-attention there | its Triton convolution |
| fused Mamba path that is not usable | nothing (None): the layer then calls the operations one by one |
| any other | our operation |
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._compat import is_available
from ..boundaries import BOUNDARY_KEYS, host_lengths
from ..errors import MissingDependencyError, PackingError
from .inventory import HookedFunction, calls_of, find_hooked_functions
from .relay import install_relays, relayed_boundaries, remove_relays

Ops = Literal["auto", "kernels", "torch"]

# Devices that the packages have kernels for.
KERNEL_DEVICES = ("cuda", "xpu")

_KEYS = BOUNDARY_KEYS | {"cu_seqlens"}
_INSTALL = {
    "fla": "pip install 'trl-packing[gdn]'",
    "causal_conv1d": "pip install 'trl-packing[gdn]'",
    "mamba_ssm": "pip install 'trl-packing[mamba]'",
}

_originals: dict[tuple[str, str], Any] = {}
_dispatchers: dict[tuple[str, str], Callable[..., Any]] = {}
_cpu_offsets_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


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
            The operation, by the package's name.
        implementation (`str`):
            `"kernel"`, `"fla convolution"`, `"torch"` (our operation), or `"unfused"` where a fused path is passed over.
        reason (`str`):
            Why.
    """

    layer: str
    count: int
    function: str
    implementation: str
    reason: str


def install_dispatchers(model: nn.Module, ops: Ops = "auto") -> list[HookedFunction]:
    """
    Put a dispatcher at every operation in the modeling files that the model's layers come from.

    It acts on the files, so it holds for every model built from them in this process. Calling it again replaces the
    earlier choice of `ops`, and repairs what a reload of a file undid.

    Args:
        model (`nn.Module`):
            A loaded model, wrapped or not.
        ops (`str`, *optional*, defaults to `"auto"`):
            `"auto"` takes a kernel where one fits and our operation elsewhere, `"kernels"` refuses to run our operation,
            `"torch"` always runs it for packed rows.

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
    """Bind every name to the object that stood there before. Names that someone else has bound since are left alone."""
    for (module_name, attribute), original in _live_originals().items():
        setattr(import_module(module_name), attribute, original)
    _originals.clear()
    _dispatchers.clear()
    remove_relays()


def describe_layers(model: nn.Module, ops: Ops = "auto") -> list[LayerChoice]:
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
    counts = Counter(type(layer) for layer in model.modules())
    hooked = find_hooked_functions(model, _live_originals())
    choices = []
    for layer_class, count in counts.items():
        for function in _called(layer_class, hooked):
            if function.upstream.role != "step":
                implementation, reason = _choice(function, device, ops)
                name = function.upstream.name
                choices.append(LayerChoice(layer_class.__name__, count, name, implementation, reason))
    return choices


def _called(layer_class: type, hooked: list[HookedFunction]) -> list[HookedFunction]:
    names = calls_of(layer_class)
    files = {base.__module__ for base in layer_class.__mro__}
    return [function for function in hooked if function.attribute in names and function.module.__name__ in files]


def _choice(function: HookedFunction, device: str, ops: Ops) -> tuple[str, str]:
    upstream, package = function.upstream, function.package
    if device not in KERNEL_DEVICES:
        obstacle = f"the model is on `{device}`, and `{package}` has kernels for {' and '.join(KERNEL_DEVICES)} only"
    elif ops == "torch":
        obstacle = 'ops="torch"'
    elif function.kernel is None:
        obstacle = f"`{package}` is not installed"
    elif not _takes_boundaries(function):
        obstacle = f"the kernel of `{package}` takes no boundaries"
    elif upstream.role == "fused" and not is_available("causal_conv1d"):
        obstacle = "`causal_conv1d` is not installed"
    else:
        return "kernel", f"`{package}` takes boundaries as `{upstream.kernel_keyword}`"
    if upstream.role == "fused":
        return "unfused", f"{obstacle}; the layer runs its operations one by one"
    if upstream.name == "causal_conv1d_fn" and device in KERNEL_DEVICES and ops != "torch" and _fla_convolution():
        return "fla convolution", obstacle
    return "torch", obstacle


def _live_originals() -> dict[tuple[str, str], Any]:
    """The originals of those names at which our dispatcher still stands."""
    return {
        (module_name, attribute): original
        for (module_name, attribute), original in _originals.items()
        if getattr(import_module(module_name), attribute, None) is _dispatchers[module_name, attribute]
    }


def _require_kernels(model: nn.Module, hooked: list[HookedFunction]) -> None:
    used = {
        function.package
        for layer_class in {type(layer) for layer in model.modules()}
        for function in _called(layer_class, hooked)
        if function.upstream.role == "operation" and function.kernel is None
    }
    # flash-linear-attention brings a convolution of its own.
    if _fla_convolution() is not None:
        used.discard("causal_conv1d")
    if used:
        names = ", ".join(f"`{package}`" for package in sorted(used))
        lines = " and ".join(f"`{line}`" for line in sorted({_INSTALL.get(name, f"pip install {name}") for name in used}))
        raise MissingDependencyError(
            f'ops="kernels" needs the packages {names}, which are not installed. Install with {lines}, or set '
            'ops="auto".'
        )


def _dispatcher(function: HookedFunction, ops: Ops) -> Callable[..., Any]:
    upstream, original, kernel = function.upstream, function.original, function.kernel
    use_kernel = ops != "torch" and _takes_boundaries(function)
    if upstream.role == "fused":
        use_kernel = use_kernel and is_available("causal_conv1d")
    convolution = _fla_convolution() if upstream.name == "causal_conv1d_fn" and ops != "torch" else None
    accepted = _parameters(kernel) if kernel is not None else frozenset()
    ours_accepts = _parameters(upstream.ours) if upstream.ours is not None else frozenset()

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        on_gpu = args[0].device.type in KERNEL_DEVICES
        cu_seqlens, seq_idx, host_offsets = _boundaries_of(kwargs)
        if upstream.role == "fused" and not _trains_what_it_reads(kwargs):
            return None
        if cu_seqlens is None and seq_idx is None:
            if kernel is not None and not on_gpu:
                return function.torch_function(*args, **kwargs)
            return original(*args, **kwargs)

        kwargs = {name: value for name, value in kwargs.items() if name not in _KEYS}
        boundary = seq_idx if upstream.kernel_keyword == "seq_idx" else cu_seqlens
        if on_gpu and use_kernel and boundary is not None and _fits(upstream.name, args, kwargs):
            kwargs = {name: value for name, value in kwargs.items() if name in accepted}
            return _call_kernel(function, accepted, args, kwargs, boundary, host_offsets)
        if upstream.role == "fused":
            return None
        if upstream.ours is None:
            raise PackingError(
                f"`{upstream.name}` of {function.module.__name__} cannot keep segments apart, but got boundaries. Pack "
                "without a cache: call the model with `use_cache=False`."
            )
        if on_gpu and convolution is not None and cu_seqlens is not None:
            return _call_fla_convolution(convolution, args, kwargs, cu_seqlens, host_offsets)
        if ops == "kernels":
            raise PackingError(
                f'ops="kernels", but no kernel takes this call of `{upstream.name}`: tensor {list(args[0].shape)} on '
                f'{args[0].device}. Set ops="auto" to run our operation.'
            )
        kwargs = {name: value for name, value in kwargs.items() if name in ours_accepts}
        if (torch.compiler.is_compiling() and seq_idx is not None) or cu_seqlens is None:
            return upstream.ours(*args, **kwargs, seq_idx=seq_idx)
        return upstream.ours(*args, **kwargs, lengths=host_lengths(cu_seqlens, host_offsets))

    return dispatch


def _boundaries_of(kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, torch.Tensor | None, Sequence[int] | None]:
    """Read `cu_seqlens`, `seq_idx` and the host's offsets from a call's keywords, under any of transformers' names."""
    relayed = relayed_boundaries()
    if relayed:
        # The call's own keywords come first, None does not count.
        kwargs = relayed | {name: value for name, value in kwargs.items() if value is not None}
    cu_seqlens = kwargs.get("cu_seqlens")
    if cu_seqlens is None:
        cu_seqlens = kwargs.get("cu_seq_lens_q")
    return cu_seqlens, kwargs.get("seq_idx"), kwargs.get("cu_seqlens_cpu")


def _call_kernel(
    function: HookedFunction,
    accepted: frozenset[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    boundary: torch.Tensor,
    host_offsets: Sequence[int] | None,
) -> Any:
    assert function.kernel is not None
    if function.upstream.kernel_keyword == "seq_idx":
        if function.upstream.name == "causal_conv1d_fn" and args[0].stride(1) != 1:
            args = (args[0].transpose(1, 2).contiguous().transpose(1, 2), *args[1:])
        return function.kernel(*args, **kwargs, seq_idx=boundary.to(torch.int32).contiguous())
    if host_offsets is not None and "cu_seqlens_cpu" in accepted:
        kwargs["cu_seqlens_cpu"] = _cpu_offsets(boundary, host_offsets)
    return function.kernel(*args, **kwargs, cu_seqlens=boundary)


def _call_fla_convolution(
    convolution: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cu_seqlens: torch.Tensor,
    host_offsets: Sequence[int] | None,
) -> torch.Tensor:
    """Call flash-linear-attention's convolution, which wants `[B, T, D]` where the others want `[B, D, T]`."""
    if host_offsets is not None:
        kwargs["cu_seqlens_cpu"] = _cpu_offsets(cu_seqlens, host_offsets)
    output, _ = convolution(args[0].transpose(1, 2).contiguous(), *args[1:], **kwargs, cu_seqlens=cu_seqlens)
    return output.transpose(1, 2)


def _cpu_offsets(cu_seqlens: torch.Tensor, host_offsets: Sequence[int]) -> torch.Tensor:
    """The host copy as the tensor that flash-linear-attention wants: one object per row, because it caches by identity."""
    offsets = _cpu_offsets_of.get(cu_seqlens)
    if offsets is None:
        offsets = _cpu_offsets_of[cu_seqlens] = torch.tensor(host_offsets, dtype=torch.int64)
    return offsets


def _fla_convolution() -> Callable[..., Any] | None:
    # The first name holds from flash-linear-attention 0.6, the second before.
    for name in ("fla.modules.causal_conv1d", "fla.modules.conv.causal_conv1d") if is_available("fla") else ():
        try:
            return import_module(name).causal_conv1d  # type: ignore[no-any-return]
        # Triton without a driver raises RuntimeError on import.
        except (ImportError, RuntimeError):
            continue
    return None


def _takes_boundaries(function: HookedFunction) -> bool:
    keyword = function.upstream.kernel_keyword
    return function.kernel is not None and keyword is not None and keyword in _parameters(function.kernel)


def _fits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a kernel takes these shapes. causal-conv1d has limits of its own."""
    if name != "causal_conv1d_fn":
        return True
    weight = args[1] if len(args) > 1 else kwargs["weight"]
    return weight.shape[0] % 8 == 0 and 2 <= weight.shape[1] <= 4


def _trains_what_it_reads(kwargs: dict[str, Any]) -> bool:
    # The fused path reads the projection's weight and never calls the projection. A frozen weight may carry an adapter,
    # which would get no gradient and no say.
    weight = kwargs.get("outproj_weight")
    return weight is None or weight.requires_grad


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    target = function.forward if isinstance(function, nn.Module) else function
    return frozenset(inspect.signature(target).parameters)
