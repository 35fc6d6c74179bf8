"""Length distributions with fixed names, so that results of different scripts and days stand beside each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], np.ndarray[Any, Any]]] = {
    "lognormal": lambda rng, num: _clipped(_lognormal(rng, num, 180, 1.0), 8, 4_096),
    "chat": lambda rng, num: _clipped(
        _mixture(
            rng,
            [0.50, 0.35, 0.15],
            [_lognormal(rng, num, 120, 0.8), _lognormal(rng, num, 900, 0.7), _lognormal(rng, num, 3_000, 0.6)],
        ),
        8,
        16_384,
    ),
    "longtail": lambda rng, num: _clipped(_longtail(rng, num), 8, 32_768),
    "longtail128": lambda rng, num: _clipped(_longtail(rng, num), 8, 131_072),
    "uniform": lambda rng, num: rng.integers(64, 2_049, num),
    "narrow": lambda rng, num: _clipped(rng.normal(1_400, 60, num), 8, 4_096),
}


def draw(name: str, num_samples: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """
    Draw sample lengths.

    Args:
        name (`str`):
            One of `DISTRIBUTIONS`.
        num_samples (`int`):
            How many.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw.

    Returns:
        `np.ndarray`: int64 of shape `[num_samples]`, tokens per sample.
    """
    return DISTRIBUTIONS[name](np.random.default_rng(seed), num_samples).astype(np.int64)


def _lognormal(rng: np.random.Generator, num: int, median: float, sigma: float) -> np.ndarray[Any, Any]:
    return np.exp(rng.normal(np.log(median), sigma, num))


def _longtail(rng: np.random.Generator, num: int) -> np.ndarray[Any, Any]:
    pareto = 2_000 * (1 + rng.pareto(1.1, num))
    return _mixture(rng, [0.9, 0.1], [_lognormal(rng, num, 300, 1.0), pareto])


def _mixture(
    rng: np.random.Generator, weights: list[float], parts: list[np.ndarray[Any, Any]]
) -> np.ndarray[Any, Any]:
    return np.choose(rng.choice(len(parts), size=parts[0].size, p=weights), parts)


def _clipped(lengths: np.ndarray[Any, Any], low: int, high: int) -> np.ndarray[Any, Any]:
    return np.clip(np.rint(lengths), low, high)
