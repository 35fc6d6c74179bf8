"""
Training throughput in real tokens per CPU second: TRL, transformers and ours, in one run.

    python benchmarks/throughput.py                               all variants, rows of 1k, 4k and 8k, 3 rounds
    python benchmarks/throughput.py --rows 16384 --only "TRL bfd" "ours, bfd rows"
    python benchmarks/throughput.py --model bamba --rows 4096     a tiny hybrid, which TRL can only pad here
    python benchmarks/throughput.py --jobs 2 --json FILE          two measurements at a time, one core each

A Llama of hidden size 256 and 6 layers, or a tiny hybrid, trains on `lognormal` lengths. Each measurement is a
process of its own with one thread; a round runs every variant once, so that a slow minute of the machine hits all of
them. For every row size TRL and ours train the very same rows, packed by TRL's `bfd`: only the attention differs, and
the losses must be equal. `ours, planned` are our own rows of that size and `ours, fixed` those of `row_shape: fixed`;
the samples are so many that they fill whole rows, as a large data set does. What the fixed shape costs is less than a
machine changes between two processes; `fixed.py` measures that. Length-grouped batches need samples to group, so that
variant has its own, longer data set. Peak memory is the process's, less what it had before training.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from common import show
from distributions import DISTRIBUTIONS, draw

VOCAB_SIZE = 4096
ROWS = (1024, 4096, 8192)
MODELS = ("llama", "tiny", "qwen3_next", "bamba")
BATCH_SIZE = 16
# transformers sorts within groups of a quarter of the batches: three of them here, and one epoch of four groups.
GROUPED_SAMPLES = 12 * BATCH_SIZE
PADDED = ("TRL padded", "TRL length-grouped")
PACKED = ("HF flattening", "TRL bfd", "ours, bfd rows", "ours, planned", "ours, fixed")
# Without the packages TRL refuses packed hybrids, and transformers mixes them up or refuses.
HYBRID_PACKED = ("ours, planned", "ours, fixed")


def samples_of(variant: str, row: int, num_tokens: int, distribution: str = "lognormal") -> list[list[int]]:
    """Random tokens of a distribution's lengths, about `num_tokens` or one row of them."""
    if variant == "TRL length-grouped":
        lengths = np.minimum(draw(distribution, GROUPED_SAMPLES), row)
    else:
        lengths = _filling(np.minimum(draw(distribution, 2 * max(num_tokens, row)), row), row, max(num_tokens, row))
    rng = np.random.default_rng(0)
    return [rng.integers(3, 250, length).tolist() for length in lengths]


def _filling(lengths: np.ndarray[Any, Any], row: int, num_tokens: int) -> np.ndarray[Any, Any]:
    """As many of the lengths as fill whole rows best, with `num_tokens` or up to a row less."""
    from trl_packing import plan_packs

    totals = np.cumsum(lengths)
    counts = np.flatnonzero((totals > num_tokens - row) & (totals <= num_tokens)) + 1
    plans = {count: plan_packs(lengths[:count], row, max_length=row, seed=42) for count in counts.tolist()}
    best = max(plans, key=lambda count: float(plans[count].fill_rate))
    return lengths[:best]


def config_of(model: str, row: int) -> Any:
    from transformers import LlamaConfig

    from trl_packing.quickstart.tiny import tiny_config

    if model != "llama":
        return tiny_config("llama" if model == "tiny" else model)
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=row,
    )


def build(variant: str, model: str, row: int, num_tokens: int, distribution: str, folder: str) -> Any:
    """Make the trainer of a variant."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments
    from trl import SFTConfig, SFTTrainer, pack_dataset

    from trl_packing import PackedSFTConfig, PackedSFTTrainer, register_ops
    from trl_packing.quickstart.tiny import byte_tokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = samples_of(variant, row, num_tokens, distribution)
    dataset = Dataset.from_dict({"input_ids": samples, "labels": samples})
    ours, bfd = variant.startswith("ours"), "bfd" in variant
    if ours:
        register_ops()
    if bfd:
        dataset = pack_dataset(dataset, row, "bfd")
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "num_train_epochs": 1,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 1,
        "train_sampling_strategy": "sequential" if bfd else "random",
    }
    attention = "varlen" if ours else "sdpa"
    network = AutoModelForCausalLM.from_config(config_of(model, row), attn_implementation=attention)
    if variant == "HF flattening":
        mean = sum(map(len, samples)) / len(samples)
        settings |= {"per_device_train_batch_size": round(row / mean), "include_num_input_tokens_seen": True}
        return Trainer(
            model=network,
            args=TrainingArguments(**settings),
            train_dataset=dataset,
            data_collator=DataCollatorWithFlattening(),
        )
    settings |= {"max_length": None, "router_aux_loss_coef": 0.0}
    if variant in PADDED:
        # Counts pads too.
        settings |= {"include_num_input_tokens_seen": "all"}
        settings |= {"per_device_train_batch_size": BATCH_SIZE, "max_length": row}
    if variant == "TRL length-grouped":
        settings |= {"train_sampling_strategy": "group_by_length"}
    if variant == "TRL bfd":
        settings |= {"padding_free": True}
    if variant in ("ours, planned", "ours, fixed"):
        settings |= {"packing": True, "max_length": row, "token_budget": row}
    if variant == "ours, fixed":
        settings |= {"row_shape": "fixed", "max_segments": max(row // 16, 16)}
    kind, args = (PackedSFTTrainer, PackedSFTConfig) if ours else (SFTTrainer, SFTConfig)
    extra = {"isolation_check": "off"} if ours else {}
    return kind(
        model=network, args=args(**settings, **extra), train_dataset=dataset, processing_class=byte_tokenizer()
    )


def measure(variant: str, model: str, row: int, num_tokens: int, distribution: str) -> dict[str, Any]:
    """Train one epoch in this process, and measure from the begin of the first step to the end of the last."""
    from transformers import TrainerCallback

    with tempfile.TemporaryDirectory() as folder:
        trainer = build(variant, model, row, num_tokens, distribution, folder)
        marks: list[tuple[float, float]] = []

        class Marks(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if not marks:
                    marks.append((time.process_time(), 0))

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if "loss" in (logs or {}):
                    marks.append((time.process_time(), logs.get("num_tokens", logs.get("num_input_tokens_seen"))))

        trainer.add_callback(Marks())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer.train()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        seconds, tokens = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "tokens_per_second": tokens / seconds,
        "peak_mib": peak / 1024,
        "losses": losses,
        "padding_share": 1 - tokens / trainer.state.num_input_tokens_seen if variant in PADDED else 0.0,
    }


def variants(model: str, rows: list[int], only: list[str]) -> list[tuple[str, int]]:
    """What is measured. Padded batches have no rows: their number is the longest sample that they take."""
    packed = PACKED if model == "llama" else HYBRID_PACKED
    pairs = [(name, 4096) for name in PADDED] + [(name, row) for row in rows for name in packed]
    return [pair for pair in pairs if pair[0] in only]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--tokens", type=int, default=16_384, help="tokens of the rows of one measurement, at least 1 row"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="row sizes in tokens")
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--lengths", choices=DISTRIBUTIONS, default="lognormal", help="distribution of the samples")
    parser.add_argument("--only", nargs="+", choices=PADDED + PACKED, default=list(PADDED + PACKED))
    parser.add_argument("--jobs", type=int, default=1, help="measurements at a time; no more than there are cores")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        result = measure(args.worker[0], args.model, int(args.worker[1]), args.tokens, args.lengths)
        print("RESULT " + json.dumps(result))
        return
    todo = [pair for _ in range(args.rounds) for pair in variants(args.model, args.rows, args.only)]
    results: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = pool.map(lambda pair: run_worker(*pair, args.model, args.tokens, args.lengths), todo)
        for number, (pair, result) in enumerate(zip(todo, runs, strict=True), start=1):
            results.setdefault(pair, []).append(result)
            rate = f"{result['tokens_per_second']:,.0f} tokens/s"
            print(f"{number} of {len(todo)}: {pair[0]}, rows of {pair[1]}: {rate}", file=sys.stderr)
    title = f"Real tokens per CPU second, {args.model}, {args.lengths} lengths"
    notes = f"One thread, medians of {args.rounds} rounds, {args.jobs} at a time."
    show(title, table(results), args.json, notes)


def run_worker(variant: str, row: int, model: str, num_tokens: int, distribution: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", variant, str(row)]
    command += ["--tokens", str(num_tokens), "--model", model, "--lengths", distribution]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    raise SystemExit(f"{variant} at {row} failed:\n{done.stderr[-3000:]}")


def table(results: dict[tuple[str, int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    medians = {
        key: {name: statistics.median(run[name] for run in runs) for name in ("tokens_per_second", "peak_mib")}
        for key, runs in results.items()
    }

    def against(key: tuple[str, int], other: tuple[str, int], name: str) -> Any:
        return medians[key][name] / medians[other][name] if other in medians else ""

    rows = []
    for (variant, row), numbers in medians.items():
        key, bfd = (variant, row), ("TRL bfd", row)
        packed = variant not in PADDED
        rows.append(
            {
                "variant": variant,
                "row": row if packed else "",
                "tokens/s": numbers["tokens_per_second"],
                "x padded": against(key, ("TRL padded", 4096), "tokens_per_second"),
                "x TRL bfd": against(key, bfd, "tokens_per_second") if packed else "",
                "x planned": against(key, ("ours, planned", row), "tokens_per_second") if "fixed" in variant else "",
                "peak MiB": numbers["peak_mib"],
                "x its peak": against(key, bfd, "peak_mib") if packed else "",
                "loss difference": _loss_difference(results, key, bfd) if variant == "ours, bfd rows" else "",
            }
        )
    return rows


def _loss_difference(results: dict[tuple[str, int], list[dict[str, Any]]], *keys: tuple[str, int]) -> str:
    if any(key not in results for key in keys):
        return ""
    losses = zip(*(results[key][0]["losses"] for key in keys), strict=True)
    return f"{max(abs(ours / theirs - 1) for ours, theirs in losses):.1e}"


if __name__ == "__main__":
    main()
