"""
Compilations of `torch.compile` over ragged packed rows: TRL's rows and ours, in one run.

    python benchmarks/compile.py                     20 rows of 256 tokens each, dense and hybrid
    python benchmarks/compile.py --rows 5 --json FILE
    python benchmarks/compile.py --experts eager     with a mixture of experts, and how its experts are computed

Both sides get the same samples. TRL's rows are as long as their samples and run sdpa; its hybrid has stand-ins for the
packages' kernels, without which it refuses to run; the compiler does not look into them, as flash-linear-attention
has it. Ours are `row_shape: fixed` with our operations.

Counted is what reaches the backend: a graph that is handed over is a compilation, and the graphs that one forward pass
runs are its graph breaks plus one. PyTorch's own counters mislead: each recompilation counts its graph breaks again,
and the list of compilations keeps the last 64. PyTorch gives a function up after 8 compilations, and runs it as it is;
here that limit is lifted, so that every compilation that rows ask for is counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from common import show
from torch._dynamo import lookup_backend
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from kernel_stand_ins import Kernels
from tiny_models import tiny_model

from trl_packing import PackedCollator, register_ops, unregister_ops

BUDGET = 256
# Experts are another matter, which `--experts` shows.
WITHOUT_EXPERTS = {"mlp_only_layers": [0, 1, 2]}
MODELS = {"dense": ("llama", {}), "hybrid": ("qwen3_next", WITHOUT_EXPERTS), "Mamba hybrid": ("bamba", {})}


class Counted:
    """A backend that counts what it is given, and how often that runs."""

    def __init__(self, backend: str) -> None:
        self.backend, self.compiled, self.calls = lookup_backend(backend), 0, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.compiled += 1
        function = self.backend(graph, inputs)

        def run(*args: Any) -> Any:
            self.calls += 1
            return function(*args)

        return run


def ragged(number: int) -> list[list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(number):
        # One row in three is of short samples, so that the longest one differs.
        longest = int(torch.randint(16, BUDGET // 2, (1,), generator=generator))
        samples, left = [], BUDGET
        while (length := int(torch.randint(2, longest, (1,), generator=generator))) <= left and len(samples) < 60:
            ids = torch.randint(3, 128, (length,), generator=generator).tolist()
            samples.append({"input_ids": ids, "labels": ids})
            left -= length
        rows.append(samples)
    return rows


def measure(side: str, kind: str, number: int, backend: str, experts: str | None = None) -> dict[str, Any]:
    torch._dynamo.reset()
    model_type, overrides = MODELS[kind]
    if experts is not None:
        overrides = {}
    patch = pytest.MonkeyPatch()
    if side == "ours":
        register_ops()
        model: Any = tiny_model(model_type, attn_implementation="varlen", **overrides)
        register_ops(model)
        collate: Any = PackedCollator(token_budget=BUDGET, max_segments=60)
    else:
        model = tiny_model(model_type) if kind == "dense" else _with_stand_ins(patch, model_type, overrides)
        collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    if experts is not None:
        model.set_experts_implementation(experts)
    counted = Counted(backend)
    compiled, bounds, per_row, calls = torch.compile(model.train(), backend=counted), set(), [], []
    start, difference = time.process_time(), 0.0
    with torch._dynamo.config.patch(recompile_limit=1_000, accumulated_recompile_limit=10_000):
        for samples in ragged(number):
            row = collate(samples)
            del row["labels"]
            bounds.add(row["max_length_q"])
            before, called = counted.compiled, counted.calls
            loss = compiled(use_cache=False, **row).logits.square().mean()
            loss.backward()
            per_row.append(counted.compiled - before)
            calls.append(counted.calls - called)
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                expected = model(use_cache=False, **row).logits.square().mean()
            difference = max(difference, abs(loss.item() / expected.item() - 1))
    unregister_ops()
    patch.undo()
    return {
        "rows of": side,
        "model": kind,
        "graph breaks": max(calls) - 1,
        "compiled at row 1": per_row[0],
        "compiled later": sum(per_row[1:]),
        "rows that compiled": sum(number > 0 for number in per_row),
        "bounds": len(bounds),
        "CPU s": time.process_time() - start,
        "loss difference": f"{difference:.0e}",
    }


def _with_stand_ins(patch: pytest.MonkeyPatch, model_type: str, overrides: dict[str, Any]) -> Any:
    packages = ("fla", "causal_conv1d", "mamba_ssm")
    kernels = Kernels(patch, *packages)
    # A growing record of calls would be compiled into every graph.
    patch.setattr(kernels, "_record", lambda *args, **kwargs: None)
    for package in packages:
        for name, stand_in in kernels._functions()[package].items():
            patch.setattr(sys.modules[package], name, torch.compiler.disable(stand_in))
    return kernels.model(model_type, **overrides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--experts", choices=("eager", "batched_mm", "grouped_mm"), help="only the first hybrid")
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = ["hybrid"] if args.experts else args.models
    rows = [measure(side, kind, args.rows, args.backend, args.experts) for kind in kinds for side in ("TRL", "ours")]
    show(f"torch.compile over {args.rows} ragged rows, backend {args.backend}", rows, args.json)


if __name__ == "__main__":
    main()
