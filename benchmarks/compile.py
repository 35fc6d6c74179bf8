"""
Graph breaks and compilations of `torch.compile` over ragged packed rows: TRL's rows and ours, in one run.

    python benchmarks/compile.py                     20 rows of 256 tokens each, dense and hybrid
    python benchmarks/compile.py --rows 5 --json FILE

Both sides get the same samples. TRL's rows are as long as their samples and run sdpa; its hybrid has stand-ins for the
packages' kernels, without which it refuses to run. Ours are `row_shape: fixed` with our operations. A side's bound is
the number of different `max_length_q`.
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
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from kernel_stand_ins import Kernels
from tiny_models import tiny_model

from trl_packing import PackedCollator, register_ops, unregister_ops

BUDGET = 256
# The experts of a mixture run through an operation that the CPU cannot trace.
HYBRID = ("qwen3_next", {"mlp_only_layers": [0, 1, 2]})
MODELS = {"dense": ("llama", {}), "hybrid": HYBRID}


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


def measure(side: str, kind: str, number: int, backend: str) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    model_type, overrides = MODELS[kind]
    patch = pytest.MonkeyPatch()
    if side == "ours":
        register_ops()
        model: Any = tiny_model(model_type, attn_implementation="varlen", **overrides)
        register_ops(model)
        collate: Any = PackedCollator(token_budget=BUDGET, max_segments=60)
    else:
        model = _with_stand_ins(patch, model_type, overrides) if kind == "hybrid" else tiny_model(model_type)
        collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    compiled, bounds, start = torch.compile(model.train(), backend=backend), set(), time.process_time()
    for samples in ragged(number):
        row = collate(samples)
        del row["labels"]
        bounds.add(row["max_length_q"])
        compiled(use_cache=False, **row).logits.square().mean().backward()
    unregister_ops()
    patch.undo()
    return {
        "rows of": side,
        "model": kind,
        "graph breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
        "recompilations": sum(metric.recompile_reason is not None for metric in get_compilation_metrics()),
        "bounds": len(bounds),
        "CPU s": time.process_time() - start,
    }


def _with_stand_ins(patch: pytest.MonkeyPatch, model_type: str, overrides: dict[str, Any]) -> Any:
    kernels = Kernels(patch, "fla", "causal_conv1d")
    # A growing record of calls would be compiled into every graph.
    patch.setattr(kernels, "_record", lambda *args, **kwargs: None)
    return kernels.model(model_type, **overrides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(side, kind, args.rows, args.backend) for kind in MODELS for side in ("TRL", "ours")]
    show(f"torch.compile over {args.rows} ragged rows, backend {args.backend}", rows, args.json)


if __name__ == "__main__":
    main()
