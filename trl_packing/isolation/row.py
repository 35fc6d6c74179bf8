"""
The small packed row that is probed, and how far two runs of it differ.

Shapes: T tokens in the row, N segments, V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers.utils import logging

from ..boundaries import Boundaries
from ..errors import PackingError
from .state import RandomState

# One kernel tile of Gated DeltaNet and flash attention; the longest segment has to be longer.
_USUAL_CHUNK = 64
# Windows and chunks above this make the row expensive, and are left to the tests of the operations.
_LONGEST_SPAN = 256
_Result = TypeVar("_Result")
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_sequence_length")
_SPANS = ("sliding_window", "chunk_size", "mamba_chunk_size", "attention_chunk_size", "window_size")


def default_lengths(model: nn.Module) -> tuple[int, ...]:
    """
    Choose segment lengths: one longer than every (affordable) chunk and window of the model, one of a single token.

    Args:
        model (`nn.Module`):
            Its `config` is searched for chunk and window sizes.

    Returns:
        `tuple[int, ...]`: Four lengths, 143 tokens in all unless a window or chunk is longer than 64, or the model's
            context is shorter.
    """
    spans = [_USUAL_CHUNK]
    for config in configs_of(model):
        values = (getattr(config, name, None) for name in _SPANS)
        spans += [value for value in values if isinstance(value, int) and _USUAL_CHUNK < value <= _LONGEST_SPAN]
    usual = max(spans) + 3
    contexts = [getattr(config, name, None) for config in configs_of(model) for name in _CONTEXTS]
    context = min((context for context in contexts if isinstance(context, int) and context > 0), default=None)
    lengths = (usual, 1, 5, 70)
    if context is None or sum(lengths) <= context:
        return lengths
    # The control runs the whole row as one sample, with positions up to its end.
    return (context * 2 // 5, 1, context // 5, context - context * 2 // 5 - 1 - context // 5)


def configs_of(model: nn.Module) -> list[Any]:
    """Give the model's config and its text config, where it has them."""
    config = getattr(model, "config", None)
    if config is None:
        return []
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [config] if text_config is config else [config, text_config]


class Row:
    """
    One packed row and the model that it runs through.

    Args:
        model (`nn.Module`):
            The model, or what `torch.compile` made of it.
        boundaries (`Boundaries`):
            At least 3 segments.
        seed (`int`):
            Seed of the tokens.
        random_state (`RandomState`):
            Restored before every run, so that equal inputs meet equal random numbers.
        agree (`Callable`):
            Says whether a flag is true on any rank, where all ranks run the row together.
        position_ids_start (`int`), host_offsets (`bool`):
            As for [`Boundaries.to_model_kwargs`].

    Raises:
        [`PackingError`]: If the model has no token embeddings or too small a vocabulary.
    """

    def __init__(
        self,
        model: nn.Module,
        boundaries: Boundaries,
        seed: int,
        random_state: RandomState,
        agree: Callable[[bool], bool],
        *,
        position_ids_start: int = 0,
        host_offsets: bool = False,
    ) -> None:
        self.called = model
        self.model: nn.Module = model._orig_mod if isinstance(model, OptimizedModule) else model
        self.boundaries = boundaries
        self.random_state = random_state
        self._agree = agree
        self.is_compiled = any(
            isinstance(module, OptimizedModule) or module._compiled_call_impl is not None for module in model.modules()
        )
        self.embedding = _embedding_of(self.model)
        self.device = next(self.embedding.parameters()).device
        self.compute_dtype = _lowest_precision(self.model, self.device)
        self.leaves: list[torch.Tensor] = []
        self._kwargs = {"position_ids_start": position_ids_start, "device": self.device, "host_offsets": host_offsets}
        self._candidates = _ordinary_tokens(self.model, self.embedding)
        rng = np.random.default_rng(seed)
        self._choice = rng.integers(len(self._candidates), size=boundaries.total_tokens)
        self._steps = rng.integers(1, len(self._candidates), size=boundaries.total_tokens)

    # ---- tokens

    @property
    def tokens(self) -> np.ndarray:
        """The row's token ids, int64 `[T]`."""
        return self._candidates[self._choice]

    def with_changed(self, changed: np.ndarray) -> np.ndarray:
        """Give the row's token ids with another token at every place where the bool array `changed` `[T]` is true."""
        return self._candidates[(self._choice + np.where(changed, self._steps, 0)) % len(self._candidates)]

    def is_in(self, *segments: int) -> np.ndarray:
        """Say for each token whether it belongs to one of the segments: bool `[T]`."""
        return np.isin(np.repeat(np.arange(self.boundaries.num_segments), self.boundaries.lengths), segments)

    # ---- runs

    def run(self, tokens: np.ndarray, *, bounded: bool = True, eager: bool = False) -> torch.Tensor:
        """
        Run the model on one row, with gradients enabled as in training.

        Args:
            tokens (`np.ndarray`):
                int64 `[T]`.
            bounded (`bool`, *optional*, defaults to `True`):
                Whether to pass the boundaries. Without them positions go on through the row.
            eager (`bool`, *optional*, defaults to `False`):
                Whether to leave out torch.compile, because hooks are attached that a compiled graph would keep.

        Returns:
            `torch.Tensor`: Logits `[T, V]`. `leaves` then holds the embeddings that they depend on, each `[1, T, D]`,
                or nothing if a compiled graph ran.

        Raises:
            [`PackingError`]: If the output is not one row of finite logits, on any rank.
        """
        boundaries = self.boundaries if bounded else Boundaries.from_lengths([len(tokens)])
        kwargs = boundaries.to_model_kwargs(**self._kwargs)
        return self._run(tokens, kwargs if bounded else {"position_ids": kwargs["position_ids"]}, eager)

    def run_alone(self, tokens: np.ndarray, *, eager: bool = False) -> torch.Tensor:
        """Run tokens as an ordinary unpacked sample, without a single keyword of packing: logits `[length, V]`."""
        return self._run(tokens, {}, eager)

    def _run(self, tokens: np.ndarray, kwargs: dict[str, Any], eager: bool) -> torch.Tensor:
        return together(self._agree, partial(self._forward, tokens, kwargs, eager))

    def _forward(self, tokens: np.ndarray, kwargs: dict[str, Any], eager: bool) -> torch.Tensor:
        compiled = self.is_compiled and not eager
        context = nullcontext() if compiled else self._leaf_embeddings()
        input_ids = torch.from_numpy(tokens)[None].to(self.device)
        self.random_state.restore()
        self.leaves = []
        # Runs without boundaries take paths that training never takes; what transformers says of them would mislead.
        quiet = nullcontext() if "seq_idx" in kwargs else _quiet_transformers()
        with context, quiet, torch.enable_grad(), _eager_stance(self.is_compiled and eager):
            # Also in eager mode the outermost module: FSDP2's hooks for the weights may sit there.
            output = self.called(input_ids=input_ids, use_cache=False, **kwargs)
        logits = _logits_of(output, len(tokens))
        # Places of the vocabulary that a model masks would swamp every norm.
        logits = logits.masked_fill(logits <= torch.finfo(logits.dtype).min / 2, 0.0)
        if not bool(torch.isfinite(logits).all()):
            raise PackingError(
                "The logits of a row of random tokens hold NaN or infinity, so no probe can compare them. Check the "
                "weights and the dtype."
            )
        return logits

    @contextmanager
    def _leaf_embeddings(self) -> Iterator[None]:
        def replace(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            if torch.is_autocast_enabled(self.device.type):
                autocast_dtype = torch.get_autocast_dtype(self.device.type)
                self.compute_dtype = max(self.compute_dtype, autocast_dtype, key=lambda dtype: torch.finfo(dtype).eps)
            leaf = output.detach().requires_grad_()
            self.leaves.append(leaf)
            # Some models scale the embeddings in place, which a leaf does not allow.
            return leaf.clone()

        handle = self.embedding.register_forward_hook(replace)
        try:
            yield
        finally:
            handle.remove()

    # ---- differences

    def rounding(self) -> float:
        """
        Give the largest relative difference that rounding explains.

        Sums over the row's T tokens in float32 err by at most T epsilons, whatever their order; where results
        are kept in half precision, one rounding on either side of a comparison adds two of its epsilons.
        """
        info = torch.finfo(self.compute_dtype)
        return self.gradient_rounding() + (2 * float(info.eps) if info.bits < 32 else 0.0)

    def gradient_rounding(self) -> float:
        """Give the same for gradients across segments: zero times anything is zero in half precision too."""
        return self.boundaries.total_tokens * float(torch.finfo(torch.float32).eps)

    def per_segment(self, effects: torch.Tensor) -> np.ndarray:
        """Take the largest effect in each segment: float64 `[N]` from `[T]`."""
        starts = np.asarray(self.boundaries.offsets[: self.boundaries.num_segments])
        return np.maximum.reduceat(effects.double().cpu().numpy(), starts)


def token_effects(base: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """
    Measure how far each token's vector moved, relative to its own length or the row's median length.

    Args:
        base, other (`torch.Tensor`):
            `[T, ...]`.

    Returns:
        `torch.Tensor`: float32 `[T]`, exactly 0 where nothing moved.
    """
    with torch.no_grad():
        base, other = base.reshape(len(base), -1), other.reshape(len(other), -1)
        # A router may hand out scores of -inf, which are equal although their difference is NaN.
        is_equal = (base == other) | (base.isnan() & other.isnan())
        norms = torch.linalg.vector_norm(base.nan_to_num(0.0, 0.0, 0.0), dim=-1, dtype=torch.float32)
        scale = torch.maximum(norms, norms.median()).clamp(min=torch.finfo(torch.float32).tiny)
        moved = ((other - base) / scale[:, None]).masked_fill(is_equal, 0.0).nan_to_num(torch.inf)
        return torch.linalg.vector_norm(moved, dim=-1, dtype=torch.float32)


def together(agree: Callable[[bool], bool], function: Callable[[], _Result]) -> _Result:
    """Call a function, and raise on every rank if it raises on any: one that stops alone leaves the others waiting."""
    results, failure = [], None
    try:
        results.append(function())
    except Exception as error:
        failure = error
    if agree(failure is not None):
        raise failure or PackingError("Another rank could not run the row.")
    return results[0]


def unwrapped(model: nn.Module) -> nn.Module:
    """Take off the wrappers whose forward expects a backward: `DistributedDataParallel`, DeepSpeed's engine."""
    while isinstance(model, DistributedDataParallel | DataParallel) or type(model).__name__ == "DeepSpeedEngine":
        model = model.module
    return model


def _eager_stance(eager: bool) -> AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager") if eager else nullcontext()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _embedding_of(model: nn.Module) -> nn.Module:
    getter: Callable[[], Any] | None = getattr(model, "get_input_embeddings", None)
    embedding = getter() if getter is not None else None
    if not isinstance(embedding, nn.Module):
        raise PackingError(
            f"The check needs the token embeddings, but {type(model).__name__} has no `get_input_embeddings`. Pass "
            "the transformers model itself."
        )
    return embedding


def _lowest_precision(model: nn.Module, device: torch.device) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point() and tensor.itemsize > 1}
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    return max(dtypes or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)


def _ordinary_tokens(model: nn.Module, embedding: nn.Module) -> np.ndarray:
    configs = configs_of(model)
    sizes = [getattr(embedding, "num_embeddings", None), *(getattr(config, "vocab_size", None) for config in configs)]
    size = min((size for size in sizes if isinstance(size, int) and size > 0), default=0)
    special = {token for config in configs for token in _special_tokens(vars(config).items())}
    ordinary = np.setdiff1d(np.arange(size, dtype=np.int64), list(special))
    if len(ordinary) < 2:
        raise PackingError(f"The check needs at least 2 ordinary tokens, but the vocabulary has {len(ordinary)}.")
    return ordinary


def _special_tokens(items: Iterable[tuple[str, Any]]) -> Iterator[int]:
    for name, value in items:
        if name.endswith(("token_id", "token_index", "token_ids")):
            yield from (token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))


def _logits_of(output: Any, num_tokens: int) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = getattr(output, "last_hidden_state", None)
    if logits is None:
        logits = output[0] if isinstance(output, tuple | list) else output
    shape = list(logits.shape) if isinstance(logits, torch.Tensor) else type(output).__name__
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3 or list(logits.shape[:2]) != [1, num_tokens]:
        raise PackingError(
            f"A row of {num_tokens} tokens gives logits of shape `[1, {num_tokens}, V]`, but the model returned "
            f"{shape}. Virtual tokens, several rows and outputs without logits cannot be checked."
        )
    return logits[0]
