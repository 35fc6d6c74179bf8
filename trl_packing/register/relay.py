"""
Relays: layers of transformers that receive the boundaries as keywords and do not hand them on to an operation inside.

While such a layer's `forward` runs, its boundaries are kept here for the operations below it. The layer's own call is the
source, and gradient checkpointing replays that call, so a replay sees the same boundaries. Nothing outlives the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..boundaries import BOUNDARY_KEYS

# Class names in transformers 5.20 to 5.24, and what is lost below them.
RELAYS = {
    "JambaMambaDecoderLayer": "calls its mixer without keywords",
    "ZambaMambaMixer": "calls its selective scan without keywords",
    "InklingDecoderLayer": "calls its short convolutions without keywords",
}

_running: list[dict[str, Any]] = []
_forwards: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def install_relays(model: nn.Module) -> None:
    """Wrap `forward` of every relay class in the model. Process-wide, like the dispatchers."""
    for layer_class in {type(layer) for layer in model.modules()}:
        if layer_class.__name__ in RELAYS and layer_class.__module__.startswith("transformers."):
            held = _forwards.get(layer_class)
            if held is None or layer_class.forward is not held[1]:
                original = layer_class.forward
                relay = _relay(original)
                layer_class.forward = relay
                _forwards[layer_class] = (original, relay)


def remove_relays() -> None:
    """Give every class its own `forward` back, unless someone else has replaced ours since."""
    for layer_class, (original, relay) in _forwards.items():
        if layer_class.forward is relay:
            layer_class.forward = original
    _forwards.clear()


def relayed_boundaries() -> dict[str, Any]:
    """Give the boundary keywords of the innermost relay that is running, or none."""
    return _running[-1] if _running else {}


def _relay(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _running.append({name: value for name, value in kwargs.items() if name in BOUNDARY_KEYS})
        try:
            return original(self, *args, **kwargs)
        finally:
            _running.pop()

    return forward
