"""Padding-free SFT that cannot leak. Public names load on first use, so that importing the package loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Boundaries": "boundaries",
    "PackedCollator": "collator",
    "PackedSFTConfig": "config",
    "PackedSFTTrainer": "trainer",
    "PackPlan": "packing",
    "plan_packs": "packing",
    "RankedBatchSampler": "sampler",
    "pack_rows": "padded",
    "unpack_rows": "padded",
    "PackedRows": "padded",
    "register_ops": "register",
    "unregister_ops": "register",
    "check_isolation": "isolation",
    "IsolationReport": "isolation",
    "check_lora_targets": "lora",
    "safe_lora_targets": "lora",
    "PackingError": "errors",
    "LeakError": "errors",
    "MissingDependencyError": "errors",
    "UnsupportedVersionError": "errors",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
