"""
Training throughput in real tokens per CPU second: TRL padded and packed, beside ours, in one run.

    python benchmarks/throughput.py                     all variants, medians of 3 rounds
    python benchmarks/throughput.py --rounds 1 --tokens 8192
    python benchmarks/throughput.py --json FILE

A Llama of hidden size 256 and 6 layers trains on the `lognormal` distribution. Each measurement is a process of its
own with one thread; a round runs every variant once, so that a slow minute of the machine hits all of them. For every
row size TRL and ours train the very same rows, packed by TRL's `bfd`: only the attention differs, and the losses must
be equal.
`ours, planned` are our own rows of that size. Peak memory is the process's, less what it had before the first step.
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
from typing import Any

import numpy as np
from common import show
from distributions import draw

VOCAB_SIZE = 4096
ROWS = (1024, 4096, 8192)


def build(variant: str, row: int, num_tokens: int, folder: str) -> Any:
    """Make the trainer of a variant on about `num_tokens` real tokens."""
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer, pack_dataset

    from trl_packing import PackedSFTConfig, PackedSFTTrainer, register_ops
    from trl_packing.quickstart.tiny import byte_tokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    register_ops()
    lengths = np.minimum(draw("lognormal", num_tokens), row)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens))]
    rng = np.random.default_rng(0)
    samples = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
    dataset = Dataset.from_dict({"input_ids": samples, "labels": samples})
    stock, packed = variant.startswith("TRL"), "bfd" in variant
    if packed:
        dataset = pack_dataset(dataset, row, "bfd")
    attention = "sdpa" if stock else "varlen"
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=row,
        attn_implementation=attention,
    )
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
        "max_length": None,
        "train_sampling_strategy": "sequential" if packed else "random",
    }
    if variant == "TRL padded":
        settings |= {"per_device_train_batch_size": 16, "max_length": row}
    if variant == "TRL bfd":
        settings |= {"padding_free": True}
    if variant == "ours, planned":
        settings |= {"packing": True, "max_length": row, "token_budget": row}
    kind, args = (SFTTrainer, SFTConfig) if stock else (PackedSFTTrainer, PackedSFTConfig)
    extra = {} if stock else {"isolation_check": "off"}
    return kind(
        model=LlamaForCausalLM(config),
        args=args(**settings, **extra),
        train_dataset=dataset,
        processing_class=byte_tokenizer(),
    )


def measure(variant: str, row: int, num_tokens: int) -> dict[str, Any]:
    """Train one epoch in this process, and measure from the end of the first step."""
    from transformers import TrainerCallback

    with tempfile.TemporaryDirectory() as folder:
        trainer = build(variant, row, num_tokens, folder)
        marks: list[tuple[float, float]] = []

        class Marks(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if "loss" in (logs or {}):
                    marks.append((time.process_time(), logs["num_tokens"]))

        trainer.add_callback(Marks())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer.train()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        seconds, tokens = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"tokens_per_second": tokens / seconds, "peak_mib": peak / 1024, "losses": losses, "steps": len(losses)}


def variants(rows: tuple[int, ...]) -> list[tuple[str, int]]:
    packed = [(name, row) for row in rows for name in ("TRL bfd", "ours, bfd rows", "ours, planned")]
    return [("TRL padded", 4096), *packed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=40_000, help="real tokens per measurement")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="row sizes in tokens")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        result = measure(args.worker[0], int(args.worker[1]), args.tokens)
        print("RESULT " + json.dumps(result))
        return
    results: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        for variant, row in variants(tuple(args.rows)):
            print(f"round {number + 1} of {args.rounds}: {variant}, rows of {row}", file=sys.stderr)
            results.setdefault((variant, row), []).append(run_worker(variant, row, args.tokens))
    show("Real tokens per CPU second, lognormal lengths", table(results), args.json, "One thread, medians.")


def run_worker(variant: str, row: int, num_tokens: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", variant, str(row), "--tokens", str(num_tokens)]
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
    padded = medians["TRL padded", 4096]["tokens_per_second"]
    rows = []
    for (variant, row), numbers in medians.items():
        stock = medians.get(("TRL bfd", row), numbers)
        losses, expected = results[variant, row][0]["losses"], results.get(("TRL bfd", row), [{}])[0].get("losses")
        same = variant == "ours, bfd rows" and max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
        rows.append(
            {
                "variant": variant,
                "row": row,
                "tokens/s": numbers["tokens_per_second"],
                "x TRL padded": numbers["tokens_per_second"] / padded,
                "x TRL bfd": numbers["tokens_per_second"] / stock["tokens_per_second"]
                if variant != "TRL padded"
                else "",
                "peak MiB": numbers["peak_mib"],
                "x its peak": numbers["peak_mib"] / stock["peak_mib"] if variant != "TRL padded" else "",
                "loss difference": f"{same:.1e}" if variant == "ours, bfd rows" else "",
            }
        )
    return rows


if __name__ == "__main__":
    main()
