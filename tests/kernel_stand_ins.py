"""
Stand-ins for the packages' kernels, for tests of who is called with which keywords on a machine without a GPU.

Each has the signature of the real one (flash-linear-attention 0.6, causal-conv1d 1.7, mamba-ssm 2.3), records what it
got, and computes the segments it was told of. Like the real ones they fail off the GPU, unless a test says that this
device is one. transformers looks for packages when a modeling file is imported, so models are built from a second copy
of it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_models import tiny_config
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trl_packing.ops.causal_conv1d import causal_conv1d
from trl_packing.ops.gated_delta_rule import gated_delta_rule
from trl_packing.ops.kda import kimi_delta_attention
from trl_packing.ops.mamba2_scan import mamba2_scan
from trl_packing.register import kernel_calls

Recorded = list[tuple[str, dict[str, Any]]]


class Kernels:
    """
    Fake packages in `sys.modules`, and what was called in them.

    Args:
        monkeypatch (`pytest.MonkeyPatch`):
            Undoes everything after the test.
        packages (`str`):
            Names to import: `"fla"`, `"causal_conv1d"`, `"mamba_ssm"`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
        self.monkeypatch = monkeypatch
        self.calls: Recorded = []
        for package in packages:
            module = self._add_module(package)
            for name, stand_in in self._functions()[package].items():
                setattr(module, name, stand_in)
        if "fla" in packages:
            self._add_module("fla.modules")
            self._add_module("fla.modules.causal_conv1d").causal_conv1d = self._fla_convolution

    def say_cpu_is_a_gpu(self) -> None:
        self.monkeypatch.setattr(kernel_calls, "KERNEL_DEVICES", ("cpu",))

    def model(self, model_type: str, **config: Any) -> nn.Module:
        """Build a tiny model from a copy of its modeling file that is imported now."""
        return build(self.monkeypatch, model_type, **config)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [arguments for called, arguments in self.calls if called == name]

    def _add_module(self, name: str) -> Any:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, origin="stand-in", is_package=True)
        module.__path__ = []
        self.monkeypatch.setitem(sys.modules, name, module)
        return module

    def _record(self, name: str, tensor: torch.Tensor, **arguments: Any) -> None:
        if tensor.device.type not in kernel_calls.KERNEL_DEVICES:
            raise RuntimeError("0 active drivers ([]). There should only be one.")
        self.calls.append((name, arguments))

    def _functions(self) -> dict[str, dict[str, Callable[..., Any]]]:
        return {
            "fla": {
                "chunk_gated_delta_rule": self._chunk_gated_delta_rule,
                "fused_recurrent_gated_delta_rule": self._step,
                "chunk_kda": self._chunk_kda,
                "fused_recurrent_kda": self._step,
            },
            "causal_conv1d": {"causal_conv1d_fn": self.causal_conv1d_fn, "causal_conv1d_update": self._step},
            "mamba_ssm": {
                "mamba_chunk_scan_combined": self._mamba_chunk_scan_combined,
                "mamba_split_conv1d_scan_combined": self._mamba_split_conv1d_scan_combined,
                "selective_state_update": self._step,
            },
        }

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        self._record("step", args[0])
        raise AssertionError("These tests take no step on a GPU.")

    def _chunk_gated_delta_rule(
        self,
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        chunk_indices=None,
        **kwargs,
    ):
        self._record("chunk_gated_delta_rule", q, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, rest=kwargs)
        sizes = _sizes(cu_seqlens, q.shape[1])
        return gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, lengths=sizes)

    def _chunk_kda(
        self,
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        **kwargs,
    ):
        self._record("chunk_kda", q, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, rest=kwargs)
        sizes = _sizes(cu_seqlens, q.shape[1])
        return kimi_delta_attention(q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, lengths=sizes)

    def causal_conv1d_fn(
        self,
        x,
        weight,
        bias=None,
        seq_idx=None,
        initial_states=None,
        return_final_states=False,
        final_states_out=None,
        activation=None,
    ):
        self._record("causal_conv1d_fn", x, seq_idx=seq_idx, channels_last=x.stride(1) == 1)
        return causal_conv1d(x, weight, bias, activation, lengths=_sizes(seq_idx, x.shape[2]))

    def _fla_convolution(
        self,
        x,
        weight=None,
        bias=None,
        residual=None,
        initial_state=None,
        output_final_state=False,
        activation=None,
        backend="triton",
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        chunk_indices=None,
        cp_context=None,
        **kwargs,
    ):
        self._record("fla convolution", x, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, rest=kwargs)
        sizes = _sizes(cu_seqlens, x.shape[1])
        return causal_conv1d(x.transpose(1, 2), weight, bias, activation, lengths=sizes).transpose(1, 2), None

    def _mamba_chunk_scan_combined(
        self,
        x,
        dt,
        A,
        B,
        C,
        chunk_size,
        D=None,
        z=None,
        dt_bias=None,
        initial_states=None,
        seq_idx=None,
        cu_seqlens=None,
        dt_softplus=False,
        dt_limit=(0.0, float("inf")),
        return_final_states=False,
    ):
        # The real one ignores `cu_seqlens` in training.
        self._record("mamba_chunk_scan_combined", x, seq_idx=seq_idx)
        options = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        return mamba2_scan(x, dt, A, B, C, chunk_size, D, z, lengths=_sizes(seq_idx, x.shape[1]), **options)

    def _mamba_split_conv1d_scan_combined(
        self,
        zxbcdt,
        conv1d_weight,
        conv1d_bias,
        dt_bias,
        A,
        D,
        chunk_size,
        initial_states=None,
        seq_idx=None,
        dt_limit=(0.0, float("inf")),
        return_final_states=False,
        activation="silu",
        rmsnorm_weight=None,
        rmsnorm_eps=1e-6,
        outproj_weight=None,
        outproj_bias=None,
        headdim=None,
        ngroups=1,
        norm_before_gate=True,
    ):
        self._record("mamba_split_conv1d_scan_combined", zxbcdt, seq_idx=seq_idx)
        sizes, num_tokens = _sizes(seq_idx, zxbcdt.shape[1]), zxbcdt.shape[1]
        width = outproj_weight.shape[1]
        z, xbc, dt = zxbcdt.split([width, conv1d_weight.shape[0], dt_bias.shape[0]], dim=-1)
        xbc = causal_conv1d(xbc.transpose(1, 2), conv1d_weight, conv1d_bias, activation, lengths=sizes)
        state = (conv1d_weight.shape[0] - width) // 2
        x, b, c = xbc.transpose(1, 2).split([width, state, state], dim=-1)
        x, b, c = x.unflatten(-1, (-1, headdim)), b.unflatten(-1, (ngroups, -1)), c.unflatten(-1, (ngroups, -1))
        options = {"dt_bias": dt_bias, "dt_softplus": True, "dt_limit": dt_limit}
        y = mamba2_scan(x, dt, A, b, c, chunk_size, D, lengths=sizes, **options).reshape(1, num_tokens, width)
        assert not norm_before_gate
        y = F.rms_norm(y * F.silu(z), (width,), rmsnorm_weight, rmsnorm_eps)
        return F.linear(y, outproj_weight, outproj_bias)


def build(monkeypatch: pytest.MonkeyPatch, model_type: str, **config: Any) -> nn.Module:
    """Import a copy of a modeling file and build a tiny model from it."""
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    original = sys.modules[getattr(transformers, class_name).__module__]
    spec = importlib.util.spec_from_file_location(f"{original.__name__}_copy", original.__file__)
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, copy)
    spec.loader.exec_module(copy)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(copy, class_name)._from_config(tiny_config(model_type, **config)).train()


def _sizes(boundary: torch.Tensor | None, num_tokens: int) -> tuple[int, ...]:
    if boundary is None:
        return (num_tokens,)
    if boundary.ndim == 2:
        return tuple(torch.unique_consecutive(boundary, return_counts=True)[1].tolist())
    # A repeated last offset holds no token.
    return tuple(size for size in boundary.diff().tolist() if size)
