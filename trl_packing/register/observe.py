"""
Watch the calls of transformers' convolution function, which is no module and so has no hooks.

Shapes: B batch rows, D channels, T tokens in the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .inventory import modeling_files

_CONVOLUTION = "causal_conv1d_fn"


@contextmanager
def observed_convolutions(model: nn.Module, observe: Callable[[torch.Tensor, Any], None]) -> Iterator[None]:
    """
    Pass input and output of every short convolution to a function, inside this context.

    Args:
        model (`nn.Module`):
            Its layers' modeling files are watched, with our dispatchers in them or without.
        observe (`Callable`):
            Gets the input `[B, D, T]` and what the convolution returned.
    """

    def observed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            output = original(hidden_states, *args, **kwargs)
            observe(hidden_states, output)
            return output

        return call

    files = [file for file in modeling_files(model) if callable(getattr(file, _CONVOLUTION, None))]
    originals = [(file, getattr(file, _CONVOLUTION)) for file in files]
    try:
        for file, original in originals:
            setattr(file, _CONVOLUTION, observed(original))
        yield
    finally:
        for file, original in originals:
            setattr(file, _CONVOLUTION, original)
