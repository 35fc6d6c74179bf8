"""The picture of a plan: the samples' lengths, how full rows and padded batches are, and the first rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MissingDependencyError

if TYPE_CHECKING:
    from .plan import PlanReport

_TOKENS, _LOST, _PADS, _TEXT, _DARK = "#3f8fb5", "#c8553d", "0.85", "0.25", "#123d2f"
# Neighbouring segments differ; the colours say nothing else.
_SEGMENTS = ("#2a7f62", "#8cc7a8", "#3f8fb5", "#a9d3e6")
# Lines of the drawing of padded batches.
_MOST_LINES = 24
# A segment at least this wide, as a share of the row, has its number of tokens written in it.
_LABELLED = 0.06


def save_plan_picture(report: PlanReport, path: Path) -> None:
    """
    Draw a report as PNG.

    Args:
        report ([`PlanReport`]):
            Its `shape` and numbers.
        path (`Path`):
            File to write.

    Raises:
        [`MissingDependencyError`]: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "A picture needs matplotlib, which is not installed. Run `pip install 'trl-packing[plots]'`."
        ) from error
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    budget = f" of {report.token_budget:,} tokens" if report.token_budget else ""
    figure.suptitle(
        f"{report.num_trained_samples:,} sample{_s(report.num_trained_samples)} in {report.num_rows:,} packed "
        f"row{_s(report.num_rows)}{budget}, about {report.speed_up:.1f}x as fast as padded batches of "
        f"{report.batch_size}",
        fontsize=14,
    )
    layout: Any = [["lengths", "lengths", "fill", "fill", "fill"], ["rows", "rows", "rows", "padded", "padded"]]
    axes = figure.subplot_mosaic(layout, height_ratios=[1, 1.3])
    _draw_lengths(axes["lengths"], report)
    _draw_fill(axes["fill"], report)
    _draw_rows(axes["rows"], report)
    _draw_padded(axes["padded"], report)
    for panel in axes.values():
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, format="png")


def _draw_lengths(axes: Any, report: PlanReport) -> None:
    edges, counts = np.array(report.shape.length_edges), np.array(report.shape.samples_per_length)
    axes.stairs(counts, edges, fill=True, color=_TOKENS)
    title = "How long the samples are"
    if report.max_length and edges[-1] > report.max_length + 1:
        beyond = edges[:-1] >= report.max_length
        axes.stairs(np.where(beyond, counts, 0), edges, fill=True, color=_LOST)
        axes.axvline(report.max_length + 0.5, color=_LOST, lw=1.5)
        title += f"; {_fate(report)}"
    if edges[-1] > 20 * max(edges[0], 1):
        axes.set_xscale("log")
    else:
        axes.locator_params(axis="x", integer=True)
    axes.locator_params(axis="y", integer=True)
    axes.xaxis.set_major_formatter(_thousands)
    axes.yaxis.set_major_formatter(_thousands)
    axes.set_title(title, fontsize=11)
    axes.set(xlabel="tokens in a sample", ylabel="samples")


def _fate(report: PlanReport) -> str:
    fates = (
        (report.num_cut_samples, "cut at"),
        (report.num_split_samples, "split at"),
        (report.num_dropped_samples, "dropped above"),
    )
    return ", ".join(f"{number:,} are {fate} {report.max_length:,}" for number, fate in fates if number)


def _draw_fill(axes: Any, report: PlanReport) -> None:
    share = np.linspace(0, 100, len(report.shape.padded_fill))
    packed, padded = (100 * np.array(fill) for fill in (report.shape.row_fill, report.shape.padded_fill))
    axes.fill_between(share, packed, color=_SEGMENTS[1], lw=0)
    axes.fill_between(share, padded, color=_TOKENS, lw=0)
    axes.plot(share, packed, color=_SEGMENTS[0], lw=2)
    label = {"ha": "center", "fontsize": 11}
    pads = "\nthe rest pads" if report.padding_share else "no pads"
    text = f"padded batches of {report.batch_size}: {1 - report.padding_share:.1%} tokens, {pads}"
    axes.text(50, 8, text, color="white", **label)
    text = f"{report.fill_rate:.1%} full" if report.token_budget else "no pads"
    axes.text(50, 89, f"packed rows: {text}", color=_DARK, weight="bold", **label)
    axes.set_title("How full rows and batches are", fontsize=11)
    axes.set(xlabel="% of them, fullest first", ylabel="% tokens", xlim=(0, 100), ylim=(0, 105))


def _draw_rows(axes: Any, report: PlanReport) -> None:
    rows = report.shape.first_rows
    width = report.token_budget or max(map(sum, rows))
    for number, lengths in enumerate(rows):
        starts = np.cumsum((0, *lengths[:-1]))
        axes.barh(number, width, height=0.8, color=_PADS if report.token_budget else "none")
        colors = [_SEGMENTS[place % len(_SEGMENTS)] for place in range(len(lengths))]
        axes.barh([number] * len(lengths), lengths, left=starts, height=0.8, color=colors, ec="white", lw=0.5)
        for place, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            if length > _LABELLED * width:
                color = "white" if place % 2 == 0 else _TEXT
                axes.text(start + length / 2, number, f"{length:,}", ha="center", va="center", fontsize=7, color=color)
    axes.invert_yaxis()
    axes.set_yticks(range(len(rows)))
    axes.xaxis.set_major_formatter(_thousands)
    axes.set_title(f"The first {len(rows)} packed row{_s(len(rows))}: every block is one sample", fontsize=11)
    axes.set(xlabel="tokens", ylabel="row", xlim=(0, width))


def _draw_padded(axes: Any, report: PlanReport) -> None:
    """The first rows' samples again, one per line, as padded batches would compute them, on the scale of the rows."""
    lengths = [length for row in report.shape.first_rows for length in row][:_MOST_LINES]
    batches = [lengths[start : start + report.batch_size] for start in range(0, len(lengths), report.batch_size)]
    line = 0.0
    for number, batch in enumerate(batches):
        lines = line + np.arange(len(batch))
        axes.barh(lines, max(batch), height=0.8, color=_PADS)
        axes.barh(lines, batch, height=0.8, color=_SEGMENTS[number % len(_SEGMENTS)])
        line += len(batch) + 0.6
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(_thousands)
    axes.set_title("Their first samples in padded batches: grey is pads", fontsize=11)
    axes.set(xlabel="tokens", ylabel="one sample per line", xlim=(0, None))


def _s(number: int) -> str:
    return "" if number == 1 else "s"


def _thousands(value: float, _: Any) -> str:
    return f"{value:,.0f}"
