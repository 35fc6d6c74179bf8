"""
Calls of the packages' kernels, with boundaries in the keyword, dtype and layout that each of them wants.

Shapes: B batch rows, T tokens in the row, D channels, N segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .._compat import is_available
from .inventory import HookedFunction, parameters

# Devices that the packages have kernels for.
KERNEL_DEVICES = ("cuda", "xpu")

_cpu_offsets_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def takes_boundaries(function: HookedFunction) -> bool:
    """Say whether there is a kernel and its signature has the keyword for boundaries."""
    keyword = function.upstream.kernel_keyword
    if function.kernel is None or keyword is None or keyword not in parameters(function.kernel):
        return False
    # mamba-ssm's fused path calls causal-conv1d, and fails with a TypeError where that is missing.
    return function.upstream.role != "fused" or is_available("causal_conv1d")


def fits_kernel(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether the kernel takes tensors of these shapes. Only causal-conv1d has limits."""
    if name != "causal_conv1d_fn":
        return True
    weight = args[1] if len(args) > 1 else kwargs["weight"]
    return bool(weight.shape[0] % 8 == 0 and 2 <= weight.shape[1] <= 4)


def call_kernel(
    function: HookedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    boundary: torch.Tensor,
    host_offsets: Sequence[int] | None,
) -> Any:
    """
    Call a kernel on a packed row. Keywords that it does not have are dropped, as transformers does.

    Args:
        function ([`HookedFunction`]):
            One for which [`takes_boundaries`] holds.
        args (`tuple`):
            Positional arguments of the layer's call.
        kwargs (`dict[str, Any]`):
            Keywords of the layer's call without the boundaries.
        boundary (`torch.Tensor`):
            Integer of shape `[N + 1]` or `[1, T]`, as the kernel's keyword says.
        host_offsets (`Sequence[int]`, *optional*):
            The same offsets on the host.

    Returns:
        What the kernel returns.
    """
    kernel, keyword = function.kernel, function.upstream.kernel_keyword
    assert kernel is not None
    accepted = parameters(kernel)
    kwargs = {name: value for name, value in kwargs.items() if name in accepted}
    if keyword == "cu_seqlens":
        if host_offsets is not None and "cu_seqlens_cpu" in accepted:
            kwargs["cu_seqlens_cpu"] = _cpu_offsets(boundary, host_offsets)
        return kernel(*args, **kwargs, cu_seqlens=boundary)
    # With segments, causal-conv1d reads channels-last only.
    if function.upstream.name == "causal_conv1d_fn" and args[0].stride(1) != 1:
        args = (args[0].transpose(1, 2).contiguous().transpose(1, 2), *args[1:])
    return kernel(*args, **kwargs, seq_idx=boundary.to(torch.int32).contiguous())


def fla_convolution() -> Callable[..., Any] | None:
    """Give flash-linear-attention's Triton convolution, the one for a GPU without causal-conv1d, if it is there."""
    # The first name holds from flash-linear-attention 0.6, the second before.
    for name in ("fla.modules.causal_conv1d", "fla.modules.conv.causal_conv1d") if is_available("fla") else ():
        try:
            return import_module(name).causal_conv1d  # type: ignore[no-any-return]
        # Triton without a driver raises RuntimeError on import.
        except (ImportError, RuntimeError):
            continue
    return None


def call_fla_convolution(
    convolution: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cu_seqlens: torch.Tensor,
    host_offsets: Sequence[int] | None,
) -> torch.Tensor:
    """Call [`fla_convolution`], which takes `[B, T, D]` where the layer's call and the result are `[B, D, T]`."""
    accepted = parameters(convolution)
    kwargs = {name: value for name, value in kwargs.items() if name in accepted}
    if host_offsets is not None:
        kwargs["cu_seqlens_cpu"] = _cpu_offsets(cu_seqlens, host_offsets)
    output, _ = convolution(args[0].transpose(1, 2).contiguous(), *args[1:], **kwargs, cu_seqlens=cu_seqlens)
    return output.transpose(1, 2)


def _cpu_offsets(cu_seqlens: torch.Tensor, host_offsets: Sequence[int]) -> torch.Tensor:
    """Give one int64 tensor per row, because flash-linear-attention caches by identity."""
    offsets = _cpu_offsets_of.get(cu_seqlens)
    if offsets is None:
        offsets = _cpu_offsets_of[cu_seqlens] = torch.tensor(host_offsets, dtype=torch.int64)
    return offsets
