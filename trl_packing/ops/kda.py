"""Kimi delta attention. Being written; the signatures stand."""

from __future__ import annotations

import torch


def kimi_delta_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    lengths: tuple[int, ...] | None = None,
    seq_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Run Kimi delta attention over every segment of a packed row on its own. Mirrors `chunk_kimi_delta_attention`."""
    raise NotImplementedError
