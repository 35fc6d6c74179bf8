"""What every benchmark prints beside its numbers: hardware, versions, one table and one JSON."""

from __future__ import annotations

import json
import os
import platform
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "numpy",
    "kernels",
    "triton",
    "flash-attn",
    "flash-linear-attention",
    "causal-conv1d",
    "mamba-ssm",
)

Emit = Callable[[dict[str, Any]], None]


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
        "gpu": _gpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def show(title: str, rows: list[dict[str, Any]], json_path: str | None, notes: str = "") -> None:
    """Print rows as a table with the environment below, and write them as JSON if a path is given."""
    show_table(title, rows)
    where = show_environment(notes)
    if json_path:
        write_json(json_path, {"title": title, "rows": rows, "environment": where})


def show_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows, whose names are those of the first."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_text(row.get(name, "")) for name in rows[0]))
    _console().print(table)


def show_environment(notes: str = "") -> dict[str, Any]:
    """Print hardware and versions in one line, and give them."""
    where = environment()
    installed = ", ".join(f"{name} {number}" for name, number in where["versions"].items() if number)
    gpu = f"{where['gpu']}, " if where["gpu"] else ""
    _console().print(
        f"{gpu}{where['processor']}, {where['cores']} cores, Python {where['python']}; {installed}. {notes}"
    )
    return where


def write_json(json_path: str | Path, content: dict[str, Any]) -> None:
    path = Path(json_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def guarded(emit: Emit, table: str, name: str, measure: Callable[[], dict[str, Any]]) -> None:
    """Emit a measurement's row, or why there is none."""
    try:
        row = measure()
    except Exception as error:
        traceback.print_exc()
        # transformers without the packages: not a failure of ours.
        what = "skipped" if "can't keep packed sequences apart" in str(error) else "failed"
        emit({"table": table, what: f"{name}: {type(error).__name__}: {str(error)[:300]}"})
    else:
        emit({"table": table, **row})


def _console() -> Console:
    return Console(width=max(140, Console().width))


def _gpu() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    gigabytes = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"{torch.cuda.get_device_name(0)}, {gigabytes:.0f} GiB, CUDA {torch.version.cuda}"


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
