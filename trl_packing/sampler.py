"""Which rank trains which rows at which micro-step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from .cost import RowCost
from .errors import PackingError
from .packing import PackPlan, split_bins


class RankedBatchSampler:
    """First version: rows in plan order, sorted by cost inside each optimiser step."""

    def __init__(
        self,
        plan_for_epoch: Callable[[int], PackPlan],
        *,
        num_epochs: int,
        num_ranks: int = 1,
        rank: int = 0,
        gradient_accumulation_steps: int = 1,
        balance: Literal["cost", "tokens", "none"] = "cost",
        row_cost: RowCost | None = None,
        seed: int = 0,
    ):
        if balance not in ("cost", "tokens", "none"):
            raise PackingError(
                f"`balance` must be one of cost, tokens, none, but it is {balance!r}. Pick one of them."
            )
        self.plan_for_epoch = plan_for_epoch
        self.num_epochs = num_epochs
        self.num_ranks = num_ranks
        self.rank = rank
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.balance = balance
        self.row_cost = row_cost if balance == "cost" and row_cost is not None else RowCost()
        self.seed = seed
        self.epoch = 0
        self._num_rows: int | None = None
        self._plan: tuple[int, PackPlan] | None = None

    @property
    def num_rows(self) -> int:
        if self._num_rows is None:
            self._num_rows = max(self.plan_for_epoch(epoch).num_bins for epoch in range(self.num_epochs))
        return self._num_rows

    def __len__(self) -> int:
        return -(-self.num_rows // self.num_ranks)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def plan(self, epoch: int) -> PackPlan:
        """The plan whose bins `schedule` refers to."""
        if self._plan is None or self._plan[0] != epoch:
            plan = self.plan_for_epoch(epoch)
            self._plan = epoch, split_bins(plan, max(plan.num_bins, min(self.num_rows, plan.num_fragments)))
        return self._plan[1]

    def schedule(self, epoch: int) -> list[list[int]]:
        """Row numbers per micro-step and rank; -1 where a rank has none."""
        plan = self.plan(epoch)
        numbers = np.full((len(self), self.num_ranks), -1)
        numbers.reshape(-1)[: plan.num_bins] = np.arange(plan.num_bins)
        if self.balance != "none":
            costs = np.append(plan.sum_over_bins(self.row_cost.per_segment(plan.lengths)), 0.0)
            for start in range(0, len(self), self.gradient_accumulation_steps):
                step = numbers[start : start + self.gradient_accumulation_steps]
                flat = step.reshape(-1)
                step[:] = flat[np.argsort(-costs[flat], kind="stable")].reshape(step.shape)
        return numbers.tolist()

    def __iter__(self) -> Iterator[list[int]]:
        plan = self.plan(self.epoch)
        for row in self.schedule(self.epoch):
            number = row[self.rank]
            yield plan.bins[number].tolist() if number >= 0 else []

    def fingerprint(self) -> dict[str, Any]:
        return {"num_ranks": self.num_ranks, "balance": self.balance, "seed": self.seed}

    def idle(self, epoch: int) -> tuple[float, float]:
        return 0.0, 0.0
