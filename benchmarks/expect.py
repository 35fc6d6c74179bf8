"""
What packing gains for which length distribution, beside 1 / (1 - padding share).

    python benchmarks/expect.py                     all distributions, medians of 3 rounds
    python benchmarks/expect.py --rounds 1 --tokens 20000
    python benchmarks/expect.py --json results/expect.json && python benchmarks/plot.py

A tiny Llama trains the same samples padded by TRL, 16 in a batch, and packed by ours, in rows of 2,048 tokens, to
which lengths are cut; one thread, CPU time. The padding share is that of the very batches. `of it` is the measured
speed-up against 1 / (1 - padding share). It is above 1 where attention is much of the work, as in so small a model:
SDPA computes all scores of a padded batch under a mask, and only the causal half of a segment. The two columns at the
end are arithmetic on 100,000 uncut samples in random batches of 4 and 16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import numpy as np
from common import show
from distributions import DISTRIBUTIONS, draw
from throughput import run_worker

ROW = 2_048
NAMES = [name for name in DISTRIBUTIONS if name != "longtail128"]


def padding_share(lengths: np.ndarray[Any, Any], batch_size: int) -> float:
    """Share of pads in random batches."""
    batches = lengths[: lengths.size // batch_size * batch_size].reshape(-1, batch_size)
    return float(1 - batches.sum() / (batches.max(axis=1).sum() * batch_size))


def measure(name: str, rounds: int, num_tokens: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"TRL padded": [], "ours, planned": []}
    share = 0.0
    for _ in range(rounds):
        for variant, values in rates.items():
            result = run_worker(variant, ROW, "tiny", num_tokens, name)
            values.append(result["tokens_per_second"])
            share = result["padding_share"] or share
    padded, packed = (statistics.median(values) for values in rates.values())
    ideal, speed_up = 1 / (1 - share), packed / padded
    return {
        "lengths": name,
        "padding share": share,
        "1/(1-share)": ideal,
        "padded tokens/s": padded,
        "packed tokens/s": packed,
        "speed-up": speed_up,
        "of it": speed_up / ideal,
        **{f"share of {size}, uncut": padding_share(draw(name, 100_000), size) for size in (4, 16)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=60_000, help="real tokens per measurement")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    rows = []
    for name in args.only:
        rows.append(measure(name, args.rounds, args.tokens))
        print(f"{name}: {rows[-1]['speed-up']:.2f}x", file=sys.stderr)
    show("Packed against padded by length distribution", rows, args.json, f"Medians of {args.rounds} rounds.")


if __name__ == "__main__":
    main()
