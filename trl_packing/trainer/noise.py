"""
NEFTune on packed rows: noise on the embeddings of each sample, scaled by its own length.

transformers scales by the length of what it is given, which is a whole row here and includes pads in a padded batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..boundaries import Boundaries


@contextmanager
def embedding_noise(model: nn.Module, alpha: float | None, boundaries: Boundaries | None) -> Iterator[None]:
    """
    Add NEFTune's noise to the embeddings of a packed row, inside this context and in train mode.

    Args:
        model (`nn.Module`):
            With or without adapters, not wrapped.
        alpha (`float`, *optional*):
            `neftune_noise_alpha`. Without it nothing is added.
        boundaries ([`Boundaries`], *optional*):
            Of the row. Without them nothing is added.
    """
    if alpha is None or boundaries is None or not model.training:
        yield
        return
    lengths = np.asarray(boundaries.lengths)

    def add_noise(module: nn.Module, args: Any, embeddings: torch.Tensor) -> torch.Tensor:
        scales = np.repeat(alpha / np.sqrt(lengths * embeddings.shape[-1]), lengths)
        scale = torch.from_numpy(scales).to(embeddings.device, embeddings.dtype, non_blocking=True)
        noise = torch.zeros_like(embeddings).uniform_(-1, 1)
        return embeddings + noise * scale[:, None]  # [1, T, D]

    handle = model.get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()
