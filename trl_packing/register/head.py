"""
TRL's fused LM head at the predicted positions only, which the host knows.

On a GPU the head picks those positions with a boolean mask, whose size has to be read from the device, twice forward
and twice backward; elsewhere it scores every position. Positions made with the row need no read, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from trl.trainer import utils as trl_utils

_COMPACTS, _SCORES = "_use_triton", "_ChunkedLogProbFunction"


def _never(device: torch.device) -> bool:
    return False


@contextmanager
def head_positions(positions: np.ndarray[Any, Any] | None) -> Iterator[None]:
    """
    Let forwards with `fused_lm_head=True` score these positions, inside this context.

    Args:
        positions (`np.ndarray`, *optional*):
            int64 `[num_targets]`: where `labels[:, 1:]`, flattened, is not -100. Without them every position is
            scored, which gives one shape for all batches, as `torch.compile` needs.
    """
    if not (hasattr(trl_utils, _COMPACTS) and hasattr(trl_utils, _SCORES)):
        # Another TRL: its own head is right too.
        yield
        return
    compacts, scores = getattr(trl_utils, _COMPACTS), getattr(trl_utils, _SCORES)
    setattr(trl_utils, _COMPACTS, _never)
    if positions is not None:
        setattr(trl_utils, _SCORES, _AtPositions(scores, torch.from_numpy(positions)))
    try:
        yield
    finally:
        setattr(trl_utils, _COMPACTS, compacts)
        setattr(trl_utils, _SCORES, scores)


class _AtPositions:
    """Stands in for TRL's autograd function: `apply` on some rows, zeros elsewhere."""

    def __init__(self, function: Any, positions: torch.Tensor) -> None:
        self.function, self.positions = function, positions

    def apply(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, *args: Any
    ) -> tuple[torch.Tensor | None, ...]:
        rows = self.positions.to(hidden.device, non_blocking=True)
        hidden, chosen = hidden.index_select(0, rows), targets.index_select(0, rows)
        outputs = self.function.apply(hidden, weight, bias, chosen, *args)
        return tuple(
            None if output is None else output.new_zeros(targets.shape[0]).index_copy(0, rows, output)
            for output in outputs
        )
