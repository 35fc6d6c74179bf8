"""
Relays: classes of transformers that receive the boundaries as keywords and do not hand them on to what is inside.

While the `forward` of such a class runs, its boundaries are kept here, for the operations inside it and for the calls
of a *receiver*, a class that does hand keywords on but is called without them. The keywords of a call are the source
in both cases: gradient checkpointing records a receiver's call with the boundaries in it, and replays a layer's
`forward` from such a record, so a replay sees the same boundaries. Nothing outlives the call.
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
    "Mamba2ForCausalLM": "calls its backbone without keywords",
    "MambaForCausalLM": "calls its backbone without keywords",
    "MambaBlock": "calls its mixer without keywords",
    "FalconMambaForCausalLM": "calls its backbone without keywords",
    "FalconMambaBlock": "calls its mixer without keywords",
}
RECEIVERS = frozenset({"Mamba2Model", "MambaBlock", "FalconMambaBlock"})

_Method = Callable[..., Any]

_running: list[dict[str, Any]] = []
_patched: dict[tuple[type, str], tuple[_Method | None, _Method]] = {}


def install_relays(model: nn.Module) -> None:
    """Wrap the relays and receivers among the model's classes. Process-wide, like the dispatchers."""
    # Sharding puts a class of its own in front of the model's.
    for layer_class in {base for layer in model.modules() for base in type(layer).__mro__}:
        if layer_class.__module__.startswith("transformers."):
            if layer_class.__name__ in RELAYS:
                _patch(layer_class, "forward", _relay)
            if layer_class.__name__ in RECEIVERS:
                _patch(layer_class, "__call__", _receive)


def remove_relays() -> None:
    """Leave every class as it was, unless someone else has replaced our method since."""
    for (layer_class, name), (own, ours) in _patched.items():
        if vars(layer_class).get(name) is ours:
            if own is None:
                delattr(layer_class, name)
            else:
                setattr(layer_class, name, own)
    _patched.clear()


def relayed_boundaries() -> dict[str, Any]:
    """Give the boundary keywords of the innermost relay that is running, or none."""
    return _running[-1] if _running else {}


def _patch(layer_class: type, name: str, wrap: Callable[[_Method], _Method]) -> None:
    own = vars(layer_class).get(name)
    if (layer_class, name) in _patched and own is _patched[layer_class, name][1]:
        return
    ours = wrap(getattr(layer_class, name))
    setattr(layer_class, name, ours)
    _patched[layer_class, name] = (own, ours)


def _relay(original: _Method) -> _Method:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _running.append({name: value for name, value in kwargs.items() if name in BOUNDARY_KEYS})
        try:
            return original(self, *args, **kwargs)
        finally:
            _running.pop()

    return forward


def _receive(original: _Method) -> _Method:
    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **(relayed_boundaries() | kwargs))

    return call
