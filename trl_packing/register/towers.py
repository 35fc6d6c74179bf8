"""
Towers: the models inside a model that read images or sound.

Some of transformers' vision-language models hand every keyword of a call to the tower as well, the text's boundaries
among them, and the tower's attention would cut images where the text has its segments. A hook on the tower takes the
boundaries out of its calls. It keeps no state, and is removed by [`remove_tower_hooks`].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..boundaries import BOUNDARY_KEYS

_handles: list[RemovableHandle] = []


def install_tower_hooks(towers: Iterable[nn.Module]) -> None:
    """
    Keep the text's boundaries out of these modules.

    Args:
        towers (`Iterable[nn.Module]`):
            Modules that get no token of the packed row. One that has the hook already is left as it is.
    """
    for tower in towers:
        if _without_boundaries not in tower._forward_pre_hooks.values():
            _handles.append(tower.register_forward_pre_hook(_without_boundaries, with_kwargs=True))


def remove_tower_hooks() -> None:
    """Take every hook off again."""
    while _handles:
        _handles.pop().remove()


def _without_boundaries(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name not in BOUNDARY_KEYS}
