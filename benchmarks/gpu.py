"""
One GPU, one call, under 8 minutes: kernels against our references, packed against padded training, device reads,
recompilations, memory.

    python benchmarks/gpu.py                              writes benchmarks/results/gpu.json
    python benchmarks/gpu.py --only kernels llama
    python benchmarks/gpu.py --device cpu --size tiny     the same code without a GPU: no number means much

Nothing is downloaded: models are built from configs, in bf16. What is not installed is skipped and named. Every
section is a process of its own with a time budget; one that fails or is out of time keeps what it has measured so far
and does not end the run. The exit code is 1 if a section failed or a limit is broken.

| section | measures |
|---|---|
| `kernels` | installed kernels and our operations, forward and backward, against our operations in float32 |
| `llama`, `qwen3_next`, `bamba` | of about 1B: the proof, tokens/s of TRL padded, TRL `bfd` and ours, memory |
| `syncs` | device-to-host copies and waits per micro-step, by the profiler |
| `compile` | graphs, recompilations and graph breaks of fixed rows, eager and compiled tokens/s |
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Emit, show_environment, show_table, write_json

RESULTS = Path(__file__).parent / "results" / "gpu.json"
# Seconds of each section. A section that needs less leaves the rest to those behind it.
BUDGETS = {"kernels": 90, "llama": 70, "qwen3_next": 80, "bamba": 70, "syncs": 50, "compile": 100}
TOTAL = 470
_MARK = "ROW "


def run_here(section: str, device: str, size: str, seconds: float, emit: Emit) -> None:
    """Measure one section in this process, and hand out each row as soon as it is there."""
    import gpu_kernels
    import gpu_models

    if section == "kernels":
        gpu_kernels.kernels(device, size, emit)
    elif section == "syncs":
        gpu_models.syncs(device, size, emit)
    elif section == "compile":
        gpu_models.compiled(device, size, emit)
    else:
        gpu_models.throughput(section, device, size, seconds, emit)


def run_section(command: list[str], seconds: float) -> dict[str, Any]:
    """
    Run a section's process, for `seconds` at most.

    Returns:
        `dict`: Its `rows`, `seconds`, and `failure`, which is empty or the end of what it wrote to stderr.
    """
    start, environment = time.monotonic(), {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors, text=True)
        try:
            failure = "" if process.wait(seconds) == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            failure = f"out of time after {seconds:.0f} s"
        output.seek(0)
        errors.seek(0)
        rows = [json.loads(line.removeprefix(_MARK)) for line in output if line.startswith(_MARK)]
        if failure:
            failure += ": " + errors.read()[-2_000:].strip()
    return {"rows": rows, "seconds": round(time.monotonic() - start, 1), "failure": failure}


def show_section(section: str, result: dict[str, Any]) -> bool:
    """Print a section, and say whether it ran to its end without a failure in a row."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if "failed" not in row and "skipped" not in row:
            tables.setdefault(row["table"], []).append({key: row[key] for key in row if key != "table"})
    for title, rows in tables.items():
        show_table(f"{section}: {title}", rows)
    for row in result["rows"]:
        for what in ("skipped", "failed"):
            if what in row:
                print(f"{section}: {row['table']}: {what}: {row[what]}")
    if result["failure"]:
        print(f"{section}: failed: {result['failure']}")
    print(f"{section}: {result['seconds']} s", flush=True)
    return not result["failure"] and not any("failed" in row or row.get("holds") == "no" for row in result["rows"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("1b", "tiny"), default="1b", help="of the models and rows")
    parser.add_argument("--only", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument("--seconds", type=float, default=TOTAL, help="for the whole run")
    parser.add_argument("--json", help=f"file to write; the default on a GPU is results/{RESULTS.name}")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        section, seconds = args.worker
        run_here(
            section, args.device, args.size, float(seconds), lambda row: print(_MARK + json.dumps(row), flush=True)
        )
        return 0

    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here. Try `--device cpu --size tiny`.", file=sys.stderr)
        return 2
    deadline, results, all_hold = time.monotonic() + args.seconds, {}, True
    for number, section in enumerate(args.only):
        # It may also use what those before it left over.
        left = max(deadline - time.monotonic(), 0.0)
        later = sum(BUDGETS[name] for name in args.only[number + 1 :])
        seconds = min(left, max(BUDGETS[section], left - later))
        command = [sys.executable, __file__, "--device", args.device, "--size", args.size]
        results[section] = run_section([*command, "--worker", section, str(seconds)], seconds)
        all_hold &= show_section(section, results[section])
    where = show_environment()
    path = args.json or (RESULTS if args.device == "cuda" else None)
    if path:
        write_json(path, {"title": "One GPU", "sections": results, "environment": where})
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
