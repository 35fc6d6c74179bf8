"""The numbers of a plan, and what they mean for steps, learning rate and batch."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..packing import PackPlan

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..sampler import RankedBatchSampler

# Below this many steps a schedule has little room: a warm-up of 3 % is less than 3 steps.
FEW_STEPS = 100
# A packed step with this many times the tokens of a padded one behaves like it.
_ALIKE = (0.8, 1.25)
# What the picture shows: bars of the histogram, points of a fill curve, rows drawn in full.
_NUM_BARS, _NUM_POINTS, _NUM_ROWS = 40, 101, 12
# The simulation of ranks looks at about this many rows, from the first. It deals every fragment in Python.
_SIMULATED_ROWS, _FEWEST_SIMULATED_STEPS = 4_096, 8


@dataclass(frozen=True)
class Shape:
    """
    What the picture is drawn from.

    Args:
        length_edges (`tuple[float, ...]`):
            Edges of the bars of the length histogram, evenly spaced in the logarithm.
        samples_per_length (`tuple[int, ...]`):
            Samples of each bar, before any is cut, split or dropped.
        row_fill (`tuple[float, ...]`):
            Share of the token budget that is filled, from the fullest row to the emptiest, at evenly spaced ranks.
        padded_fill (`tuple[float, ...]`):
            Share of real tokens in padded batches, from the fullest to the emptiest, at evenly spaced shares of all
            the tokens they compute.
        first_rows (`tuple[tuple[int, ...], ...]`):
            Tokens in each segment of the first rows.
    """

    length_edges: tuple[float, ...]
    samples_per_length: tuple[int, ...]
    row_fill: tuple[float, ...]
    padded_fill: tuple[float, ...]
    first_rows: tuple[tuple[int, ...], ...]


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
        max_length (`int`):
            Most tokens of a sample, or 0 for no limit.
        fill_rate (`float`):
            Tokens in all rows divided by rows times budget, in [0, 1].
        segments_per_row (`float`):
            Mean.
        batch_size (`int`):
            Samples of the padded batches that the plan is compared with.
        padded_tokens (`int`):
            Tokens that the same samples cost in padded batches in random order.
        padding_share (`float`):
            Share of those that are pads, in [0, 1].
        speed_up (`float`):
            What training gains if a token costs the same in both, `1 / (1 - padding_share)`.
        num_cut_samples, num_cut_tokens, num_split_samples, num_dropped_samples, num_dropped_tokens,
        num_masked_samples, num_masked_tokens (`int`):
            What became of overlong samples, and of samples without a label to train on.
        num_ranks (`int`):
            Processes that train.
        gradient_accumulation_steps (`int`):
            Micro-steps per optimiser step.
        optimizer_steps, padded_optimizer_steps (`int`):
            Steps of an epoch, packed and in padded batches with the same ranks and accumulation.
        tokens_per_step, padded_tokens_per_step (`float`):
            Real tokens that a step trains on, mean.
        num_epochs (`float`):
            Epochs of the run, possibly a part of one.
        run_steps, padded_run_steps (`int`):
            Steps of the whole run, packed, and padded for the same epochs.
        idle_before, idle_after (`float`, *optional*):
            Simulated share of time that ranks wait for the slowest one, for rows in the plan's order and as they are
            dealt. None with one rank.
        learning_rate (`float`, *optional*):
            Of the run.
        longest_fragment (`int`):
            Tokens in the longest segment.
        shape ([`Shape`]):
            What the picture is drawn from.
    """

    num_samples: int
    num_tokens: int
    num_trained_samples: int
    num_trained_tokens: int
    num_rows: int
    token_budget: int
    max_length: int
    fill_rate: float
    segments_per_row: float
    batch_size: int
    padded_tokens: int
    padding_share: float
    speed_up: float
    num_cut_samples: int
    num_cut_tokens: int
    num_split_samples: int
    num_dropped_samples: int
    num_dropped_tokens: int
    num_masked_samples: int
    num_masked_tokens: int
    num_ranks: int
    gradient_accumulation_steps: int
    optimizer_steps: int
    padded_optimizer_steps: int
    tokens_per_step: float
    padded_tokens_per_step: float
    num_epochs: float
    run_steps: int
    padded_run_steps: int
    idle_before: float | None
    idle_after: float | None
    learning_rate: float | None
    longest_fragment: int
    shape: Shape

    @classmethod
    def from_plan(
        cls,
        plan: PackPlan,
        *,
        batch_size: int,
        rows_per_step: int,
        sampler: RankedBatchSampler | None = None,
        lengths: Sequence[int] | np.ndarray[Any, Any] | None = None,
        max_length: int | None = None,
        num_epochs: float = 1.0,
        max_steps: int = 0,
        learning_rate: float | None = None,
    ) -> PlanReport:
        """
        Count what a plan does.

        Args:
            plan ([`PackPlan`]):
                Of one epoch.
            batch_size (`int`):
                Samples of the padded batch to compare with.
            rows_per_step (`int`):
                Rows of an optimiser step, on all ranks.
            sampler ([`RankedBatchSampler`], *optional*):
                What deals the plan to ranks. With it the report says how evenly. The default is one rank.
            lengths (`Sequence[int]` or `np.ndarray`, *optional*):
                Tokens in each sample before any is cut, for the histogram. The default is what the plan left of them.
            max_length (`int`, *optional*):
                Most tokens of a sample.
            num_epochs (`float`, *optional*, defaults to `1.0`):
                Epochs of the run.
            max_steps (`int`, *optional*, defaults to `0`):
                Steps of the run; above 0 it takes the place of `num_epochs`, as in the Trainer.
            learning_rate (`float`, *optional*):
                Of the run.

        Returns:
            [`PlanReport`]: Of that epoch.
        """
        num_ranks = 1 if sampler is None else sampler.num_ranks
        real, computed = padded_batches(plan.lengths, batch_size)
        steps = -(-plan.num_bins // rows_per_step)
        padded_steps = -(-plan.num_fragments // (batch_size * rows_per_step))
        epochs = max_steps / steps if max_steps > 0 else num_epochs
        padding_share = 1 - plan.num_planned_tokens / int(computed.sum())
        idle_before, idle_after = _simulated_idle(sampler, rows_per_step)
        owners = plan.pieces.samples
        return cls(
            num_samples=plan.num_samples,
            num_tokens=plan.num_tokens,
            num_trained_samples=plan.num_fragments if owners is None else int(np.unique(owners).size),
            num_trained_tokens=plan.num_planned_tokens,
            num_rows=plan.num_bins,
            token_budget=plan.token_budget,
            max_length=max_length or 0,
            fill_rate=plan.fill_rate,
            segments_per_row=plan.num_fragments / plan.num_bins,
            batch_size=batch_size,
            padded_tokens=int(computed.sum()),
            padding_share=padding_share,
            speed_up=1 / (1 - padding_share),
            num_cut_samples=plan.num_cut_samples,
            num_cut_tokens=plan.num_cut_tokens,
            num_split_samples=plan.num_split_samples,
            num_dropped_samples=plan.num_dropped_samples,
            num_dropped_tokens=plan.num_dropped_tokens,
            num_masked_samples=plan.num_masked_samples,
            num_masked_tokens=plan.num_masked_tokens,
            num_ranks=num_ranks,
            gradient_accumulation_steps=rows_per_step // num_ranks,
            optimizer_steps=steps,
            padded_optimizer_steps=padded_steps,
            tokens_per_step=plan.num_planned_tokens / steps,
            padded_tokens_per_step=plan.num_planned_tokens / padded_steps,
            num_epochs=epochs,
            run_steps=max_steps if max_steps > 0 else math.ceil(num_epochs * steps),
            padded_run_steps=math.ceil(epochs * padded_steps),
            idle_before=idle_before,
            idle_after=idle_after,
            learning_rate=learning_rate,
            longest_fragment=int(plan.lengths.max()),
            shape=_shape(plan, plan.lengths if lengths is None else np.asarray(lengths), real, computed),
        )

    # ---- what the numbers mean

    @property
    def tokens_ratio(self) -> float:
        """Tokens of a packed step divided by those of a padded one."""
        return self.tokens_per_step / self.padded_tokens_per_step

    def equal_token_settings(self) -> dict[str, int]:
        """
        Find settings with which a packed step trains on as many tokens as a padded one.

        Returns:
            `dict[str, int]`: `gradient_accumulation_steps` and `token_budget`, as near as whole numbers and the
                longest sample allow. Empty where steps are alike already, or rows have no budget.
        """
        ratio = self.tokens_ratio
        if not self.token_budget or _ALIKE[0] <= ratio <= _ALIKE[1]:
            return {}
        accumulation = max(1, round(self.gradient_accumulation_steps / ratio))
        budget = self.token_budget * self.gradient_accumulation_steps / (ratio * accumulation)
        longest = self.max_length or self.longest_fragment
        return {
            "gradient_accumulation_steps": accumulation,
            "token_budget": max(longest, math.ceil(budget) if budget < 1_024 else math.ceil(budget / 64) * 64),
        }

    def equal_token_ratio(self) -> float:
        """Tokens of a step under [`PlanReport.equal_token_settings`] divided by those of a padded one."""
        settings = self.equal_token_settings()
        if not settings:
            return self.tokens_ratio
        before = self.gradient_accumulation_steps * self.token_budget
        return self.tokens_ratio * settings["gradient_accumulation_steps"] * settings["token_budget"] / before

    def scaled_learning_rate(self) -> float | None:
        """
        Scale the learning rate to the larger step of a packed run.

        Returns:
            `float`, *optional*: The run's rate times the square root of [`PlanReport.tokens_ratio`], the rule for Adam
                (Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022). A starting
                point, not a promise. None where the rate is unknown or steps are alike.
        """
        if self.learning_rate is None or _ALIKE[0] <= self.tokens_ratio <= _ALIKE[1]:
            return None
        return self.learning_rate * math.sqrt(self.tokens_ratio)

    def warnings(self) -> list[str]:
        """Say what a user should look at before starting the run, one sentence or two each."""
        found = []
        if self.run_steps < FEW_STEPS and self.run_steps < self.padded_run_steps:
            found.append(
                f"Only {self.run_steps:,} optimiser steps are left, where padded batches take "
                f"{self.padded_run_steps:,}. Warm-up and schedule have little room: make the step smaller as said "
                "above, or train for more epochs."
            )
        if self.num_rows < self.num_ranks:
            found.append(
                f"{self.num_rows} row{'' if self.num_rows == 1 else 's'} cannot keep {self.num_ranks} ranks busy. Use "
                "fewer ranks, or lower `token_budget`."
            )
        lost = self.num_cut_tokens + self.num_dropped_tokens
        if lost > 0.05 * self.num_tokens:
            found.append(
                f"{lost / self.num_tokens:.0%} of all tokens are lost to `max_length`. Raise it, or set "
                "`overlong: split`."
            )
        # Where rows are few, the last one shows, and no other setting would fill it.
        fewest = -(-self.num_trained_tokens // (self.token_budget or 1))
        if self.token_budget and self.fill_rate < 0.95 and self.num_rows > max(self.num_ranks, fewest + 1):
            found.append(
                f"Rows are only {self.fill_rate:.1%} full. A larger `token_budget` or `packing_order: best_fit` fills "
                "them better."
            )
        return found

    # ---- output

    def to_dict(self) -> dict[str, Any]:
        """Give the numbers as JSON values, with what they mean."""
        return {
            **asdict(self),
            "tokens_ratio": self.tokens_ratio,
            "equal_token_settings": self.equal_token_settings(),
            "equal_token_ratio": self.equal_token_ratio(),
            "scaled_learning_rate": self.scaled_learning_rate(),
            "warnings": self.warnings(),
        }

    def to_text(self, width: int = 96) -> str:
        """
        Give the report as plain text.

        Args:
            width (`int`, *optional*, defaults to `96`):
                Most columns of a line. 80 and more are readable.

        Returns:
            `str`: Lines without colour.
        """
        from rich.console import Console

        console = Console(file=StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().split("\n"))  # type: ignore[attr-defined]

    def __rich__(self) -> RenderableType:
        from .text import render

        return render(self)

    def save_picture(self, path: str | Path) -> None:
        """
        Draw the lengths, the fill of rows and the first rows.

        Args:
            path (`str` or `Path`):
                PNG file to write.

        Raises:
            [`MissingDependencyError`]: If matplotlib is not installed.
        """
        from .picture import save_plan_picture

        save_plan_picture(self, Path(path))

    def save(self, folder: str | Path) -> None:
        """Write `plan.json` and `plan.txt` into a folder, and `plan.png` where matplotlib is installed."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        (folder / "plan.txt").write_text(self.to_text() + "\n", encoding="utf-8")
        if importlib.util.find_spec("matplotlib") is not None:
            self.save_picture(folder / "plan.png")


def padded_batches(
    lengths: np.ndarray[Any, Any], batch_size: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """
    Count the tokens of padded batches in random order.

    Args:
        lengths (`np.ndarray`):
            Tokens of each sample.
        batch_size (`int`):
            Samples in a batch.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: Real tokens of each batch, and those it computes, pads included, int64.
    """
    shuffled = np.random.default_rng(0).permutation(lengths)
    starts = np.arange(0, shuffled.size, batch_size)
    sizes = np.diff(np.append(starts, shuffled.size))
    return np.add.reduceat(shuffled, starts), np.maximum.reduceat(shuffled, starts) * sizes


def _simulated_idle(sampler: RankedBatchSampler | None, rows_per_step: int) -> tuple[float, float] | tuple[None, None]:
    if sampler is None or sampler.num_ranks == 1:
        return None, None
    return sampler.idle(0, simulated_steps(rows_per_step))


def simulated_steps(rows_per_step: int) -> int:
    """Optimiser steps, from the first, that say how long ranks wait: dealing all of a large plan is slow."""
    return max(_FEWEST_SIMULATED_STEPS, _SIMULATED_ROWS // rows_per_step)


def _shape(
    plan: PackPlan, lengths: np.ndarray[Any, Any], real: np.ndarray[Any, Any], computed: np.ndarray[Any, Any]
) -> Shape:
    lengths = lengths[lengths > 0]
    # Whole numbers lie between the edges, and one length alone still gets a bar.
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, _NUM_BARS + 1).round()) - 0.5
    fill = real / computed
    order = np.argsort(-fill, kind="stable")
    shares = np.cumsum(computed[order]) / computed.sum()
    points = np.linspace(0, 1, _NUM_POINTS)
    padded = fill[order][np.minimum(np.searchsorted(shares, points), fill.size - 1)]
    rows = np.sort(plan.bin_tokens / (plan.token_budget or plan.bin_tokens))[::-1]
    return Shape(
        length_edges=tuple(edges.tolist()),
        samples_per_length=tuple(np.histogram(lengths, edges)[0].tolist()),
        row_fill=tuple(rows[np.minimum((points * rows.size).astype(int), rows.size - 1)].tolist()),
        padded_fill=tuple(padded.tolist()),
        first_rows=tuple(tuple(plan.lengths[row].tolist()) for row in plan.bins[:_NUM_ROWS]),
    )
