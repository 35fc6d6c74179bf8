"""
Packed operations beside transformers' PyTorch references, in one run on one machine.

    python benchmarks/ops.py                the three operations that have limits
    python benchmarks/ops.py --only kda     Kimi delta attention, whose reference takes ten seconds a call
    python benchmarks/ops.py --json FILE    also write the numbers

The reference gets one sequence of 8,192 tokens: it is what a layer without kernels runs unpacked, and on packed rows
it leaks. Ours gets the same tensors as 256, 32 and 1 segments of random lengths, and as 256 by `seq_idx` alone.
Numbers are CPU milliseconds of one thread, forward and backward, median of the rounds; a round runs all variants once.
The exit code is 1 if a limit is broken.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from common import show
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.utils import logging

from trl_packing import Boundaries
from trl_packing.ops.causal_conv1d import causal_conv1d
from trl_packing.ops.gated_delta_rule import gated_delta_rule
from trl_packing.ops.kda import kimi_delta_attention
from trl_packing.ops.mamba2_scan import mamba2_scan

NUM_TOKENS = 8_192
MOST_GROWTH = 1.5
"""256 segments against 32."""


@dataclass
class Case:
    """
    One operation, its reference, and inputs as a model would give them.

    Args:
        reference (`Callable`):
            transformers' PyTorch function.
        ours (`Callable`):
            The packed operation, called with the same arguments plus boundaries.
        inputs (`dict[str, torch.Tensor]`):
            What needs a gradient, by argument name.
        limit (`float`, *optional*):
            Most that 256 segments may cost, as a multiple of the reference.
        options (`dict[str, Any]`, *optional*):
            Further arguments of both.
    """

    reference: Callable[..., Any]
    ours: Callable[..., Any]
    inputs: dict[str, torch.Tensor]
    limit: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def milliseconds(self, function: Callable[..., Any], **kwargs: Any) -> float:
        """Time one forward and backward pass."""
        start = time.process_time()
        result = function(**self.inputs, **self.options, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        output.backward(torch.ones_like(output))
        elapsed = time.process_time() - start
        for tensor in self.inputs.values():
            tensor.grad = None
        return 1e3 * elapsed


def _delta(channels: int | None = None) -> dict[str, torch.Tensor]:
    heads, width = (4, 64) if channels is None else (2, channels)
    inputs = {name: torch.randn(1, NUM_TOKENS, heads, width) for name in ("query", "key", "value")}
    inputs["g"] = -torch.rand(1, NUM_TOKENS, heads, *([] if channels is None else [channels]))
    return inputs | {"beta": torch.rand(1, NUM_TOKENS, heads)}


def _mamba2() -> dict[str, torch.Tensor]:
    inputs = {"hidden_states": torch.randn(1, NUM_TOKENS, 8, 64), "dt": torch.randn(1, NUM_TOKENS, 8)}
    inputs |= {name: torch.randn(1, NUM_TOKENS, 1, 64) / 8 for name in ("B", "C")}
    return inputs | {"A": -torch.rand(8), "D": torch.randn(8), "dt_bias": torch.randn(8)}


def _convolution(channels_last: bool) -> dict[str, torch.Tensor]:
    hidden_states = torch.randn(1, NUM_TOKENS, 512).transpose(1, 2)
    if not channels_last:
        hidden_states = hidden_states.contiguous()
    return {"hidden_states": hidden_states, "weight": torch.randn(512, 4), "bias": torch.randn(512)}


CASES: dict[str, Callable[[], Case]] = {
    "gdn": lambda: Case(
        modeling_qwen3_next.torch_chunk_gated_delta_rule,
        gated_delta_rule,
        _delta(),
        limit=0.6,
        options={"use_qk_l2norm_in_kernel": True},
    ),
    # 64 slots is what the reference is fastest with; Bamba asks for 256.
    "mamba2": lambda: Case(
        modeling_bamba.mamba2_chunk_scan,
        mamba2_scan,
        _mamba2(),
        limit=1.1,
        options={"chunk_size": 64, "dt_softplus": True},
    ),
    # Models hand the convolution a transposed view of the row.
    "conv": lambda: Case(
        modeling_qwen3_next.causal_conv1d_fn, causal_conv1d, _convolution(True), 1.5, {"activation": "silu"}
    ),
    "conv-contiguous": lambda: Case(
        modeling_qwen3_next.causal_conv1d_fn, causal_conv1d, _convolution(False), 1.5, {"activation": "silu"}
    ),
    "kda": lambda: Case(
        modeling_kimi_linear.chunk_kimi_delta_attention,
        kimi_delta_attention,
        _delta(32),
        options={"use_qk_l2norm_in_kernel": True},
    ),
}
DEFAULT = ("gdn", "mamba2", "conv", "conv-contiguous")


def random_lengths(num_segments: int) -> tuple[int, ...]:
    """Cut the row at random places, the same in every run."""
    cuts = np.random.default_rng(0).choice(np.arange(1, NUM_TOKENS), num_segments - 1, replace=False)
    return tuple(np.diff([0, *np.sort(cuts).tolist(), NUM_TOKENS]).tolist())


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Time the reference and each layout of ours, interleaved, after one round that does not count."""
    seq_idx = Boundaries.from_lengths(random_lengths(256)).seq_idx
    variants: dict[str, Callable[[], float]] = {
        "reference": lambda: case.milliseconds(case.reference),
        "256": lambda: case.milliseconds(case.ours, lengths=random_lengths(256)),
        "32": lambda: case.milliseconds(case.ours, lengths=random_lengths(32)),
        "1": lambda: case.milliseconds(case.ours, lengths=(NUM_TOKENS,)),
        "256 by seq_idx": lambda: case.milliseconds(case.ours, seq_idx=seq_idx),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, run in variants.items():
            times[name].append(run())
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=DEFAULT, help="operations to measure")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--json", help="where to write the numbers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.set_verbosity_error()

    rows: list[dict[str, Any]] = []
    broken = []
    for name in args.only:
        case = CASES[name]()
        for tensor in case.inputs.values():
            tensor.requires_grad_()
        times = measure(case, args.rounds)
        ratio, growth = times["256"] / times["reference"], times["256"] / times["32"]
        verdict = {"of reference": ratio, "limit": case.limit or "-", "of 32": growth, "its limit": MOST_GROWTH}
        rows.append({"operation": name, **times, **verdict})
        if growth > MOST_GROWTH or (case.limit is not None and ratio > case.limit):
            broken.append(name)
    show(f"{NUM_TOKENS} tokens, CPU ms, forward and backward", rows, args.json, "One thread.")
    if broken:
        print(f"over the limit: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
