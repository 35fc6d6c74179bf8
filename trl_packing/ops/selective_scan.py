"""Mamba-1 scan. Being written; the signatures stand."""

from __future__ import annotations

import torch


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    lengths: tuple[int, ...] | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the Mamba-1 scan over every segment of a packed row on its own. Mirrors `mamba_selective_scan`."""
    raise NotImplementedError
