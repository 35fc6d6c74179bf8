"""
Does `check_isolation` ever doubt an exact model? Every architecture that the audit found exact, by many seeds.

    python benchmarks/false_alarms.py                              20 seeds, two processes
    python benchmarks/false_alarms.py --seeds 2 --types llama bamba

The architectures and attention implementations are the exact ones in `results/audit.json`. Each model is built once
per dtype; every seed shuffles the entries of each of its weights and draws other tokens. Any report that is not ok is
a false alarm, is printed in full, and makes the exit code 1. Numbers go to `results/false_alarms.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from common import environment
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from tiny_models import tiny_model  # noqa: E402

from trl_packing import check_isolation, register_ops, unregister_ops  # noqa: E402

DTYPES = ("float32", "bfloat16")


def exact_cells(types: list[str] | None) -> dict[str, list[str]]:
    """Read the attention implementations with which each type is exact."""
    cells = json.loads((ROOT / "benchmarks" / "results" / "audit.json").read_text())["cells"]
    found: dict[str, list[str]] = {}
    for cell in cells:
        is_wanted = types is None or cell["model_type"] in types
        if is_wanted and cell["operations"] == "ours" and cell["status"] == "exact":
            found.setdefault(cell["model_type"], []).append(cell["attention"])
    return found


def shuffle_weights(model: nn.Module, seed: int) -> None:
    """Give each weight's entries new places: another model, whose weights have the scale of the type's own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            order = torch.randperm(weight.numel(), generator=generator)
            weight.copy_(weight.flatten()[order].view_as(weight))


def check_type(model_type: str, attentions: list[str], num_seeds: int) -> dict[str, Any]:
    """Check one type with each attention, dtype and seed."""
    _be_quiet()
    start, alarms, checks, rounded = time.perf_counter(), [], 0, 0
    for attention in attentions:
        for dtype in DTYPES:
            register_ops()
            model = tiny_model(model_type, getattr(torch, dtype), attention)
            register_ops(model)
            for seed in range(num_seeds):
                if seed:
                    shuffle_weights(model, seed)
                report = check_isolation(model, seed=seed, host_offsets=True)
                checks += 1
                rounded += report.rounding > 0
                if not report.ok:
                    alarms.append({"attention": attention, "dtype": dtype, "seed": seed, "text": report.to_text()})
            unregister_ops()
    return {
        "model_type": model_type,
        "attentions": attentions,
        "checks": checks,
        "alarms": alarms,
        "judged as rounding": rounded,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _be_quiet() -> None:
    transformers.logging.set_verbosity_error()
    logging.getLogger("kernels.layer.layer").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def main() -> int:
    """Run the checks and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--types", nargs="+", default=None, help="only these model types")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "false_alarms.json")
    args = parser.parse_args()
    cells, start, results = exact_cells(args.types), time.perf_counter(), []
    # Forked processes would share torch's threads.
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(check_type, name, attentions, args.seeds) for name, attentions in cells.items()]
        for number, job in enumerate(jobs, 1):
            result = job.result()
            results.append(result)
            minutes = (time.perf_counter() - start) / 60
            print(
                f"{number:3d}/{len(jobs)} {result['model_type']:26s}{result['checks']:5d} checks"
                f"{len(result['alarms']):4d} alarms{result['seconds']:8.1f} s  ({minutes:.1f} min)",
                flush=True,
            )
            for alarm in result["alarms"]:
                print(f"FALSE ALARM, {alarm['attention']}, {alarm['dtype']}, seed {alarm['seed']}", file=sys.stderr)
                print(alarm["text"], file=sys.stderr, flush=True)
    num_checks, num_alarms = (
        sum(result["checks"] for result in results),
        sum(len(result["alarms"]) for result in results),
    )
    summary = {"checks": num_checks, "false alarms": num_alarms, "seeds": args.seeds, "dtypes": DTYPES}
    print(json.dumps(summary))
    if args.types is None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({**summary, "environment": environment()})[:-1]
        lines = ",\n".join(json.dumps(result) for result in results)
        args.json.write_text(f'{head}, "types": [\n{lines}\n]}}\n')
    return 1 if num_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
