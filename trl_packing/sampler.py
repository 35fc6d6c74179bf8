"""
Which rank trains which rows at which micro-step, so that ranks that meet after every micro-step wait as little as
possible.

R ranks, F fragments. An optimiser step is `gradient_accumulation_steps` micro-steps of R rows. Two ranks, accumulation
2, bins of cost 9, 3, 4, 8:

```text
                 rank 0  rank 1
balance: none       9       3      micro-step 0 lasts 9
                    4       8      micro-step 1 lasts 8
balance: cost       9       8      the step's rows sorted, then the fragments of each micro-step dealt anew:
                    3       4      9, 8 -> 8.5, 8.5 and 3, 4 -> 3.5, 3.5
```

Nothing of this changes what an optimiser step trains on. Only `window` above 1 exchanges rows between steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np

from .balance import IntArray, equal_rows
from .cost import FloatArray, RowCost
from .errors import PackingError
from .packing import Bins, PackPlan, epoch_generator, split_bins

Balance: TypeAlias = Literal["cost", "tokens", "none"]
# The rows of one optimiser step: by micro-step, then by rank, the fragment numbers. Empty where a rank has none.
StepRows: TypeAlias = list[list[IntArray]]


class RankedBatchSampler:
    """
    Batch sampler that gives one rank its packed rows. Every rank makes the same decisions from the same plan.

    It is a `batch_sampler` for a torch `DataLoader` that nothing else may shard. It has no `batch_size`, because
    accelerate would cut gathered values by it.

    Args:
        plan_for_epoch (`Callable[[int], PackPlan]`):
            Gives the plan of an epoch, the same on every rank. All epochs have the same fragments.
        num_epochs (`int`):
            Epochs to train. All of them are planned once, to find the number of rows that they can have in common.
        num_ranks (`int`, *optional*, defaults to `1`):
            Processes that train.
        rank (`int`, *optional*, defaults to `0`):
            This process.
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Micro-steps per optimiser step.
        balance (`str`, *optional*, defaults to `"cost"`):
            What ranks get equal amounts of: `"cost"` as given by `row_cost`, `"tokens"`, or `"none"` for the rows of
            the plan in order, row i at micro-step `i // num_ranks` on rank `i % num_ranks`.
        row_cost (`Callable[[np.ndarray], float]`, *optional*):
            Cost of a row from the lengths of its segments, a sum over the segments, such as [`RowCost`]. The default
            counts tokens.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the run, used where steps exchange rows.
        window (`int`, *optional*, defaults to `1`):
            Optimiser steps that may exchange rows. Above 1, rows of like cost meet in a micro-step, and every step of
            the window gets its share of each class of cost. Needs accumulation: with one micro-step per step, steps
            would become unlike each other.

    Raises:
        [`PackingError`]: If an argument is out of range.

    Example:

    ```python
    >>> from trl_packing import RankedBatchSampler, plan_packs
    >>> plan = plan_packs([8, 4, 4, 6, 2], 8)
    >>> ranks = [RankedBatchSampler(lambda epoch: plan, num_epochs=1, num_ranks=2, rank=rank) for rank in range(2)]
    >>> [len(sampler) for sampler in ranks]
    [2, 2]
    >>> sorted(fragment for sampler in ranks for row in sampler for fragment in row)
    [0, 1, 2, 3, 4]

    ```
    """

    def __init__(
        self,
        plan_for_epoch: Callable[[int], PackPlan],
        *,
        num_epochs: int,
        num_ranks: int = 1,
        rank: int = 0,
        gradient_accumulation_steps: int = 1,
        balance: Balance = "cost",
        row_cost: Callable[[Any], float] | None = None,
        seed: int = 0,
        window: int = 1,
    ):
        counts = {
            "num_epochs": num_epochs,
            "num_ranks": num_ranks,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "window": window,
        }
        for name, value in counts.items():
            if value < 1:
                raise PackingError(f"`{name}` must be at least 1, but it is {value}. Pass a positive integer.")
        if not 0 <= rank < num_ranks:
            raise PackingError(
                f"`rank` must be from 0 to {num_ranks - 1}, but it is {rank}. Pass this process's number."
            )
        if balance not in ("cost", "tokens", "none"):
            raise PackingError(f"`balance` must be one of cost, tokens, none, but it is {balance!r}. Pick one.")
        if window > 1 and gradient_accumulation_steps == 1:
            raise PackingError(
                f"Steps of one micro-step can't share out rows of like cost, but `window` is {window} and "
                "`gradient_accumulation_steps` is 1. Set `window` to 1, or accumulate."
            )
        self.plan_for_epoch = plan_for_epoch
        self.num_epochs = num_epochs
        self.num_ranks = num_ranks
        self.rank = rank
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.balance = balance
        self.row_cost = row_cost if balance == "cost" and row_cost is not None else RowCost()
        self.seed = seed
        self.window = window
        self.epoch = 0
        self._num_rows: int | None = None
        self._last_plan: tuple[int, PackPlan] | None = None
        self._skipped = 0, 0

    # ---- what the loader uses

    def __len__(self) -> int:
        """Micro-steps per epoch, the same for every rank and every epoch that is trained from its start."""
        return -(-self.num_rows // self.num_ranks)

    def __iter__(self) -> Iterator[list[int]]:
        """Fragment numbers of this rank's row at each micro-step, empty where it has none."""
        # The epoch is that of this call, not of the first row, which a loader may ask for later.
        return self._batches(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives."""
        self.epoch = epoch

    def _batches(self, epoch: int) -> Iterator[list[int]]:
        # What `skip` leaves out is missing at the start: a loader has skipped about as many micro-steps by then.
        yield from ([] for _ in range(self.num_fillers(epoch)))
        for step in self.steps(epoch):
            for rows in step:
                yield rows[self.rank].tolist()

    # ---- plans

    @property
    def num_rows(self) -> int:
        """Rows in every epoch: those of the epoch that needs most."""
        if self._num_rows is None:
            self._num_rows = max(self.plan_for_epoch(epoch).num_bins for epoch in range(self.num_epochs))
        return self._num_rows

    def plan(self, epoch: int) -> PackPlan:
        """
        Give the plan of an epoch before its rows are balanced.

        Args:
            epoch (`int`):
                Epoch number.

        Returns:
            [`PackPlan`]: Bins split where other epochs have more, without the fragments that `skip` left out.
        """
        if self._last_plan is None or self._last_plan[0] != epoch:
            plan = split_bins(self.plan_for_epoch(epoch), self.num_rows)
            if self._skipped[0] == epoch and self._skipped[1]:
                assert isinstance(plan.bins, Bins)
                plan = plan.without(plan.bins.flat[: self._skipped[1]])
            self._last_plan = epoch, plan
        return self._last_plan[1]

    def num_fillers(self, epoch: int) -> int:
        """
        Count the micro-steps without rows that come first, in place of what `skip` left out.

        Args:
            epoch (`int`):
                Epoch number.

        Returns:
            `int`: 0 in an epoch that is trained from its start.
        """
        return len(self) - -(-self.plan(epoch).num_bins // self.num_ranks)

    def trained_plan(self, epoch: int) -> PackPlan:
        """
        Give an epoch's rows as they are trained, on all ranks.

        Args:
            epoch (`int`):
                Epoch number.

        Returns:
            [`PackPlan`]: Bins by micro-step, then by rank. Ranks without a row have no bin.
        """
        rows = [row for step in self.steps(epoch) for micro_step in step for row in micro_step if row.size]
        return replace(self.plan(epoch), bins=Bins.from_arrays(rows))

    def schedule(self, epoch: int) -> list[list[int]]:
        """
        Say which bin of `trained_plan` each rank trains at each micro-step.

        Args:
            epoch (`int`):
                Epoch number.

        Returns:
            `list[list[int]]`: Bin numbers by micro-step, then by rank, -1 where a rank has none.
        """
        filled = np.array([[row.size > 0 for row in rows] for step in self.steps(epoch) for rows in step])
        numbers: list[list[int]] = np.where(filled, np.cumsum(filled).reshape(filled.shape) - 1, -1).tolist()
        return numbers

    # ---- steps

    def steps(self, epoch: int) -> Iterator[StepRows]:
        """
        Deal out an epoch, one optimiser step at a time.

        Args:
            epoch (`int`):
                Epoch number.

        Returns:
            `Iterator[list[list[np.ndarray]]]`: For each step, by micro-step and then by rank, the int64 fragment
                numbers of the row. Only rows of the last micro-step can be empty, or rows of samples too few for the
                ranks. After `skip` the first step may have fewer micro-steps, so that the others end where they do in
                a whole epoch.
        """
        plan, num_ranks = self.plan(epoch), self.num_ranks
        if self.balance == "none" or num_ranks == 1:
            for start, stop in self._step_bounds(epoch):
                rows = list(plan.bins[start:stop])
                yield [_padded(rows[first : first + num_ranks], num_ranks) for first in range(0, len(rows), num_ranks)]
            return
        costs = self._segment_costs(plan)
        for numbers in self._dealt(plan.sum_over_bins(costs), epoch):
            yield [
                equal_rows(
                    plan,
                    costs,
                    _padded([plan.bins[number] for number in numbers[first : first + num_ranks]], num_ranks),
                )
                for first in range(0, len(numbers), num_ranks)
            ]

    @property
    def _rows_per_step(self) -> int:
        return self.num_ranks * self.gradient_accumulation_steps

    def _step_bounds(self, epoch: int) -> list[tuple[int, int]]:
        """First bin of each optimiser step, and the one after its last."""
        first = self._rows_per_step - self.num_fillers(epoch) % self.gradient_accumulation_steps * self.num_ranks
        num_bins = self.plan(epoch).num_bins
        return list(pairwise([0, *range(first, num_bins, self._rows_per_step), num_bins])) if num_bins else []

    def _segment_costs(self, plan: PackPlan) -> FloatArray:
        if isinstance(self.row_cost, RowCost):
            return self.row_cost.per_segment(plan.lengths)
        distinct, places = np.unique(plan.lengths, return_inverse=True)
        return np.array([self.row_cost(distinct[[index]]) for index in range(distinct.size)], dtype=np.float64)[places]

    def _dealt(self, bin_costs: FloatArray, epoch: int) -> Iterator[IntArray]:
        """Bins of each optimiser step in the order of its micro-steps: those of like cost together, heaviest first."""
        steps = self._step_bounds(epoch)
        rng = epoch_generator(self.seed, epoch)
        number = 0
        while number < len(steps):
            start, stop = steps[number]
            end = steps[min(number + self.window, len(steps)) - 1][1]
            if self.window > 1 and end - start == self.window * self._rows_per_step:
                yield from self._exchanged(start, bin_costs[start:end], rng)
                number += self.window
            else:
                yield start + np.argsort(-bin_costs[start:stop], kind="stable")
                number += 1

    def _exchanged(self, start: int, costs: FloatArray, rng: np.random.Generator) -> list[IntArray]:
        """
        Share out the bins of a window over its steps.

        The bins, sorted by cost, form as many classes as a step has micro-steps. Each step gets one micro-step of each
        class, the heaviest of a class for the step that has least so far.
        """
        shape = (self.gradient_accumulation_steps, self.window, self.num_ranks)
        classes = np.argsort(-costs, kind="stable").reshape(shape)
        steps: list[list[IntArray]] = [[] for _ in range(self.window)]
        totals = np.zeros(self.window)
        for groups in classes:
            for group, step in zip(groups, np.argsort(totals, kind="stable"), strict=True):
                steps[step].append(group)
            totals = np.array([costs[np.concatenate(groups_of_step)].sum() for groups_of_step in steps])
        return [start + np.concatenate(steps[step]) for step in rng.permutation(self.window)]

    # ---- reports and resuming

    def idle(self, epoch: int, num_steps: int | None = None) -> tuple[float, float]:
        """
        Simulate the share of time that ranks wait for the slowest one, if they meet at every micro-step.

        Args:
            epoch (`int`):
                Epoch number.
            num_steps (`int`, *optional*):
                Optimiser steps to look at, from the first. The default is all.

        Returns:
            `tuple[float, float]`: `1 - mean / max` over ranks, for the plan's rows in order and for the rows as they
                are trained, by `row_cost` under `balance="cost"`, else by tokens.
        """
        plan = self.plan(epoch)
        costs = self._segment_costs(plan)
        bin_costs = plan.sum_over_bins(costs)
        if num_steps is not None:
            bin_costs = bin_costs[: num_steps * self._rows_per_step]
        before = np.pad(bin_costs, (0, -bin_costs.size % self.num_ranks)).reshape(-1, self.num_ranks)
        after = [
            [costs[row].sum() for row in rows]
            for number, step in zip(range(num_steps or len(self)), self.steps(epoch), strict=False)
            for rows in step
        ]
        return _idle_share(before), _idle_share(np.array(after))

    def num_fragments_trained(self, epoch: int, num_micro_steps: int) -> int:
        """
        Count what all ranks together have trained of an epoch, for `skip`.

        Args:
            epoch (`int`):
                Epoch number.
            num_micro_steps (`int`):
                Micro-steps that are done, up to the end of an optimiser step, or of a window where steps exchange
                rows.

        Returns:
            `int`: Fragments, those included that `skip` left out.
        """
        skipped = self._skipped[1] if self._skipped[0] == epoch else 0
        if num_micro_steps == 0:
            # At the end of a run this is the epoch after its last one, which has no plan.
            return skipped
        plan = self.plan(epoch)
        assert isinstance(plan.bins, Bins)
        num_rows = max(num_micro_steps - self.num_fillers(epoch), 0) * self.num_ranks
        return skipped + int(plan.bins.offsets[min(num_rows, plan.num_bins)])

    def skip(self, epoch: int, num_fragments: int) -> None:
        """
        Leave out the start of an epoch, to go on with another number of ranks or another accumulation.

        Steps train the fragments in the order of the plan, whatever the number of ranks, so a count says which. At the
        same numbers a loader skips batches instead. The micro-steps that are too many come first, without rows, so
        that the length stays the same.

        Args:
            epoch (`int`):
                Epoch number. Others are whole.
            num_fragments (`int`):
                As `num_fragments_trained` of a sampler with the old arguments says.
        """
        self._skipped = epoch, num_fragments
        self._last_plan = None

    def fingerprint(self) -> dict[str, Any]:
        """
        Describe what the rows and their order were made from, for a resumed run to compare.

        Returns:
            `dict[str, Any]`: JSON values by name. Equal fingerprints mean equal rows at every micro-step of every
                rank.
        """
        plan = self.plan_for_epoch(0)
        bins = plan.bins
        assert isinstance(bins, Bins)
        return {
            "num_fragments": plan.num_fragments,
            "num_tokens": plan.num_planned_tokens,
            "token_budget": plan.token_budget,
            "num_rows": self.num_rows,
            "num_ranks": self.num_ranks,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "balance": self.balance,
            "window": self.window,
            "seed": self.seed,
            "lengths": _digest(plan.lengths),
            "bins": _digest(bins.flat.astype(np.int64), bins.offsets),
            "cost": _digest(self._segment_costs(plan)) if self.balance == "cost" else None,
        }


def _padded(rows: list[IntArray], num_ranks: int) -> list[IntArray]:
    return rows + [np.empty(0, dtype=np.int64)] * (num_ranks - len(rows))


def _idle_share(costs: FloatArray) -> float:
    return float(1 - costs.sum() / (costs.shape[1] * costs.max(axis=1).sum()))


def _digest(*arrays: np.ndarray[Any, Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
