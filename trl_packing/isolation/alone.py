"""
A packed segment against the same tokens run unpacked: which differences are rounding.

Shapes: T tokens in the row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from .layers import LayerWatch, class_name, has_indexer, kind_of
from .report import FAILED, PASSED
from .row import Row

# Two runs whose noise is n may differ by a few n; four covers the maximum over a row of tokens.
NOISE_MARGIN = 4
# Of the tokens of a segment, this share has no choice so close that rounding decides it.
_QUANTILE_WITH_CHOICES = 0.9
# More than this is never the sum of many small differences.
_MOST_NOISE = 0.5
_FAR = 1e30

# Status, effect, what is allowed, and a sentence.
Outcome = tuple[str, float, float, str]


def judge_layers_alone(row: Row, segment: int, tokens: np.ndarray, effect: float) -> Outcome:
    """
    Judge each layer by itself, since depth amplifies the rounding that another row length brings.

    Args:
        row (`Row`):
            The probed row.
        segment (`int`):
            The segment that differs.
        tokens (`np.ndarray`):
            int64: its tokens.
        effect (`float`):
            By how much its logits differ.

    Returns:
        `tuple[str, float, float, str]`: Status, largest effect, what is allowed, and a sentence.
    """
    watch = LayerWatch(row.model, row.boundaries.total_tokens)
    with watch.recording():
        row.run(row.tokens, eager=True)
    everywhere = torch.ones(len(tokens), dtype=torch.bool)
    with watch.comparing(everywhere, start=row.boundaries.offsets[segment]) as entries:
        row.run_alone(tokens, eager=True)
    # A layer rounds several times, and with another row length each of them may come out differently.
    allowed = NOISE_MARGIN * row.rounding()
    local = {entry.name: largest(entry.effects, entry.module, row) for entry in entries}
    first = next((entry for entry in entries if local[entry.name] > allowed), None)
    if first is not None:
        where = f"The difference enters in {first.name} ({class_name(first.module)})."
        return FAILED, effect, allowed, f"Segment {segment} gives other logits than when it is run unpacked. {where}"
    if effect > _MOST_NOISE or not local:
        return FAILED, effect, allowed, f"Segment {segment} gives other logits than when it is run unpacked."
    found = max(local.values())
    return PASSED, found, allowed, f"Segment {segment} run unpacked differs by the rounding of each layer only."


def largest(effects: torch.Tensor, module: nn.Module, row: Row) -> float:
    """Take the largest effect of a comparison with another row length, less the tokens with close choices."""
    # An output of zeros in one of the two moves infinitely far, of which a quantile would make NaN.
    finite = effects.float().nan_to_num(_FAR, _FAR).clamp(max=_FAR)
    return float(finite.quantile(_QUANTILE_WITH_CHOICES if has_choices(module, row) else 1.0))


def has_choices(module: nn.Module, row: Row) -> bool:
    """Say whether rounding flips which expert or which past token is the next best, in the row's precision."""
    is_half = torch.finfo(row.compute_dtype).bits < 32
    # The scores of sparse attention even tie.
    return has_indexer(module) or (is_half and any(kind_of(part) == "router" for part in module.modules()))
