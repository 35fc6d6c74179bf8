"""
What a run costs before its first step: the import of the package, and everything between prepared data and step 1.

    python benchmarks/startup.py                     100,000 samples
    python benchmarks/startup.py --samples 10000 --json FILE
    python benchmarks/startup.py --profile           also where the CPU time of a packed start goes

Samples of `lognormal` lengths are tokenised already and the model is loaded, so that neither counts. A start is the
trainer's constructor and `train` up to the begin of the first step: the checks, the plan, its report, the proof, the
first batch. TRL's is measured beside it, padded, in a process of its own. The limits, of CPU time, are 0.1 s for the
import beyond Python's own and 2 s for the packed start; the exit code is 1 if one is broken.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from common import show
from distributions import draw

MOST_IMPORT, MOST_START = 0.1, 2.0
SIDES = ("TRL padded", "ours, packed", "ours, fixed rows")


def import_seconds() -> float:
    """Median CPU seconds of `import trl_packing` in a fresh interpreter."""
    code = "import time; start = time.process_time(); import trl_packing; print(time.process_time() - start)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return statistics.median(float(run.stdout) for run in runs)


def start_seconds(side: str, num_samples: int, profiled: bool) -> dict[str, float]:
    """CPU seconds from loaded to the first step, in this process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from trl_packing import PackedSFTConfig, PackedSFTTrainer, register_ops
    from trl_packing.quickstart.tiny import byte_tokenizer, tiny_config

    torch.set_num_threads(1)
    lengths = np.minimum(draw("lognormal", num_samples), 1_024)
    tokens = np.random.default_rng(0).integers(3, 250, int(lengths.sum()))
    samples = [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    profiler = cProfile.Profile()

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            times.append(time.process_time())
            profiler.disable()
            control.should_training_stop = True

    with tempfile.TemporaryDirectory() as folder:
        # On disk, as a data set that was tokenised before is.
        Dataset.from_dict({"input_ids": samples, "labels": samples}).save_to_disk(folder)
        dataset = Dataset.load_from_disk(folder)
        # The Trainer collects garbage, and these are many objects.
        samples.clear()
        ours = side != "TRL padded"
        if ours:
            register_ops()
        attention = "varlen" if ours else "sdpa"
        model = AutoModelForCausalLM.from_config(tiny_config(), attn_implementation=attention)
        settings: dict[str, Any] = {"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none"}
        settings |= {"disable_tqdm": True, "save_strategy": "no", "max_length": 1_024}
        settings |= {"packing": True, "token_budget": 8_192} if ours else {}
        settings |= {"row_shape": "fixed", "max_segments": 512} if "fixed" in side else {}
        kind, args = (PackedSFTTrainer, PackedSFTConfig) if ours else (SFTTrainer, SFTConfig)
        arguments, tokenizer = args(**settings), byte_tokenizer()
        times = [time.process_time()]
        if profiled:
            profiler.enable()
        trainer = kind(model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer)
        trainer.add_callback(Stop())
        times.append(time.process_time())
        trainer.train()
    if profiled:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(45)
    return {"constructor": times[1] - times[0], "to step 1": times[2] - times[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print("RESULT " + json.dumps(start_seconds(args.worker, args.samples, args.profile)))
        return 0
    imported = import_seconds()
    rows: list[dict[str, Any]] = [
        {"what": "import trl_packing", "constructor": "", "to step 1": "", "CPU s": imported, "limit": MOST_IMPORT}
    ]
    for side in SIDES:
        result = run_worker(side, args.samples, args.profile and side == "ours, packed")
        limit = MOST_START if side.startswith("ours") else ""
        rows.append({"what": f"start, {side}", **result, "CPU s": sum(result.values()), "limit": limit})
    show(f"CPU seconds before the first step, {args.samples:,} samples", rows, args.json, "One thread.")
    return 1 if any(row["limit"] != "" and row["CPU s"] > row["limit"] for row in rows) else 0


def run_worker(side: str, num_samples: int, profiled: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", side, "--samples", str(num_samples)]
    command += ["--profile"] if profiled else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if profiled:
        print(done.stderr, file=sys.stderr)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, float] = json.loads(line.removeprefix("RESULT "))
            return result
    raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
