"""
Which layer lets one segment reach another: every layer judged on its own, whatever the layers before it did.

A run in which one segment's tokens are changed is compared with the unchanged run, layer by layer, at the tokens of all other
segments. Where a layer got equal inputs there but gives different outputs, the difference arose inside it. It is noted,
and the outputs are then set back to those of the unchanged run, so that the next layer starts from equal inputs again:
neither a leak nor the rounding of an expert layer that regroups its tokens reaches the layers behind it, where depth would
amplify it until one cannot be told from the other.

Shapes: T tokens in the row, N segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .row import token_effects

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Parts of class names, lower case. The order matters: `KimiDeltaAttention` is a recurrence.
_RECURRENCES = ("mamba", "delta", "ssm", "recurrent", "rglru", "rwkv", "lstm", "lightning", "linearattention", "retention")
_EXPERTS = ("moe", "router", "expert", "sparse")


@dataclass
class Entry:
    """One layer in which other segments' tokens became different, and by how much per token (`[T]`, float32, host)."""

    name: str
    module: nn.Module
    effects: torch.Tensor
    mask: torch.Tensor | None = None


@dataclass
class _Call:
    fingerprints: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


class LayerWatch:
    """
    Record every layer's outputs in one run and compare those of other runs with them.

    Args:
        model (`nn.Module`):
            Layers are its modules except PyTorch's own and adapters' wrappers of those, which treat each token by itself.
        num_tokens (`int`):
            Tokens in the row.
    """

    def __init__(self, model: nn.Module, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._layers = [
            (name, module)
            for name, module in model.named_modules()
            if not type(module).__module__.startswith("torch.nn.") and not hasattr(module, "base_layer")
        ]
        self._calls: dict[tuple[str, int], _Call] = {}

    def order(self) -> list[str]:
        """Name the recorded layers in the order in which they end."""
        return list(dict.fromkeys(name for name, _ in self._calls))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what each layer gets and gives while the unchanged row runs. Outputs are copied to the host."""

        def note(key: tuple[str, int], module: nn.Module, prints: list[torch.Tensor], mask: Any, output: Any) -> None:
            outputs = [tensor.detach().to("cpu", copy=True) for tensor in self._token_tensors(output)]
            self._calls[key] = _Call(prints, outputs)

        with self._hooks(note):
            yield

    @contextmanager
    def comparing(self, watched: torch.Tensor) -> Iterator[list[Entry]]:
        """
        Compare a run with the recorded one, and hold the watched tokens at their recorded values.

        Args:
            watched (`torch.Tensor`):
                bool `[T]`, on the host: the tokens whose inputs did not change.

        Yields:
            `list[Entry]`: Filled during the run, in the order in which the layers end.
        """
        entries: list[Entry] = []

        def compare(
            key: tuple[str, int], module: nn.Module, prints: list[torch.Tensor], mask: Any, output: Any
        ) -> Any:
            call = self._calls.get(key)
            tensors = list(self._token_tensors(output))
            if call is None or [tensor.shape for tensor in tensors] != [tensor.shape for tensor in call.outputs]:
                return None
            effects = torch.zeros(self._num_tokens)
            for recorded, tensor in zip(call.outputs, tensors, strict=True):
                moved = token_effects(self._rows(recorded.to(tensor.device)), self._rows(tensor)).cpu()
                effects = torch.maximum(effects, moved.where(watched, 0.0))
            if not effects.any() or not _equal_at(watched, call.fingerprints, prints):
                return None
            entries.append(Entry(key[0], module, effects, mask))
            recorded_outputs = iter(call.outputs)
            return self._map_tokens(output, lambda tensor: self._held(tensor, next(recorded_outputs), watched))

        with self._hooks(compare):
            yield entries

    @contextmanager
    def _hooks(self, visit: Callable[..., Any]) -> Iterator[None]:
        counts: Counter[str] = Counter()
        open_calls: dict[str, list[tuple[list[torch.Tensor], Any]]] = {}
        handles = []

        def before(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
                inputs = (args, {key: value for key, value in kwargs.items() if key != "attention_mask"})
                prints = [self._fingerprint(tensor) for tensor in self._token_tensors(inputs)]
                open_calls.setdefault(name, []).append((prints, kwargs.get("attention_mask")))

            return hook

        def after(name: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
                prints, mask = open_calls[name].pop()
                key = (name, counts[name])
                counts[name] += 1
                return visit(key, module, prints, mask, output)

            return hook

        try:
            for name, module in self._layers:
                handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
                handles.append(module.register_forward_hook(after(name), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    # ---- tensors with one row per token

    def _is_per_token(self, tensor: torch.Tensor) -> bool:
        shape = tuple(tensor.shape)
        flat = len(shape) == 2 and shape[0] == self._num_tokens
        return tensor.is_floating_point() and (flat or (len(shape) > 2 and shape[:2] == (1, self._num_tokens)))

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.shape[0] == self._num_tokens else tensor[0]

    def _token_tensors(self, value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            if self._is_per_token(value):
                yield value
        elif isinstance(value, dict | tuple | list):
            for item in value.values() if isinstance(value, dict) else value:
                yield from self._token_tensors(item)

    def _map_tokens(self, value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value) if self._is_per_token(value) else value
        if isinstance(value, dict):
            for key, item in list(value.items()):
                value[key] = self._map_tokens(item, function)
        elif isinstance(value, tuple | list):
            items = [self._map_tokens(item, function) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def _held(self, tensor: torch.Tensor, recorded: torch.Tensor, watched: torch.Tensor) -> torch.Tensor:
        hold = watched.to(tensor.device).view(-1, *[1] * (self._rows(tensor).ndim - 1))
        return torch.where(hold, recorded.to(tensor.device), tensor)

    def _fingerprint(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hash each token's vector bit by bit, int64 `[T]`: integer sums do not depend on their order."""
        rows = self._rows(tensor.detach()).reshape(self._num_tokens, -1).contiguous()
        bits = rows.view(_INTEGER_OF_SIZE[rows.element_size()]).long()
        factors = torch.arange(1, 2 * bits.shape[1], 2, device=bits.device) * 0x9E3779B97F4A7C1
        return (bits * factors).sum(dim=-1)


def kind_of(module: nn.Module) -> str:
    """
    Name the kind of a layer by its class: `attention`, `recurrence`, `convolution`, `router`, else `layer`.

    Args:
        module (`nn.Module`):
            A layer that leaks.
    """
    name = type(module).__name__.lower()
    if any(part in name for part in _RECURRENCES):
        return "recurrence"
    if "conv" in name:
        return "convolution"
    if "attention" in name or "attn" in name:
        return "attention"
    if any(part in name for part in _EXPERTS) or hasattr(module, "experts"):
        return "router"
    return "layer"


def has_convolution(module: nn.Module) -> bool:
    """Say whether a layer convolves over the row, beside whatever else it does."""
    return any(isinstance(part, nn.Conv1d) or "conv" in type(part).__name__.lower() for part in module.modules())


def mask_opens(mask: Any, queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """
    Say whether a dense attention mask lets some of the queries see some of the keys.

    Args:
        mask (`Any`):
            What the layer got: only tensors of shape `[1, heads, T, T]`, bool or additive, are read.
        queries, keys (`torch.Tensor`):
            bool `[T]`, on the host.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or mask.shape[-2:] != (len(queries), len(keys)):
        return False
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return bool(visible[0].cpu()[:, queries][:, :, keys].any())


def _equal_at(watched: torch.Tensor, first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    if len(first) != len(second):
        return False
    return all(bool((one == two).cpu()[watched].all()) for one, two in zip(first, second, strict=True))
