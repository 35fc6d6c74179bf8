"""
What `row_shape: fixed` costs beside exact rows, without compiling: the same rows in turns, in one process.

    python benchmarks/fixed.py                             Llama and two tiny hybrids, rows of 4,096, 5 rounds
    python benchmarks/fixed.py --models llama --rows 8192
    python benchmarks/fixed.py --json benchmarks/results/fixed.json

Differences of a few per cent drown in what a machine does from one minute to the next, so no two runs are compared:
two trainers take turns, row by row, each first every other time. A step is reading and collating the row, loss,
backward and AdamW. A round is one epoch, about 32,000 tokens of `lognormal` lengths. Its ratio is the CPU seconds of
the exact rows over those of the fixed ones, on one thread; real tokens are the same. The limit is 0.97, and the exit
code is 1 if the median of a model is below it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from common import show
from throughput import MODELS, build

LEAST = 0.97
SHAPES = {"exact": "ours, planned", "fixed": "ours, fixed"}


class Side:
    """A trainer whose rows are trained one at a time."""

    def __init__(self, shape: str, model: str, row: int, num_tokens: int, folder: str) -> None:
        # The plan's report is no part of the table.
        with contextlib.redirect_stdout(sys.stderr):
            self.trainer = build(SHAPES[shape], model, row, num_tokens, "lognormal", folder)
        self.trainer.model.train()
        self.optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-5)
        self.seconds, self.tokens = 0.0, 0

    def begin(self) -> int:
        """Start an epoch, and say how many rows it has."""
        self.seconds, self.tokens = 0.0, 0
        loader = self.trainer.get_train_dataloader()
        self.rows = iter(loader)
        return len(loader)

    def step(self) -> None:
        """Train the next row."""
        start = time.process_time()
        (row,), num_items = self.trainer.get_batch_samples(self.rows, 1, torch.device("cpu"))
        self.tokens += row["row_info"].num_tokens
        loss = self.trainer.compute_loss(self.trainer.model, row, num_items_in_batch=num_items)
        self.trainer.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.process_time() - start


def measure(model: str, row: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        exact, fixed = (Side(shape, model, row, num_tokens, folder) for shape in SHAPES)
    ratios, rates = [], []
    # The first round warms up.
    for number in range(rounds + 1):
        num_rows, _ = exact.begin(), fixed.begin()
        for place in range(num_rows):
            for side in (exact, fixed) if place % 2 == number % 2 else (fixed, exact):
                side.step()
        assert exact.tokens == fixed.tokens > 0
        if number:
            ratios.append(exact.seconds / fixed.seconds)
            rates.append(exact.tokens / exact.seconds)
    return {
        "model": model,
        "row": row,
        "rows": num_rows,
        "fill": exact.tokens / (num_rows * row),
        "exact tokens/s": statistics.median(rates),
        "fixed x exact": statistics.median(ratios),
        "least round": min(ratios),
        "most": max(ratios),
        "limit": LEAST,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[4_096], help="row sizes in tokens")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of a round")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama", "qwen3_next", "bamba"])
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(model, row, args.tokens, args.rounds) for model in args.models for row in args.rows]
    show("Fixed rows beside exact ones, tokens per CPU second", rows, args.json, f"Medians of {args.rounds} rounds.")
    return 1 if any(row["fixed x exact"] < LEAST for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
