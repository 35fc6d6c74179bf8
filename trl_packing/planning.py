"""From a prepared data set and the run's settings to plans, rows and ranks."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from .balance import least_headroom
from .config import PackedSFTConfig
from .cost import RowCost
from .dataset import FragmentDataset, SampleTable, read_samples, tokens_digest
from .errors import PackingError
from .packing import PackPlan, plan_batches, plan_packs
from .report import PlanReport
from .sampler import RankedBatchSampler


@dataclass
class TrainPlan:
    """
    The plans of all epochs of one training set.

    Args:
        dataset ([`~datasets.Dataset`]):
            Prepared: `input_ids` and `labels`.
        args ([`PackedSFTConfig`]):
            The run's settings.
        row_cost ([`RowCost`]):
            What a row costs on the model.
        masked (`bool`, *optional*, defaults to `True`):
            Whether labels may be -100. If not, planning reads lengths only.
    """

    dataset: Dataset
    args: PackedSFTConfig
    row_cost: RowCost
    masked: bool = True

    @cached_property
    def samples(self) -> SampleTable:
        """Lengths and trainability of every sample."""
        return read_samples(
            self.dataset,
            max_length=self.args.max_length,
            overlong=self.args.resolved_overlong,
            keep_end=self.args.truncation_mode == "keep_end",
            masked=self.masked,
        )

    @cached_property
    def content(self) -> str:
        """Hash of what a few dozen samples hold."""
        return tokens_digest(self.dataset)

    @property
    def seed(self) -> int:
        """Seed of the sample order, `data_seed` if set."""
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def for_epoch(self, epoch: int) -> PackPlan:
        """Plan one epoch. The fragments are the same in every epoch."""
        if self.args.packing:
            return self._packs(epoch, self.headroom)
        order = self._stock_order(epoch)
        return plan_batches(self.samples.lengths, self.args.per_device_train_batch_size, order=order, **self._cuts)

    @cached_property
    def headroom(self) -> float:
        """
        Share of each row that stays free, so that a step's samples can be dealt to its rows at equal cost.

        It is the least that full rows need ([`least_headroom`]): 0.3 % for chat lengths at 32k, nothing for most mixes
        (`benchmarks/balance.py`). Where lengths fill rows exactly it would cost many rows, and is left out. It does
        not depend on the number of ranks, so that the plan does not either.
        """
        if self.args.balance != "cost" or self.args.row_shape == "fixed":
            return 0.0
        full = self._packs(0, 0.0)
        needed = least_headroom(full.lengths, self.row_cost.per_segment(full.lengths), full.token_budget)
        if not needed or self._packs(0, needed).num_bins > full.num_bins * (1 + 2 * needed) + 1:
            return 0.0
        return needed

    def _packs(self, epoch: int, headroom: float) -> PackPlan:
        budget = self.args.row_budget
        assert budget is not None
        return plan_packs(
            self.samples.lengths,
            budget,
            order=self.args.packing_order,  # type: ignore[arg-type]
            seed=self.seed,
            epoch=epoch,
            max_segments=self.args.max_segments,
            headroom=headroom,
            **self._cuts,
        )

    @property
    def _cuts(self) -> dict[str, Any]:
        return {
            "max_length": self.args.max_length,
            "overlong": self.args.resolved_overlong,
            "truncation": self.args.truncation_mode,
            "exclude": self.samples.untrainable,
        }

    def _stock_order(self, epoch: int) -> np.ndarray[Any, Any]:
        """The Trainer's sample order: a seeded permutation of the samples that are left, or data order."""
        left = np.flatnonzero(~self.samples.untrainable)
        if self.args.train_sampling_strategy == "random":
            generator = torch.Generator().manual_seed(self.seed + epoch)
            left = left[torch.randperm(left.size, generator=generator).numpy()]
        return np.concatenate([left, np.flatnonzero(self.samples.untrainable)])

    def sampler(self, *, num_ranks: int, rank: int) -> RankedBatchSampler:
        """Deal the rows to ranks and micro-steps."""
        return RankedBatchSampler(
            self.for_epoch,
            num_epochs=self._num_epochs(num_ranks),
            num_ranks=num_ranks,
            rank=rank,
            gradient_accumulation_steps=self.args.gradient_accumulation_steps,
            balance=self.args.balance if self.args.packing else "none",  # type: ignore[arg-type]
            row_cost=self.row_cost,
            seed=self.seed,
        )

    def _num_epochs(self, num_ranks: int) -> int:
        if self.args.max_steps <= 0:
            return math.ceil(self.args.num_train_epochs)
        rows_per_step = num_ranks * self.args.gradient_accumulation_steps
        return math.ceil(self.args.max_steps / math.ceil(self.for_epoch(0).num_bins / rows_per_step))

    def report(self, sampler: RankedBatchSampler) -> PlanReport:
        """Say what the plan does to the data, with the rows as `sampler` deals them."""
        return PlanReport.from_plan(
            sampler.plan(0),
            batch_size=self.args.per_device_train_batch_size,
            rows_per_step=sampler.num_ranks * self.args.gradient_accumulation_steps,
            sampler=sampler,
            lengths=self.samples.lengths,
            max_length=self.args.max_length,
            num_epochs=self.args.num_train_epochs,
            max_steps=self.args.max_steps,
            learning_rate=self.args.learning_rate,
        )

    def fragments(self) -> FragmentDataset:
        """The data set of fragments that the sampler's numbers refer to."""
        return FragmentDataset(self.dataset, self.for_epoch(0).fragments)


def plan_fingerprint(args: PackedSFTConfig, plan: TrainPlan | None) -> dict[str, Any]:
    """
    Say what a plan was made from, for a resumed run to compare.

    Args:
        args ([`PackedSFTConfig`]):
            The run's settings.
        plan ([`TrainPlan`], *optional*):
            Of the training set; `None` for a stream.

    Returns:
        `dict[str, Any]`: JSON values.
    """
    fingerprint: dict[str, Any] = {
        "packing": args.packing,
        "token_budget": args.resolved_token_budget if args.packing else None,
        "pad_to_multiple_of": args.pad_to_multiple_of if args.packing else None,
        "max_length": args.max_length,
        "max_segments": args.max_segments,
        "overlong": args.resolved_overlong,
        "truncation_mode": args.truncation_mode,
        "packing_order": args.packing_order,
        "balance": args.balance,
        "seed": args.seed if args.data_seed is None else args.data_seed,
    }
    if plan is None:
        # A stream's place is known in optimiser steps only.
        rows_per_step = args.world_size * args.gradient_accumulation_steps
        samples_per_row = 1 if args.packing else args.per_device_train_batch_size
        fingerprint["ranks x gradient_accumulation_steps x samples per row"] = rows_per_step * samples_per_row
    else:
        samples = plan.samples
        digest = hashlib.sha256(samples.lengths.tobytes() + samples.untrainable.tobytes())
        fingerprint |= {
            "train_sampling_strategy": None if args.packing else args.train_sampling_strategy,
            "headroom (`row_shape`, `balance`)": round(plan.headroom, 9) if args.packing else None,
            "number of samples": int(samples.lengths.size),
            "number of tokens": int(samples.lengths.sum()),
            "hash of the samples' lengths": digest.hexdigest()[:16],
            "hash of some samples' content": plan.content,
        }
    return fingerprint


def plan_evaluation(dataset: Dataset, args: PackedSFTConfig, *, packed: bool) -> PackPlan:
    """
    Plan the rows of an evaluation, in data order where they are not packed. Overlong samples meet the fate that they
    meet in training, so that the same tokens are evaluated in either case.

    Args:
        dataset ([`~datasets.Dataset`]):
            Prepared: `input_ids` and `labels`, not cut.
        args ([`PackedSFTConfig`]):
            The run's settings.
        packed (`bool`):
            Whether rows are filled up to the token budget. Otherwise a row holds `per_device_eval_batch_size` samples.

    Returns:
        [`PackPlan`]: Of the one pass.

    Raises:
        [`PackingError`]: If no sample is left, or one is too long under `overlong: error`.
    """
    max_length, overlong = args.resolved_max_length, args.resolved_overlong
    keep_end = args.truncation_mode == "keep_end"
    samples = read_samples(dataset, max_length=max_length, overlong=overlong, keep_end=keep_end)
    cuts: dict[str, Any] = {
        "max_length": max_length,
        "overlong": overlong,
        "truncation": args.truncation_mode,
        "exclude": samples.untrainable,
    }
    if packed:
        budget = args.row_budget
        if max_length is None:
            # Nothing is cut, so a row holds any sample.
            budget = max(budget or 1, int(samples.lengths.max()))
        assert budget is not None
        return plan_packs(samples.lengths, budget, order="best_fit", max_segments=args.max_segments, **cuts)
    order = np.arange(samples.lengths.size)
    return plan_batches(samples.lengths, args.per_device_eval_batch_size, order=order, **cuts)


def refuse_unfitting_rows(args: PackedSFTConfig, plan: PackPlan | None, *, training: bool, packed: bool) -> None:
    """
    Refuse samples that may not fit into rows of `row_shape: fixed`, and a stream whose samples would be cut.

    Args:
        args ([`PackedSFTConfig`]):
            The run's settings.
        plan ([`PackPlan`], *optional*):
            Of the samples; `None` where their lengths are not known, as of a stream.
        training (`bool`):
            Whether the samples are trained. Otherwise they are evaluated.
        packed (`bool`):
            Whether rows are filled up to the token budget. Otherwise a row holds a batch.

    Raises:
        [`PackingError`]: Naming the settings that do not fit.
    """
    max_length, is_fixed = args.resolved_max_length, args.row_shape == "fixed"
    if plan is None and max_length is None and (packed or is_fixed):
        raise PackingError(
            "Nobody knows the longest sample of a stream, but its rows have a limit, and `max_length` is not set. Set "
            f"`max_length`{', or `eval_packing: false`' if packed else ''}."
        )
    if not is_fixed:
        return
    name = "per_device_train_batch_size" if training else "per_device_eval_batch_size"
    batch_size = 1 if packed else getattr(args, name)
    if plan is None:
        assert max_length is not None
        segments, tokens = batch_size, batch_size * max_length
    elif training and not packed and args.train_sampling_strategy == "random":
        # Any samples may meet in some epoch.
        longest = np.sort(plan.lengths)[-batch_size:]
        segments, tokens = longest.size, int(longest.sum())
    else:
        counts = plan.sum_over_bins(np.ones_like(plan.lengths)), plan.bin_tokens
        segments, tokens = (int(values.max(initial=0)) for values in counts)
    multiple = args.pad_to_multiple_of or 1
    needed = {"max_segments": segments, "token_budget": -(-tokens // multiple) * multiple}
    shape = {"max_segments": args.max_segments, "token_budget": args.row_budget}
    small = [key for key, most in shape.items() if most is not None and needed[key] > most]
    if small:
        has, needs = (" and ".join(f"`{key}: {values[key]}`" for key in small) for values in (shape, needed))
        what, way_out = "a sample", f"{'lower' if args.max_length else 'set'} `max_length`"
        if batch_size > 1:
            what, way_out = f"a batch (`{name}: {batch_size}`)", f"lower `{name}`"
        raise PackingError(f"Rows have the shape of {has}, but {what} may need {needs}. Set that, or {way_out}.")
