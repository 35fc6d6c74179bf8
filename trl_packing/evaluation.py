"""
Token-weighted sums of a training interval or an evaluation, and the loss of every sample.

The loss of a set is the sum over its predicted tokens divided by their number: it does not depend on how samples were
put into batches, rows or ranks. Sums stay on the device and are read once, when they are logged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .collator import RowInfo

_NAMES = ("nll", "entropy", "correct", "targets", "aux", "rows", "tokens", "segments", "micro_steps", "cut")


@dataclass
class TokenSums:
    """Running sums of one mode, `"train"` or `"eval"`, on this rank."""

    device: torch.device
    sums: dict[str, torch.Tensor | float] = field(default_factory=dict)

    def add(self, **values: torch.Tensor | float) -> None:
        """Add one micro-batch. Tensors stay where they are."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + (value.detach() if isinstance(value, torch.Tensor) else value)

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """
        Add the sums of all ranks and start anew. Every rank must call it.

        Args:
            accelerator ([`~accelerate.Accelerator`]):
                The trainer's.

        Returns:
            `dict[str, float]`: The totals over all ranks.
        """
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        local = torch.stack(
            [torch.as_tensor(self.sums.get(name, 0.0), device=self.device).to(dtype).reshape(()) for name in _NAMES]
        )
        totals = accelerator.reduce(local, reduction="sum").tolist()
        self.sums.clear()
        return dict(zip(_NAMES, totals, strict=True))


def token_metrics(totals: dict[str, float]) -> dict[str, float]:
    """
    Turn totals into the metrics that TRL logs, weighted by predicted tokens.

    Args:
        totals (`dict[str, float]`):
            As [`TokenSums.reduce`] gives them.

    Returns:
        `dict[str, float]`: `entropy`, `mean_token_accuracy` (0 without a predicted token), and `aux_loss` if there is
        one.
    """
    targets = max(totals["targets"], 1.0)
    metrics = {"entropy": totals["entropy"] / targets, "mean_token_accuracy": totals["correct"] / targets}
    if totals["aux"]:
        metrics["aux_loss"] = totals["aux"] / max(totals["micro_steps"], 1.0)
    return metrics


@dataclass(frozen=True)
class FragmentLoss:
    """Summed loss of one fragment: its number, the sum in nats, and how many tokens were predicted."""

    fragment: int
    nll: float
    num_targets: int


def fragment_losses(per_token_nll: torch.Tensor, is_target: torch.Tensor, info: RowInfo) -> list[FragmentLoss]:
    """
    Sum the loss of one evaluated batch by fragment.

    Args:
        per_token_nll (`torch.Tensor`):
            Float tensor of shape `[rows, T - 1]`, the loss of predicting token `t + 1`; 0 where it is not predicted.
        is_target (`torch.Tensor`):
            Bool tensor of the same shape.
        info ([`RowInfo`]):
            Of a packed row, or of a padded batch with one fragment per row.

    Returns:
        `list[FragmentLoss]`: One per segment, or per row of a padded batch, in row order.
    """
    losses, targets = per_token_nll.double().cpu(), is_target.cpu()
    if info.boundaries is None:
        sums, counts = losses.sum(1).tolist(), targets.sum(1).tolist()
    else:
        # Position t holds the prediction of token t + 1, so a segment's predictions end one before its end.
        segment = info.boundaries.seq_idx[0, 1:].long()
        zeros = torch.zeros(info.boundaries.num_segments, dtype=torch.float64)
        sums = zeros.index_add(0, segment, losses[0]).tolist()
        counts = zeros.index_add(0, segment, targets[0].double()).tolist()
    return [FragmentLoss(*row) for row in zip(info.fragments, sums, map(int, counts), strict=False)]


def sample_losses(fragments: Sequence[FragmentLoss], samples: Sequence[int] | None) -> list[dict[str, Any]]:
    """
    Bring the losses of all ranks into data order, one entry per sample. Every rank must call it.

    Args:
        fragments (`Sequence[FragmentLoss]`):
            Of this rank.
        samples (`Sequence[int]`, *optional*):
            Sample number of each fragment number. In a stream the two are the same.

    Returns:
        `list[dict]`: `sample`, `loss` (mean over its predicted tokens, in nats, or `None` without one) and
            `num_tokens`, in data order. The fragments of a split sample are added up.
    """
    sums: dict[int, tuple[float, int]] = {}
    for fragment in gather_object(list(fragments)):
        sample = fragment.fragment if samples is None else int(samples[fragment.fragment])
        nll, num_targets = sums.get(sample, (0.0, 0))
        sums[sample] = nll + fragment.nll, num_targets + fragment.num_targets
    return [
        {"sample": sample, "loss": nll / num_targets if num_targets else None, "num_tokens": num_targets}
        for sample, (nll, num_targets) in sorted(sums.items())
    ]


def write_jsonl(path: str | Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
