"""
Which layer lets one segment reach another: every layer judged on its own, whatever the layers before it did.

A run in which one segment's tokens are changed is compared with the unchanged run, layer by layer, at the tokens of
the other segments. Where a layer got equal inputs there but gives other outputs, the difference arose inside it. It is
noted, and the outputs are then set back to those of the unchanged run, so that the next layer starts from equal inputs
again: neither a leak nor the rounding of an expert layer that regroups its tokens reaches the layers behind it, where
depth would amplify it until one cannot be told from the other.

Shapes: T tokens in the row, N segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..register.observe import observed_convolutions
from .row import token_effects

_Key = tuple[str, int]

# Added to a layer's name for the calls of its convolution.
_CONVOLUTION = " convolution"

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Parts of class names, lower case. The order matters: `KimiDeltaAttention` is a recurrence.
_RECURRENCES = (
    "mamba",
    "delta",
    "ssm",
    "recurrent",
    "rglru",
    "rwkv",
    "lstm",
    "lightning",
    "linearattention",
    "retention",
)
_EXPERTS = ("moe", "router", "expert", "sparse")


@dataclass
class Entry:
    """
    One layer in which watched tokens became different, and by how much per token (float32, on the host).

    `mask` is the attention mask that it was called with, `is_convolution` says whether its short convolution did it.
    """

    name: str
    module: nn.Module
    effects: torch.Tensor
    mask: torch.Tensor | None = None
    is_convolution: bool = False


@dataclass
class Flow:
    """Sizes of the gradients that arrive at one layer's outputs and leave at its inputs, during a backward pass."""

    name: str = ""
    module: nn.Module | None = None
    into: list[float] = field(default_factory=list)
    out: list[float] = field(default_factory=list)


@dataclass
class _Call:
    fingerprints: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


class LayerWatch:
    """
    Record every layer's outputs in one run and compare those of other runs with them.

    Args:
        model (`nn.Module`):
            Layers are its modules except PyTorch's own and adapters' wrappers of those, which treat each token by
            itself.
        num_tokens (`int`):
            Tokens in the row.
    """

    def __init__(self, model: nn.Module, num_tokens: int) -> None:
        self._model, self._num_tokens = model, num_tokens
        self._layers = [
            (name, module)
            for name, module in model.named_modules()
            if not type(module).__module__.startswith("torch.nn.") and not hasattr(module, "base_layer")
        ]
        self._convolutions = [module for module in model.modules() if isinstance(module, nn.Conv1d)]
        self._calls: dict[_Key, _Call] = {}

    def order(self) -> list[str]:
        """Name the recorded layers in the order in which they end."""
        return list(dict.fromkeys(name for name, _ in self._calls))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what each layer gets and gives while the unchanged row runs. Outputs are copied to the host."""

        def note(key: _Key, module: nn.Module | None, prints: list[torch.Tensor], mask: Any, output: Any) -> None:
            outputs = [self._rows(tensor).detach().to("cpu", copy=True) for tensor in self._token_tensors(output)]
            self._calls[key] = _Call(prints, outputs)

        with self._hooks(self._fingerprints, note):
            yield

    @contextmanager
    def comparing(self, watched: torch.Tensor, *, start: int = 0) -> Iterator[list[Entry]]:
        """
        Compare a run with the recorded one, and hold the watched tokens at their recorded values.

        Args:
            watched (`torch.Tensor`):
                bool, on the host, one entry per token of the run: the tokens whose inputs did not change.
            start (`int`, *optional*, defaults to `0`):
                Place in the recorded row of the run's first token.

        Yields:
            `list[Entry]`: Filled during the run, in the order in which the layers end.
        """
        entries: list[Entry] = []
        part = slice(start, start + len(watched))
        leaking_convolutions: set[str] = set()

        def compare(key: _Key, module: nn.Module | None, prints: list[torch.Tensor], mask: Any, output: Any) -> Any:
            call = self._calls.get(key)
            tensors = [self._rows(tensor) for tensor in self._token_tensors(output)]
            outputs = [] if call is None else [recorded[part] for recorded in call.outputs]
            if call is None or [tensor.shape for tensor in tensors] != [recorded.shape for recorded in outputs]:
                return None
            effects = torch.zeros(len(watched))
            for recorded, tensor in zip(outputs, tensors, strict=True):
                moved = token_effects(recorded.to(tensor.device), tensor).cpu()
                effects = torch.maximum(effects, moved.where(watched, 0.0))
            if not effects.any() or not _equal_at(watched, [hashes[part] for hashes in call.fingerprints], prints):
                return None
            if module is None:
                leaking_convolutions.add(key[0].removesuffix(_CONVOLUTION))
                return None
            entries.append(Entry(key[0], module, effects, mask, key[0] in leaking_convolutions))
            recorded_outputs = iter(outputs)
            return self._map_tokens(output, lambda tensor: self._held(tensor, next(recorded_outputs), watched))

        num_tokens, self._num_tokens = self._num_tokens, len(watched)
        try:
            with self._hooks(self._fingerprints, compare):
                yield entries
        finally:
            self._num_tokens = num_tokens

    @contextmanager
    def tracing_gradients(self, size: Callable[[torch.Tensor], float]) -> Iterator[list[Flow]]:
        """
        Follow gradients through each layer of a run.

        Args:
            size (`Callable`):
                Measures a gradient with one row per token, `[T, ...]`.

        Yields:
            `list[Flow]`: Filled during the run, in the order in which the layers end; the sizes during each backward.
        """
        flows: list[Flow] = []

        def enter(tensors: list[torch.Tensor]) -> Flow:
            flow = Flow()
            follow(tensors, flow.into)
            return flow

        def leave(key: _Key, module: nn.Module | None, flow: Flow, mask: Any, output: Any) -> None:
            flow.name, flow.module = key[0], module
            follow(list(self._token_tensors(output)), flow.out)
            flows.append(flow)

        def follow(tensors: list[torch.Tensor], sizes: list[float]) -> None:
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: sizes.append(size(self._rows(gradient))))

        with self._hooks(enter, leave):
            yield flows

    @contextmanager
    def _hooks(self, enter: Callable[[list[torch.Tensor]], Any], leave: Callable[..., Any]) -> Iterator[None]:
        """
        Call `enter(inputs)` before each layer, and `leave(key, module, what enter gave, mask, output)` after it.

        The same for each short convolution, as a call without a module, named after the layer that calls it.
        """
        counts: Counter[str] = Counter()
        open_calls: list[tuple[str, Any, Any]] = []

        def finish(name: str, module: nn.Module | None, entered: Any, mask: Any, output: Any) -> Any:
            key = (name, counts[name])
            counts[name] += 1
            return leave(key, module, entered, mask, output)

        def before(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
                inputs = (args, {key: value for key, value in kwargs.items() if key != "attention_mask"})
                open_calls.append((name, enter(list(self._token_tensors(inputs))), kwargs.get("attention_mask")))

            return hook

        def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            name, entered, mask = open_calls.pop()
            return finish(name, module, entered, mask, output)

        def after_convolution(hidden: torch.Tensor, output: Any) -> None:
            # Channels first, and as many extra places at the end as the convolution is wide.
            if open_calls and isinstance(output, torch.Tensor) and hidden.ndim == output.ndim == 3:
                rows, results = hidden.transpose(1, 2), output[..., : hidden.shape[-1]].transpose(1, 2)
                finish(open_calls[-1][0] + _CONVOLUTION, None, enter(list(self._token_tensors(rows))), None, results)

        with ExitStack() as stack:
            for name, module in self._layers:
                stack.callback(module.register_forward_pre_hook(before(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
            for module in self._convolutions:
                hook = module.register_forward_hook(lambda _, args, output: after_convolution(args[0], output))
                stack.callback(hook.remove)
            stack.enter_context(observed_convolutions(self._model, after_convolution))
            yield

    # ---- tensors with one row per token

    def _is_per_token(self, tensor: torch.Tensor) -> bool:
        shape = tuple(tensor.shape)
        flat = len(shape) == 2 and shape[0] == self._num_tokens
        return tensor.is_floating_point() and (flat or (len(shape) > 2 and shape[:2] == (1, self._num_tokens)))

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.ndim == 2 else tensor[0]

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

    def _fingerprints(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Hash each token's vector bit by bit, int64 `[T]`: integer sums do not depend on their order."""
        prints = []
        for tensor in tensors:
            rows = self._rows(tensor.detach()).reshape(self._num_tokens, -1).contiguous()
            bits = rows.view(_INTEGER_OF_SIZE[rows.element_size()]).long()
            factors = torch.arange(1, 2 * bits.shape[1], 2, device=bits.device) * 0x9E3779B97F4A7C1
            prints.append((bits * factors).sum(dim=-1))
        return prints


def class_name(module: nn.Module) -> str:
    """Give the name of a module's class."""
    return type(module).__name__


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
    is_container = name.endswith(("layer", "model", "lm", "generation"))
    if hasattr(module, "experts") or (any(part in name for part in _EXPERTS) and not is_container):
        return "router"
    return "layer"


def has_indexer(module: nn.Module) -> bool:
    """Say whether a layer, or one inside it, picks the past tokens to attend to."""
    return any("indexer" in type(part).__name__.lower() for part in module.modules())


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
