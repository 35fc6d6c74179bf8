"""What every benchmark prints beside its numbers: hardware, versions, one table and one JSON."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "kernels", "flash-attn")


def environment() -> dict[str, Any]:
    """Hardware and versions of this run."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def show(title: str, rows: list[dict[str, Any]], json_path: str | None, notes: str = "") -> None:
    """Print rows as a table with the environment below, and write them as JSON if a path is given."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    console = Console(width=max(100, Console().width))
    console.print(table)
    where = environment()
    installed = ", ".join(f"{name} {number}" for name, number in where["versions"].items() if number)
    console.print(f"{where['processor']}, {where['cores']} cores, Python {where['python']}; {installed}. {notes}")
    if json_path:
        path = Path(json_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"title": title, "rows": rows, "environment": where}, indent=2) + "\n")


def _text(value: Any) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 100
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
