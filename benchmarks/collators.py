"""
What it costs to lay one row out, beside TRL's and transformers' collators in the same run.

    python benchmarks/collators.py              medians of 15 rounds
    python benchmarks/collators.py --json FILE

A row is filled with samples of `lognormal` lengths. `TRL` gets lists of Python integers, which is its default data
format;
`ours` gets the numpy views that the trainer reads from Arrow, and, for comparison, the same lists. `ours, read and
collate` also reads the samples from the data set by their numbers in the plan.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import show
from datasets import Dataset
from distributions import draw
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packing import PackedCollator
from trl_packing.dataset import FragmentDataset

# Calls timed together, as a loader makes them: one row after the other.
_CALLS = 10


def samples_of(total: int) -> list[np.ndarray[Any, Any]]:
    lengths = draw("lognormal", total)
    ends = np.cumsum(lengths)
    lengths = lengths[: int(np.searchsorted(ends, total)) + 1]
    lengths[-1] -= lengths.sum() - total
    rng = np.random.default_rng(0)
    return [rng.integers(3, 30_000, length) for length in lengths]


def variants(total: int) -> dict[str, Callable[[], Any]]:
    arrays = samples_of(total)
    numpy_samples = [{"input_ids": ids, "labels": ids} for ids in arrays]
    lists = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in arrays]
    dataset = Dataset.from_list(lists)
    fragments = np.stack([np.arange(len(arrays)), np.zeros(len(arrays), int), [ids.size for ids in arrays]], axis=1)
    reader, numbers = FragmentDataset(dataset, fragments), list(range(len(arrays)))
    ours, trl = PackedCollator(), DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    flattening = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    row, expected = ours(numpy_samples), trl(lists)
    assert all(torch.equal(row[key], value) for key, value in expected.items() if isinstance(value, torch.Tensor))
    return {
        "TRL, lists": lambda: trl(lists),
        "transformers flattening, lists": lambda: flattening(lists),
        "ours": lambda: ours(numpy_samples),
        "ours, lists": lambda: ours(lists),
        "ours, read and collate": lambda: ours(reader.__getitems__(numbers)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32_768, 131_072])
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    for total in args.tokens:
        calls = variants(total)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.rounds):
            for name, call in calls.items():
                start = time.process_time()
                for _ in range(_CALLS):
                    call()
                times[name].append((time.process_time() - start) / _CALLS)
        trl = statistics.median(times["TRL, lists"])
        for name, seconds in times.items():
            median = statistics.median(seconds)
            row = rows.setdefault(name, {"collator": name})
            row |= {f"ms at {total // 1024}k": median * 1e3, f"x TRL at {total // 1024}k": median / trl}
    show("CPU milliseconds to lay out one row", list(rows.values()), args.json)


if __name__ == "__main__":
    main()
