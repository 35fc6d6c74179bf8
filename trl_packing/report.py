"""What the plan does to the data, as text and JSON, before a token is trained."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .packing import PackPlan


@dataclass(frozen=True)
class PlanReport:
    """
    Numbers of one epoch's plan.

    Args:
        num_samples, num_tokens (`int`):
            Of the data set.
        num_trained_samples, num_trained_tokens (`int`):
            Of the plan.
        num_rows (`int`):
            Packed rows.
        token_budget (`int`):
            Most tokens in a row, or 0 where a row holds a number of samples.
        fill_rate (`float`):
            Tokens in all rows divided by rows times budget, in [0, 1].
        segments_per_row (`float`):
            Mean.
        padded_tokens (`int`):
            Tokens that the same samples cost in padded batches in random order.
        padding_share (`float`):
            Share of those that are pads, in [0, 1].
        num_cut_samples, num_cut_tokens, num_split_samples, num_dropped_samples, num_dropped_tokens, num_masked_samples,
        num_masked_tokens (`int`):
            What became of overlong samples, and of samples without a label to train on.
        optimizer_steps (`int`):
            Steps of the epoch.
    """

    num_samples: int
    num_tokens: int
    num_trained_samples: int
    num_trained_tokens: int
    num_rows: int
    token_budget: int
    fill_rate: float
    segments_per_row: float
    padded_tokens: int
    padding_share: float
    num_cut_samples: int
    num_cut_tokens: int
    num_split_samples: int
    num_dropped_samples: int
    num_dropped_tokens: int
    num_masked_samples: int
    num_masked_tokens: int
    optimizer_steps: int

    @classmethod
    def from_plan(cls, plan: PackPlan, *, batch_size: int, rows_per_step: int) -> PlanReport:
        """
        Count what a plan does.

        Args:
            plan ([`PackPlan`]):
                Of one epoch.
            batch_size (`int`):
                Samples of the padded batch to compare with.
            rows_per_step (`int`):
                Rows of an optimiser step, on all ranks.

        Returns:
            [`PlanReport`]: Of that epoch.
        """
        padded = padded_tokens(plan.lengths, batch_size)
        return cls(
            num_samples=plan.num_samples,
            num_tokens=plan.num_tokens,
            num_trained_samples=int(np.unique(plan.fragments[:, 0]).size),
            num_trained_tokens=plan.num_planned_tokens,
            num_rows=plan.num_bins,
            token_budget=plan.token_budget,
            fill_rate=plan.fill_rate,
            segments_per_row=plan.num_fragments / plan.num_bins,
            padded_tokens=padded,
            padding_share=1 - plan.num_planned_tokens / padded,
            num_cut_samples=plan.num_cut_samples,
            num_cut_tokens=plan.num_cut_tokens,
            num_split_samples=plan.num_split_samples,
            num_dropped_samples=plan.num_dropped_samples,
            num_dropped_tokens=plan.num_dropped_tokens,
            num_masked_samples=plan.num_masked_samples,
            num_masked_tokens=plan.num_masked_tokens,
            optimizer_steps=-(-plan.num_bins // rows_per_step),
        )

    def to_dict(self) -> dict[str, Any]:
        """Give the numbers as JSON values."""
        return asdict(self)

    def to_text(self) -> str:
        """Give the numbers as lines of at most 100 columns."""
        budget = f" of {self.token_budget:,} tokens, {self.fill_rate:.1%} full" if self.token_budget else ""
        lines = [
            f"Plan: {self.num_trained_samples:,} samples, {self.num_trained_tokens:,} tokens in {self.num_rows:,} rows"
            f"{budget}, {self.segments_per_row:.1f} samples a row, {self.optimizer_steps:,} steps an epoch.",
            f"Padded batches would compute {self.padded_tokens:,} tokens, {self.padding_share:.1%} of them pads; packed "
            "rows have none.",
        ]
        fates = (
            (self.num_cut_samples, f"cut to `max_length`, {self.num_cut_tokens:,} tokens lost"),
            (self.num_split_samples, "split into fragments, no token lost"),
            (self.num_dropped_samples, f"dropped as overlong, {self.num_dropped_tokens:,} tokens"),
            (self.num_masked_samples, f"without a label to train on, dropped, {self.num_masked_tokens:,} tokens"),
        )
        lines += [f"{number:,} sample{'s' if number > 1 else ''} {fate}." for number, fate in fates if number]
        return "\n".join(lines)

    def save(self, folder: str | Path) -> None:
        """Write `plan.json` and `plan.txt` into a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        (folder / "plan.txt").write_text(self.to_text() + "\n", encoding="utf-8")


def padded_tokens(lengths: np.ndarray[Any, Any], batch_size: int) -> int:
    """
    Count the tokens, pads included, of padded batches in random order.

    Args:
        lengths (`np.ndarray`):
            Tokens of each sample.
        batch_size (`int`):
            Samples in a batch.

    Returns:
        `int`: Tokens computed in an epoch.
    """
    shuffled = np.random.default_rng(0).permutation(lengths)
    starts = np.arange(0, shuffled.size, batch_size)
    longest = np.maximum.reduceat(shuffled, starts)
    sizes = np.diff(np.append(starts, shuffled.size))
    return int((longest * sizes).sum())
