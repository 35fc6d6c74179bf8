"""The picture of a check: who moves whom, without and with boundaries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MissingDependencyError

if TYPE_CHECKING:
    from .report import IsolationReport


def save_influence(report: IsolationReport, path: Path) -> None:
    """
    Draw both influence matrices side by side.

    Args:
        report ([`IsolationReport`]):
            Its `influence_before` and `influence`.
        path (`Path`):
            PNG file to write.

    Raises:
        [`MissingDependencyError`]: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            'A picture needs matplotlib, which is not installed. Run `pip install "trl_packing[plots]"`.'
        ) from error
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    verdict = "segments are kept apart" if report.ok else "segments are NOT proven to be kept apart"
    verdict = "segments LEAK into one another" if report.max_leak > 0 else verdict
    figure.suptitle(f"{report.model} ({report.dtype}): {verdict}")
    panels = [("without boundaries", report.influence_before), ("with boundaries", report.influence)]
    for axes, (title, matrix) in zip(figure.subplots(1, 2), panels, strict=True):
        _draw(axes, f"{title}: {_summary(matrix)}", matrix, report.lengths)
    meaning = "A number says how far a token's logits moved at most, relative to their size. 0: not by a single bit."
    figure.supxlabel(meaning, fontsize=9, color="0.25")
    figure.savefig(path, dpi=150, format="png")


def _draw(axes: Any, title: str, matrix: np.ndarray, lengths: tuple[int, ...]) -> None:
    """Colour by order of magnitude; a segment's effect on itself is the point of a model and stays grey."""
    shown = matrix.copy()
    np.fill_diagonal(shown, np.nan)
    levels = np.full(shown.shape, np.nan)
    levels[shown >= 0] = np.log10(np.maximum(shown[shown >= 0], 1e-8))
    axes.set_facecolor("0.88")
    axes.imshow(levels, cmap="Reds", vmin=-8, vmax=0)
    for source in range(len(lengths)):
        for target in range(len(lengths)):
            value = shown[source, target]
            text = f"{value:.2g}" if np.isfinite(value) else "itself" if source == target else "not\nmeasured"
            dark = np.isfinite(value) and value > 1e-3
            axes.text(target, source, text, ha="center", va="center", fontsize=9, color="white" if dark else "0.25")
    names = [f"{index}\n({length})" for index, length in enumerate(lengths)]
    axes.set_xticks(range(len(lengths)), names)
    axes.set_yticks(range(len(lengths)), names)
    axes.set_xlabel("segment whose logits move (tokens)")
    axes.set_ylabel("segment that is changed (tokens)")
    axes.set_title(title, fontsize=11)


def _summary(matrix: np.ndarray) -> str:
    others = matrix[~np.eye(len(matrix), dtype=bool)]
    others = others[np.isfinite(others)]
    return f"{np.count_nonzero(others)} of {others.size} pairs move"
