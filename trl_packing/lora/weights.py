"""
Which projections have their weight read by the layer above them, instead of being called.

An adapter wraps a projection's call. A layer that hands `self.out_proj.weight` to a kernel passes the adapter by: it
gets no gradient and has no say. The layers' own source tells where that happens, so no architecture is listed here,
and the function that receives the weight tells whether that path runs on this machine.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..register import dispatch
from ..register.inventory import HookedFunction, find_hooked_functions

# `self.out_proj.weight.dtype` does not read the numbers; `.data` is where a weight is clamped in place.
_METADATA = frozenset({"dtype", "device", "shape", "ndim", "size", "requires_grad", "is_cuda", "data"})
# In the source this stands for a read outside any function call, such as `self.dt_proj.weight @ x`.
_NO_FUNCTION = ""


@dataclass(frozen=True)
class WeightRead:
    """
    One place in a layer's source that reads the weight of a module below it.

    Args:
        path (`str`):
            Of the module below, as in `self.<path>.weight`.
        function (`str`):
            Name of the function that receives the weight, with its dots, or an empty string.
        file (`str`):
            Module that the source stands in.
        called (`bool`):
            Whether the same class also calls the module below.
    """

    path: str
    function: str
    file: str
    called: bool


def passed_by(model: nn.Module) -> dict[str, str]:
    """
    Find the modules whose weight is read in training instead of the module being called.

    Args:
        model (`nn.Module`):
            Without adapters. Register the operations first: they decide which path a layer takes.

    Returns:
        `dict[str, str]`: Name in the model, and who reads the weight, as the end of a sentence.
    """
    hooked = {(f.module.__name__, f.attribute): f for f in find_hooked_functions(model, {})}
    found: dict[str, str] = {}
    for name, layer in model.named_modules():
        for read in _reads_of(type(layer)):
            if _is_submodule(layer, read.path) and _reads_in_training(read, hooked):
                reader = f"hands its weight to `{read.function}`" if read.function else "multiplies by its weight"
                full_name = f"{name}.{read.path}" if name else read.path
                found.setdefault(full_name, f"{type(layer).__name__} {reader} instead of calling it")
    return found


def _reads_in_training(read: WeightRead, hooked: dict[tuple[str, str], HookedFunction]) -> bool:
    if not read.called or read.function == _NO_FUNCTION:
        return True
    # A plain torch function on a slice of the weight belongs to a tensor-parallel or a decoding path.
    if "." in read.function:
        return False
    function = hooked.get((read.file, read.function))
    if function is not None:
        # A fused path without its kernel returns nothing, and the layer goes on to call the projection.
        return function.kernel is not None or function.upstream.role != "fused"
    # Our dispatcher passes over the fused path where a projection is frozen, as one under an adapter is.
    return not _is_our_dispatcher(vars(sys.modules[read.file]).get(read.function))


def _is_our_dispatcher(function: Any) -> bool:
    return getattr(function, "__module__", None) == dispatch.__name__


def _is_submodule(layer: nn.Module, path: str) -> bool:
    try:
        layer.get_submodule(path)
    except AttributeError:
        return False
    return True


def _reads_of(layer_class: type) -> list[WeightRead]:
    # The base class of all models reads embeddings to tie and resize them, and is long.
    bases = [base for base in layer_class.__mro__ if issubclass(base, nn.Module) and base is not PreTrainedModel]
    return [read for base in bases if not base.__module__.startswith("torch.") for read in _reads_in_source(base)]


@cache
def _reads_in_source(layer_class: type) -> tuple[WeightRead, ...]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(layer_class)))
    except (OSError, TypeError, SyntaxError):
        return ()
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    calls = {_dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    reads = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr != "weight":
            continue
        owner, above = _dotted(node.value), parents[node]
        if not owner.startswith("self.") or (isinstance(above, ast.Attribute) and above.attr in _METADATA):
            continue
        if "init" in _method_of(node, parents):
            continue
        reads.append(WeightRead(owner[5:], _receiver_of(node, parents), layer_class.__module__, owner in calls))
    return tuple(reads)


def _receiver_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """Name of the innermost call that gets the value as an argument, methods of the weight left out."""
    child, above = node, parents.get(node)
    while above is not None and not isinstance(above, ast.stmt):
        if isinstance(above, ast.Call) and child is not above.func:
            return _dotted(above.func)
        child, above = above, parents.get(above)
    return _NO_FUNCTION


def _method_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    while node in parents and not isinstance(node, ast.FunctionDef):
        node = parents[node]
    return node.name if isinstance(node, ast.FunctionDef) else ""


def _dotted(node: ast.AST) -> str:
    """Give `self.a.b` for such an expression, and an empty string for any other."""
    if isinstance(node, ast.Name):
        return node.id
    owner = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner and isinstance(node, ast.Attribute) else ""
