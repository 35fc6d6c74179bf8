"""The recipe's parts: find and read a YAML, load data, plan, build the trainer, end the run. Loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import build_sft, finish_sft, parse_sft
    from .config import usage_errors
    from .plan import estimate_sft, plan_sft

__all__ = ["build_sft", "estimate_sft", "finish_sft", "parse_sft", "plan_sft", "usage_errors"]

_HOME = {
    "build_sft": "build",
    "finish_sft": "build",
    "parse_sft": "build",
    "estimate_sft": "plan",
    "plan_sft": "plan",
    "usage_errors": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
