"""
Up to which length a model keeps segments apart: what the small row of the proof cannot show, because it is short.

Two things in transformers look at a row's length. Dynamic NTK and LongRoPE choose the frequencies of the whole batch
by its largest position, so one long segment moves every other one. Llama-4's temperature tuning counts positions from
the row's start, so a segment's place in a long row changes it. Both do nothing below a length that the config names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class LengthLimit:
    """
    A length up to which segments stay apart.

    Args:
        tokens (`int`):
            The most tokens.
        is_of_row (`bool`):
            Whether it holds for the whole row, else for each segment.
        reason (`str`):
            What happens above, as a clause.
    """

    tokens: int
    is_of_row: bool
    reason: str

    def to_text(self) -> str:
        """Say it in one sentence, for a report."""
        what = "rows" if self.is_of_row else "samples"
        return f"Proven for {what} of up to {self.tokens} tokens only: above, {self.reason}."


def length_limits(model: nn.Module) -> list[LengthLimit]:
    """
    Find the lengths up to which a model's positions depend on nothing but the segment itself.

    Args:
        model (`nn.Module`):
            Its modules' configs are read, nested ones and parameters per layer type too.

    Returns:
        `list[LengthLimit]`: The lowest for segments and for rows, where there are any.
    """
    limits = [limit for config in _configs_in(model) for limit in _limits_of(config)]
    limits += [limit for module in model.modules() for limit in _temperature_limits(module)]
    lowest = (
        min((limit for limit in limits if limit.is_of_row == of_row), key=lambda limit: limit.tokens, default=None)
        for of_row in (False, True)
    )
    return [limit for limit in lowest if limit is not None]


def length_notes(model: nn.Module) -> list[str]:
    """Say in sentences up to which lengths a proof on a short row holds."""
    return [limit.to_text() for limit in length_limits(model)]


def _configs_in(model: nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    waiting = [vars(module)["config"] for module in model.modules() if vars(module).get("config") is not None]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "__dict__"):
            found[id(config)] = config
            waiting += [value for name, value in vars(config).items() if name.endswith("config") and value is not None]
    return list(found.values())


def _limits_of(config: Any) -> Iterator[LengthLimit]:
    for parameters in _rope_parameters(config):
        kind = str(parameters.get("rope_type") or parameters.get("type"))
        context = getattr(config, "max_position_embeddings", None)
        if "dynamic" in kind:
            tokens = context
        # "su" is an older name. PhiMoE scales by the longest position for every type.
        elif kind in ("longrope", "su") or "long_mscale" in parameters:
            tokens = parameters.get("original_max_position_embeddings")
            tokens = tokens or getattr(config, "original_max_position_embeddings", None) or context
        else:
            continue
        if isinstance(tokens, int):
            reason = f"rope type `{kind}` gives all samples of a row other positions as soon as one of them is longer"
            yield LengthLimit(tokens, False, reason)


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    waiting = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            # One entry for each layer type.
            waiting += list(value.values())


def _temperature_limits(module: nn.Module) -> Iterator[LengthLimit]:
    # Llama-4 counts positions from the row's start in layers without rope. Ministral and Mistral-4 read
    # `position_ids`, which start anew in each segment.
    scale = getattr(module, "floor_scale", None)
    if getattr(module, "attn_temperature_tuning", None) and not getattr(module, "use_rope", False) and scale:
        reason = f"{type(module).__name__} scales queries by their place in the row"
        # The scale is that of the next position.
        yield LengthLimit(int(scale) - 1, True, reason)
