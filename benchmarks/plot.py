"""
Draw what `expect.py` measured.

    python benchmarks/plot.py                       results/expect.json -> results/expect.png
    python benchmarks/plot.py FILE.json FILE.png
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    paths = [Path(path) for path in sys.argv[1:]] or [RESULTS / "expect.json", RESULTS / "expect.png"]
    source, target = paths
    content = json.loads(source.read_text())
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    highest = max(0.85, *(row["padding share"] + 0.05 for row in content["rows"]))
    shares = np.linspace(0, min(highest, 0.95), 200)
    axes.plot(shares, 1 / (1 - shares), color="0.55", label="1 / (1 - padding share)")
    # Names stand to the right of their points, but where points lie close the next one would stand in the way.
    for row, right in pairwise([*sorted(content["rows"], key=lambda row: row["padding share"]), None]):
        axes.plot(row["padding share"], row["speed-up"], "o", color="C0")
        is_close = right is not None and right["padding share"] - row["padding share"] < 0.05
        axes.annotate(
            row["lengths"],
            (row["padding share"], row["speed-up"]),
            xytext=(-7 if is_close else 7, -4),
            ha="right" if is_close else "left",
            textcoords="offset points",
        )
    axes.plot([], [], "o", color="C0", label="measured, ours against TRL padded in batches of 16")
    axes.set_xlim(0)
    axes.set_ylim(0, 1.15 * max(1 / (1 - shares[-1]), *(row["speed-up"] for row in content["rows"])))
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.set_xlabel("share of pads in the padded batches")
    axes.set_ylabel("real tokens per second, packed against padded")
    axes.grid(color="0.92")
    axes.legend(loc="upper left", frameon=False)
    where = content["environment"]
    figure.suptitle(f"Tiny Llama, {where['processor']}, one thread, rows of 2,048 tokens", fontsize=10)
    figure.savefig(target, dpi=130)
    print(target)


if __name__ == "__main__":
    main()
