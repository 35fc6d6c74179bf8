"""
The `kernels` section of gpu.py: every implementation of every operation against our operation in float32.

An implementation gets the same bf16 values as the reference. Its errors are relative root mean squares, of the output,
of the worst gradient and of the worst gradient of a gate, with limits 0.005, 0.01 and 0.02. `leak` is how far other
segments move when one is replaced: it must be 0. `tail` is the difference, relative to the largest number, when the
last offset is repeated three times as `row_shape: fixed` does. `x memory` is peak memory against half a row.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import Emit, guarded
from transformers.utils import is_flash_attn_2_available

from trl_packing import Boundaries
from trl_packing._compat import is_available
from trl_packing.memory import measured_peak
from trl_packing.ops.attention import segment_attention, varlen_attention
from trl_packing.ops.masked_attention import masked_attention
from trl_packing.register import kernel_calls
from trl_packing.register.inventory import UPSTREAM, HookedFunction, find_hooked_functions

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from tiny_models import tiny_model

Tensors = dict[str, torch.Tensor]
Call = Callable[[Tensors, Boundaries], torch.Tensor]
LIMITS = {"output": 0.005, "gradient": 0.01, "gate gradient": 0.02}
GATES = frozenset({"g", "beta", "dt", "A", "dt_bias"})
ROW = {"1b": 8_192, "tiny": 128}
ROUNDS = {"1b": 5, "tiny": 1}
# A model that has the operation: its modeling file holds the package's kernel.
MODEL_OF = {
    "chunk_gated_delta_rule": "qwen3_next",
    "causal_conv1d_fn": "qwen3_next",
    "mamba_chunk_scan_combined": "bamba",
    "chunk_kda": "kimi_linear",
}
PACKAGES = ("flash_attn", "fla", "causal_conv1d", "mamba_ssm")


def kernels(device: str, size: str, emit: Emit, build: Callable[[str], torch.nn.Module] = tiny_model) -> None:
    """Examine attention, then the operations of recurrent layers."""
    torch.manual_seed(0)
    for package in PACKAGES:
        if not is_available(package):
            emit({"table": package, "skipped": "not installed"})
    examine("attention", attention_calls(device), attention_inputs(ROW[size]), device, size, emit)
    for name, model_type in MODEL_OF.items():
        try:
            hooked = find_hooked_functions(build(model_type), {})
            function = next(function for function in hooked if function.upstream.name == name)
            options, inputs = operation_inputs(name, ROW[size])
            examine(name, operation_calls(function, options, device), inputs, device, size, emit)
        except Exception as error:
            emit({"table": name, "failed": f"{type(error).__name__}: {str(error)[:300]}"})


def examine(operation: str, calls: dict[str, Call], inputs: Tensors, device: str, size: str, emit: Emit) -> None:
    """Emit one row per implementation. The first call is the reference."""
    total = ROW[size]
    boundaries = Boundaries(_lengths(total))
    # In float32 is what layers keep in it: decays and their parameters.
    inputs = {
        name: tensor.to(device, torch.float32 if name in ("g", "A", "D", "dt_bias") else torch.bfloat16)
        for name, tensor in inputs.items()
    }
    (_, reference), *others = calls.items()
    expected = results(reference, {name: tensor.float() for name, tensor in inputs.items()}, boundaries)
    for name, call in others:
        guarded(emit, operation, name, partial(_row, name, call, inputs, boundaries, expected, device, ROUNDS[size]))


def _row(
    name: str,
    call: Call,
    inputs: Tensors,
    boundaries: Boundaries,
    expected: Tensors,
    device: str,
    rounds: int,
) -> dict[str, Any]:
    found = results(call, inputs, boundaries)
    errors = dict.fromkeys(LIMITS, 0.0)
    for tensor, value in found.items():
        kind = "output" if tensor == "output" else "gate gradient" if tensor in GATES else "gradient"
        errors[kind] = max(errors[kind], _relative_rms(value, expected[tensor]))
    leak = leak_of(call, inputs, boundaries)
    again = results(call, inputs, Boundaries(boundaries.lengths, num_offsets=boundaries.num_offsets + 3))
    tail = max(_relative_largest(again[tensor], found[tensor]) for tensor in found)
    forward, both = seconds_of(call, inputs, boundaries, device, rounds)
    half, whole = (peak(call, *_head_of(inputs, boundaries, parts), device) for parts in (2, 1))
    holds = leak == 0 and tail < 1e-2 and all(errors[kind] <= limit for kind, limit in LIMITS.items())
    return {
        "implementation": name,
        "forward ms": 1e3 * forward,
        "with backward ms": 1e3 * both,
        "MiB": whole / 2**20,
        "x memory": whole / half,
        **{f"{kind} error": f"{error:.1e}" for kind, error in errors.items()},
        "leak": f"{leak:.1e}",
        "tail": f"{tail:.1e}",
        "holds": "yes" if holds else "no",
    }


# ---- implementations


def attention_calls(device: str) -> dict[str, Call]:
    """The reference, then flash-attn, torch's varlen kernel, ours in both forms, and SDPA with a mask."""
    calls: dict[str, Call] = {"reference": _segments}
    if device == "cuda":
        if is_flash_attn_2_available():
            calls["flash-attn"] = _flash
        calls["torch varlen_attn"] = lambda inputs, boundaries: varlen_attention(
            **inputs, cu_seqlens=_on_device(boundaries.cu_seqlens, inputs), max_seqlen=boundaries.max_seqlen
        )
    return calls | {"ours, segments": _segments, "ours, compiled form": _masked, "SDPA with a T x T mask": _sdpa}


def operation_calls(function: HookedFunction, options: dict[str, Any], device: str) -> dict[str, Call]:
    """The reference, then the package's kernel as the dispatcher calls it, then ours in both forms."""
    ours = function.upstream.ours
    assert ours is not None

    def by_lengths(inputs: Tensors, boundaries: Boundaries) -> torch.Tensor:
        args, kwargs = _as_layers_do(inputs, options)
        return _first(ours(*args, **kwargs, lengths=boundaries.lengths))

    def by_seq_idx(inputs: Tensors, boundaries: Boundaries) -> torch.Tensor:
        args, kwargs = _as_layers_do(inputs, options)
        return _first(ours(*args, **kwargs, seq_idx=_on_device(boundaries.seq_idx, inputs)))

    def kernel(inputs: Tensors, boundaries: Boundaries) -> torch.Tensor:
        boundary = boundaries.seq_idx if function.upstream.kernel_keyword == "seq_idx" else boundaries.cu_seqlens
        args, kwargs = _as_layers_do(inputs, options)
        boundary = _on_device(boundary, inputs)
        return _first(kernel_calls.call_kernel(function, args, kwargs, boundary, boundaries.offsets))

    def fla(inputs: Tensors, boundaries: Boundaries) -> torch.Tensor:
        convolution, cu_seqlens = kernel_calls.fla_convolution(), _on_device(boundaries.cu_seqlens, inputs)
        assert convolution is not None
        args, kwargs = _as_layers_do(inputs, options)
        return kernel_calls.call_fla_convolution(convolution, args, kwargs, cu_seqlens, boundaries.offsets)

    calls: dict[str, Call] = {"reference": by_lengths}
    if device in kernel_calls.KERNEL_DEVICES:
        if kernel_calls.takes_boundaries(function):
            calls[f"{function.package} kernel"] = kernel
        if function.upstream.name == "causal_conv1d_fn" and kernel_calls.fla_convolution() is not None:
            calls["fla convolution"] = fla
    return calls | {"ours, host lengths": by_lengths, "ours, seq_idx": by_seq_idx}


def _as_layers_do(inputs: Tensors, options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tensors by position, whose names differ among packages, except those that layers pass by keyword."""
    names = [name for name in inputs if name in ("g", "beta", "D", "dt_bias")]
    args = tuple(tensor for name, tensor in inputs.items() if name not in names)
    return args, {**{name: inputs[name] for name in names}, **options}


def _segments(inputs: Tensors, boundaries: Boundaries) -> torch.Tensor:
    return segment_attention(**inputs, lengths=boundaries.lengths)


def _masked(inputs: Tensors, boundaries: Boundaries) -> torch.Tensor:
    return masked_attention(
        **inputs, cu_seqlens=_on_device(boundaries.cu_seqlens, inputs), max_seqlen=boundaries.max_seqlen
    )


def _sdpa(inputs: Tensors, boundaries: Boundaries) -> torch.Tensor:
    seq_idx = _on_device(boundaries.seq_idx, inputs)[0]
    mask = (seq_idx[:, None] == seq_idx).tril()
    return F.scaled_dot_product_attention(**inputs, attn_mask=mask, enable_gqa=True)


def _flash(inputs: Tensors, boundaries: Boundaries) -> torch.Tensor:
    function = importlib.import_module("flash_attn").flash_attn_varlen_func
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in inputs.values())
    offsets, longest = _on_device(boundaries.cu_seqlens, inputs), boundaries.max_seqlen
    out = function(q, k, v, offsets, offsets, longest, longest, causal=True)
    return out.transpose(0, 1)[None]


# ---- inputs


def attention_inputs(total: int) -> Tensors:
    return {
        "query": torch.randn(1, 16, total, 128),
        "key": torch.randn(1, 4, total, 128),
        "value": torch.randn(1, 4, total, 128),
    }


def operation_inputs(name: str, total: int) -> tuple[dict[str, Any], Tensors]:
    """Options, and tensors of order 1 in the order of the operation's arguments."""
    rand, randn = torch.rand, torch.randn
    if name == "causal_conv1d_fn":
        inputs = {"x": randn(1, total, 2_048).transpose(1, 2), "weight": randn(2_048, 4) / 2, "bias": randn(2_048)}
        return {"activation": "silu"}, inputs
    if name == "mamba_chunk_scan_combined":
        row = (1, total, 1, 128)
        inputs = {"x": randn(1, total, 32, 64), "dt": randn(1, total, 32), "A": -rand(32) - 0.1}
        inputs |= {"B": randn(row) / 8, "C": randn(row) / 8, "D": randn(32), "dt_bias": randn(32)}
        return {"chunk_size": 256, "dt_softplus": True}, inputs
    heads = 16 if name == "chunk_gated_delta_rule" else 8
    inputs = {key: randn(1, total, heads, 128) for key in ("query", "key", "value")}
    inputs["g"] = -rand(1, total, heads, *([128] if name == "chunk_kda" else []))
    return {"use_qk_l2norm_in_kernel": True}, inputs | {"beta": rand(1, total, heads)}


def _lengths(total: int) -> tuple[int, ...]:
    """Single tokens, short and long segments; one half of the row is one segment."""
    shorter = (1, 1, total // 8 - 5, total // 8 + 9)
    return (*shorter, total // 2 - sum(shorter), total // 2)


def _head_of(inputs: Tensors, boundaries: Boundaries, parts: int) -> tuple[Tensors, Boundaries]:
    """The first half of a row, or the whole, cut into segments of one sixteenth of the whole."""
    total, length = boundaries.total_tokens // parts, boundaries.total_tokens // 16
    head = {
        name: tensor.narrow(tensor.shape.index(boundaries.total_tokens), 0, total).contiguous()
        if boundaries.total_tokens in tensor.shape
        else tensor
        for name, tensor in inputs.items()
    }
    return head, Boundaries((length,) * (total // length))


# ---- measuring


def results(call: Call, inputs: Tensors, boundaries: Boundaries) -> Tensors:
    """Output and gradients of a weighted sum of it."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    output = call(leaves, boundaries)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(output.shape, generator=generator).to(output.device, torch.bfloat16).to(output.dtype)
    gradients = torch.autograd.grad(output, list(leaves.values()), weights)
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def leak_of(call: Call, inputs: Tensors, boundaries: Boundaries) -> float:
    """How far outputs outside the fourth segment move when its tokens are replaced."""
    total, (start, stop) = boundaries.total_tokens, boundaries.offsets[3:5]
    changed = {name: tensor.clone() for name, tensor in inputs.items()}
    for tensor in changed.values():
        if total in tensor.shape:
            tensor.narrow(tensor.shape.index(total), start, stop - start).mul_(0.5)
    with torch.no_grad():
        before, after = call(inputs, boundaries), call(changed, boundaries)
    moved = (before.float() - after.float()).abs().movedim(before.shape.index(total), 0)
    assert moved[start:stop].max() > 0
    return float(torch.cat([moved[:start], moved[stop:]]).max())


def seconds_of(call: Call, inputs: Tensors, boundaries: Boundaries, device: str, rounds: int) -> tuple[float, float]:
    """Median seconds of the forward pass, and of both."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}

    def clock() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    forwards, boths = [], []
    for _ in range(rounds + 1):
        start = clock()
        output = call(leaves, boundaries)
        middle = clock()
        torch.autograd.grad(output, list(leaves.values()), torch.ones_like(output))
        boths.append(clock() - start)
        forwards.append(middle - start)
    return statistics.median(forwards[1:]), statistics.median(boths[1:])


def peak(call: Call, inputs: Tensors, boundaries: Boundaries, device: str) -> int:
    """Most bytes that a forward and backward pass holds beyond its inputs."""
    if device != "cuda":
        return measured_peak(lambda: results(call, inputs, boundaries))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results(call, inputs, boundaries)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _on_device(boundary: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    return boundary.to(next(iter(inputs.values())).device)


def _relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _relative_largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


assert set(MODEL_OF) <= set(UPSTREAM)
