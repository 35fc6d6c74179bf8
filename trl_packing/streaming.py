"""
Packed rows from a stream whose length is not known.

Every rank reads the whole stream, makes the same rows, and keeps every R-th. Ranks therefore agree on the number of
micro-steps without talking, whatever the shards hold: no rank waits for a row that another does not have. The price is
that each rank tokenises all samples. The end is filled up with rows without loss, so that all ranks end on a whole
optimiser step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset

from .boundaries import IGNORE_INDEX
from .config import PackedSFTConfig
from .errors import PackingError
from .packing import StreamPacker


class RowStream(torch.utils.data.IterableDataset[list[dict[str, Any]]]):
    """
    The samples of each packed row of one rank, read from a prepared stream.

    Args:
        dataset ([`~datasets.IterableDataset`]):
            Prepared: columns `input_ids` and `labels`.
        args ([`PackedSFTConfig`]):
            The run's settings.
        packed (`bool`):
            Whether rows are filled up to the token budget. Otherwise a row holds `samples_per_row` samples.
        samples_per_row (`int`):
            Samples of a row that is not filled up to a budget.
        num_ranks, rank (`int`):
            Number of ranks, and this one.
        rows_per_step (`int`, *optional*, defaults to `1`):
            Micro-steps that all ranks complete together; the end is filled up to a multiple.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        args: PackedSFTConfig,
        *,
        packed: bool,
        samples_per_row: int,
        num_ranks: int,
        rank: int,
        rows_per_step: int = 1,
    ) -> None:
        self.dataset = dataset
        self.max_length = args.resolved_max_length
        self.packed = packed
        self.samples_per_row = samples_per_row
        self.num_ranks = num_ranks
        self.rank = rank
        self.rows_per_step = rows_per_step
        self.settings: dict[str, Any] = {
            "max_length": self.max_length,
            "overlong": args.resolved_overlong,
            "truncation": args.truncation_mode,
            "max_segments": args.max_segments,
        }
        self.token_budget = args.row_budget if packed else None
        self.counts: dict[str, int] = {}

    def set_epoch(self, epoch: int) -> None:
        """Let a shuffled stream take another order."""
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        number = 0
        for number, row in enumerate(self._rows(), start=1):
            if (number - 1) % self.num_ranks == self.rank:
                yield row
        # Equal micro-steps on every rank, and whole optimiser steps.
        rows_of_a_step = self.num_ranks * self.rows_per_step
        for filler in range(number, -(-number // rows_of_a_step) * rows_of_a_step):
            if filler % self.num_ranks == self.rank:
                yield []

    def _rows(self) -> Iterator[list[dict[str, Any]]]:
        # A budget no row reaches makes the packer count samples instead of tokens.
        budget = self.token_budget or 2**31 - 1
        settings = dict(self.settings)
        if not self.packed:
            settings |= {"max_segments": self.samples_per_row, "num_open_rows": 1}
        packer = StreamPacker(budget, **settings)
        waiting: dict[int, dict[str, Any]] = {}
        masked = 0
        for number, sample in enumerate(self.dataset):
            if not self._is_trainable(sample):
                masked += 1
                continue
            waiting[packer.counts["num_samples"]] = {**sample, "fragment": number}
            yield from self._cut(packer.add(len(sample["input_ids"])), waiting, packer)
        yield from self._cut(packer.flush(), waiting, packer)
        self.counts = {**packer.counts, "num_masked_samples": masked}
        # A loader's worker may have no shard of the stream; its siblings have.
        is_alone = torch.utils.data.get_worker_info() is None
        if is_alone and not packer.counts["num_samples"] - packer.counts["num_dropped_samples"]:
            raise PackingError(
                f"At least one sample must be left to train on, but of the stream's samples {masked} have no trained "
                f"label and {packer.counts['num_dropped_samples']} are overlong. Check the data, its labels and "
                "`max_length`."
            )
        self._report()

    def _cut(
        self, rows: list[np.ndarray[Any, Any]], waiting: dict[int, dict[str, Any]], packer: StreamPacker
    ) -> Iterator[list[dict[str, Any]]]:
        for spans in rows:
            yield [_slice(waiting[sample], start, length) for sample, start, length in spans.tolist()]
        if rows:
            still_needed = set(packer.waiting_samples)
            for sample in [sample for sample in waiting if sample not in still_needed]:
                del waiting[sample]

    def _is_trainable(self, sample: dict[str, Any]) -> bool:
        labels = np.asarray(sample.get("labels", sample["input_ids"]))
        if self.max_length is not None and self.settings["overlong"] == "truncate":
            keep_end = self.settings["truncation"] == "keep_end"
            labels = labels[-self.max_length :] if keep_end else labels[: self.max_length]
        return bool((labels[1:] != IGNORE_INDEX).any())

    def _report(self) -> None:
        if self.rank == 0:
            named = ", ".join(
                f"{name.removeprefix('num_').replace('_', ' ')} {number:,}" for name, number in self.counts.items()
            )
            print(f"End of the stream: {named}.")


def _slice(sample: dict[str, Any], start: int, length: int) -> dict[str, Any]:
    if start == 0 and length == len(sample["input_ids"]):
        return sample
    if sample.get("seq_lengths") is not None:
        raise PackingError(
            f"The data is packed already and cannot be cut, but packed sample {sample['fragment']} has "
            f"{len(sample['input_ids'])} tokens. Raise `max_length`, or pass the data unpacked."
        )
    columns = ("input_ids", "labels")
    parts = {name: sample[name][start : start + length] for name in columns if name in sample}
    return {**parts, "fragment": sample["fragment"]}
