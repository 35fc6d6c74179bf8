"""
Where one segment of a packed row ends and the next begins: every conversion, and nowhere else.

Shapes: B batch rows, T tokens in the row, N segments.

A packed row of three segments and an alignment tail, `Boundaries.from_lengths([3, 1, 2]).aligned_to(8)`:

```text
input_ids      a0 a1 a2 | b0 | c0 c1 | 0  0
position_ids    0  1  2 |  0 |  0  1 | 0  1
seq_idx         0  0  0 |  1 |  2  2 | 3  3
cu_seqlens      0        3    4       6      8
labels         -100 a1 a2 | -100 | -100 c1 | -100 -100
```

Rules that hold everywhere:

- A segment has at least one token, so `cu_seqlens` is strictly increasing. The one exception is the fixed row shape,
  which repeats the last offset so that every row has the same number of offsets. See below.
- Alignment pads are ONE segment at the end of the row, never one segment per pad. It is part of `lengths`, of
  `cu_seqlens` and of `max_seqlen`: a `max_seqlen` below it would make varlen kernels skip its rows, and tokens beyond
  the last offset come back uninitialised. No label of it is ever trained on.
- In `position_ids` a segment starts wherever a position is not its left neighbour plus one. This covers models whose
  first position is not 0, where the three rules of TRL and transformers disagree.

Why a repeated last offset, a segment of no token at the end of the row, is legal:

- flash-attn 2.8: blocks beyond a segment's length return before they read or write: of queries in the forward pass, of
  keys in the backward pass, whose buffer gets 128 rows more per segment. Read in `flash_fwd_kernel.h` and
  `flash_bwd_kernel.h` of `csrc/flash_attn/src`.
- torch `varlen_attn`: the same lines, in PyTorch's copy in `aten/src/ATen/native/transformers/cuda/flash_attn`; on the
  way there nothing in `torch/nn/attention/varlen.py` 2.13 checks offsets.
- flash-linear-attention 0.6: it has ceil(0 / chunk) = 0 chunks, for which nothing is launched, and the package's own
  form for fixed shapes asks for such a tail (`prepare_chunk_indices` and `prepare_chunk_indices_static` in
  `fla/ops/utils/index.py`).
  Older versions find segments by their first chunk, so there only the tail may be empty.
- mamba-ssm and causal-conv1d never see it: they take `seq_idx`, with one number per token.
- Our operations: the host drops empty lengths, and on the device `searchsorted` lands on none. Logits and gradients
  are the same bit for bit, which `tests/test_fixed_rows.py` tests.

The CUDA kernels were read, not run. `benchmarks/gpu.py` runs each with and without the tail, and compares.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .errors import PackingError

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Boundaries:
    """
    Segment boundaries of one packed row, computed once on the host.

    Args:
        lengths (`tuple[int, ...]`):
            Tokens in each segment, in row order, the alignment segment included. Every entry is at least 1.
        num_alignment_tokens (`int`, *optional*, defaults to `0`):
            Tokens of the last segment if it only aligns the row, else 0.
        num_offsets (`int`, *optional*):
            Entries of `cu_seqlens`. The default is one more than the segments; a larger number repeats the last
            offset.
        max_seqlen (`int`, *optional*):
            Upper bound of the segment lengths handed to kernels. The default is the longest segment.

    Raises:
        [`PackingError`]: If a length is below 1, or a bound is too small for the lengths.

    Example:

    ```python
    >>> from trl_packing import Boundaries
    >>> boundaries = Boundaries.from_lengths([3, 1, 2])
    >>> boundaries.cu_seqlens
    tensor([0, 3, 4, 6], dtype=torch.int32)
    >>> boundaries.position_ids()
    tensor([[0, 1, 2, 0, 0, 1]])

    ```
    """

    lengths: tuple[int, ...]
    num_alignment_tokens: int = 0
    num_offsets: int = 0
    max_seqlen: int = 0

    def __post_init__(self) -> None:
        if not self.lengths:
            raise PackingError("A packed row needs at least one segment, but `lengths` is empty.")
        if min(self.lengths) < 1:
            index, length = next((index, length) for index, length in enumerate(self.lengths) if length < 1)
            raise PackingError(
                f"Every segment needs at least 1 token, but `lengths[{index}]` is {length}. Drop empty samples before "
                "packing, for example with `dataset.filter`."
            )
        if self.num_alignment_tokens not in (0, self.lengths[-1]):
            raise PackingError(
                f"The alignment segment is the last one, of {self.lengths[-1]} tokens, but `num_alignment_tokens` is "
                f"{self.num_alignment_tokens}."
            )
        longest, num_offsets = max(self.lengths), len(self.lengths) + 1
        if self.num_offsets and self.num_offsets < num_offsets:
            raise PackingError(
                f"{len(self.lengths)} segments need {num_offsets} offsets, but `num_offsets` is {self.num_offsets}. "
                "Raise `max_segments`."
            )
        if self.max_seqlen and self.max_seqlen < longest:
            raise PackingError(
                f"The longest segment has {longest} tokens, but `max_seqlen` is {self.max_seqlen}. Varlen kernels "
                "skip tokens beyond it without a message."
            )
        object.__setattr__(self, "num_offsets", self.num_offsets or num_offsets)
        object.__setattr__(self, "max_seqlen", self.max_seqlen or longest)

    # ---- construction

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> Boundaries:
        """
        Build boundaries from segment lengths.

        Args:
            lengths (`Iterable[int]`):
                Tokens in each segment, in row order. Every entry must be at least 1.

        Returns:
            [`Boundaries`]: Without an alignment segment.

        Raises:
            [`PackingError`]: If there is no segment or a length is below 1.
        """
        return cls(tuple(_as_ints(lengths)))

    @classmethod
    def from_position_ids(cls, position_ids: torch.Tensor) -> Boundaries:
        """
        Read boundaries from positions that restart in every segment, whatever number they start at.

        Args:
            position_ids (`torch.Tensor`):
                Integer tensor of shape `[T]`, `[1, T]` or `[B, T]`. The rows of a batch are laid end to end, and each
                row starts a segment. On a GPU this copies to the host.

        Returns:
            [`Boundaries`]: A segment starts at each row and wherever a position is not its left neighbour plus one.

        Raises:
            [`PackingError`]: If the tensor has an M-RoPE axis, whose time axis repeats inside an image and therefore
                says nothing about boundaries, or is empty.
        """
        if position_ids.ndim not in (1, 2):
            raise PackingError(
                f"Boundaries are read from `position_ids` of shape `[B, T]`, but the shape is "
                f"{list(position_ids.shape)}. Positions with an M-RoPE axis repeat inside an image, so they are not "
                "boundaries. Pass `lengths`."
            )
        positions = _as_numpy(position_ids, "position_ids").reshape(-1, position_ids.shape[-1])
        starts = np.ones(positions.shape, dtype=bool)
        starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        return cls.from_lengths(_run_lengths(starts.reshape(-1)))

    @classmethod
    def from_attention_mask(cls, attention_mask: torch.Tensor) -> Boundaries:
        """
        Read one segment per row from a padded batch's mask. Rows without a token give no segment.

        Args:
            attention_mask (`torch.Tensor`):
                Bool or integer tensor of zeros and ones, shape `[B, T]`, left- or right-padded. On a GPU this copies
                to the host.

        Returns:
            [`Boundaries`]: Of the row that holds the real tokens of all rows, in row order.

        Raises:
            [`PackingError`]: If a row has a hole, the values are not 0 and 1, or no row has a token.
        """
        return cls.from_lengths(length for length in lengths_from_attention_mask(attention_mask) if length)

    @classmethod
    def from_seq_idx(cls, seq_idx: torch.Tensor) -> Boundaries:
        """
        Read boundaries from segment numbers.

        Args:
            seq_idx (`torch.Tensor`):
                Integer tensor of shape `[T]` or `[1, T]`. Each segment has a number of its own. On a GPU this copies
                to the host.

        Returns:
            [`Boundaries`]: A segment starts wherever the number changes.

        Raises:
            [`PackingError`]: If there is more than one row, a number is negative (causal-conv1d reads those as
            padding), or
                a number comes back after another one (the Mamba-2 scan needs them to be unique).
        """
        if seq_idx.ndim > 2 or (seq_idx.ndim == 2 and seq_idx.shape[0] != 1):
            raise PackingError(
                f"`seq_idx` numbers the segments of one row, but its shape is {list(seq_idx.shape)}. Pass one row."
            )
        numbers = _as_numpy(seq_idx, "seq_idx").reshape(-1)
        if numbers.min() < 0:
            raise PackingError(
                f"`seq_idx` must not be negative, but it holds {int(numbers.min())}. Kernels read negative numbers as "
                "padding."
            )
        starts = np.ones(numbers.shape, dtype=bool)
        starts[1:] = numbers[1:] != numbers[:-1]
        firsts = numbers[starts]
        if np.unique(firsts).size != firsts.size:
            raise PackingError(
                "Every segment needs a number of its own, but `seq_idx` comes back to an earlier number. Number the "
                "segments in row order."
            )
        return cls.from_lengths(_run_lengths(starts))

    def aligned_to(self, total_tokens: int) -> Boundaries:
        """
        Add one alignment segment so that the row holds `total_tokens` tokens.

        Args:
            total_tokens (`int`):
                Tokens of the result. Nothing changes if the row has that many already.

        Returns:
            [`Boundaries`]: With `num_alignment_tokens` set.

        Raises:
            [`PackingError`]: If the row is longer than that, or is aligned already.
        """
        num_pads = total_tokens - self.total_tokens
        if num_pads == 0:
            return self
        if num_pads < 0 or self.num_alignment_tokens:
            raise PackingError(
                f"A row of {self.total_tokens} tokens, {self.num_alignment_tokens} of them alignment, cannot be "
                f"aligned to {total_tokens} tokens."
            )
        return Boundaries((*self.lengths, num_pads), num_alignment_tokens=num_pads)

    # ---- views

    @property
    def num_segments(self) -> int:
        """Segments in the row, the alignment segment included."""
        return len(self.lengths)

    @cached_property
    def total_tokens(self) -> int:
        """Tokens in the row, alignment included."""
        return sum(self.lengths)

    @property
    def num_real_tokens(self) -> int:
        """Tokens in the row without the alignment segment."""
        return self.total_tokens - self.num_alignment_tokens

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """`cu_seqlens` as Python integers."""
        return tuple(self._offsets_numpy.tolist())

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Cumulative boundaries on the CPU: a new int32 tensor of shape `[N + 1]`, from 0 to T."""
        return torch.from_numpy(self._offsets_numpy.copy())

    @property
    def seq_idx(self) -> torch.Tensor:
        """Segment number of each token on the CPU: a new int32 tensor of shape `[1, T]`."""
        numbers = np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)
        return torch.from_numpy(numbers)[None]

    def position_ids(self, start: int = 0) -> torch.Tensor:
        """
        Position of each token inside its segment.

        Args:
            start (`int`, *optional*, defaults to `0`):
                Position of each segment's first token. RoBERTa-like models start above their padding index.

        Returns:
            `torch.Tensor`: int64 of shape `[1, T]` on the CPU, restarting in each segment.
        """
        starts = self._offsets_numpy[: len(self.lengths)].astype(np.int64) - start
        positions = np.arange(self.total_tokens, dtype=np.int64) - np.repeat(starts, self.lengths)
        return torch.from_numpy(positions)[None]

    def to_model_kwargs(
        self, *, position_ids_start: int = 0, device: torch.device | str | None = None, host_offsets: bool = False
    ) -> dict[str, Any]:
        """
        Give the keyword arguments that carry these boundaries into a transformers model.

        Args:
            position_ids_start (`int`, *optional*, defaults to `0`):
                Position of each segment's first token.
            device (`torch.device` or `str`, *optional*):
                Where the tensors go. The default leaves them on the CPU.
            host_offsets (`bool`, *optional*, defaults to `False`):
                Whether to add `cu_seqlens_cpu`, the offsets as a tuple of Python integers, so that no layer copies
                them back from the device. It is a tuple because a tensor would be moved by accelerate.

        Returns:
            `dict[str, Any]`: `position_ids` int64 `[1, T]`, `cu_seq_lens_q` and `cu_seq_lens_k` (one int32 tensor of
                `[N + 1]`), `max_length_q` and `max_length_k` (Python integers), `seq_idx` int32 `[1, T]`. The tensors
                are new on every call, because kernels cache what they derive from them by identity. There is never an
                `attention_mask`: flash attention prefers it and then ignores the boundaries.
        """
        cu_seqlens = self.cu_seqlens.to(device)
        kwargs: dict[str, Any] = {
            "position_ids": self.position_ids(position_ids_start).to(device),
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
            "seq_idx": self.seq_idx.to(device),
        }
        if host_offsets:
            kwargs["cu_seqlens_cpu"] = self.offsets
        return kwargs

    @cached_property
    def _offsets_numpy(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        offsets = np.full(self.num_offsets, self.total_tokens, dtype=np.int32)
        offsets[0] = 0
        np.cumsum(self.lengths, out=offsets[1 : len(self.lengths) + 1])
        return offsets


def lengths_from_attention_mask(attention_mask: torch.Tensor) -> list[int]:
    """
    Count the real tokens of each row of a padded batch, empty rows included.

    Args:
        attention_mask (`torch.Tensor`):
            Bool or integer tensor of zeros and ones, shape `[B, T]`, left- or right-padded.

    Returns:
        `list[int]`: Real tokens per row, in row order.

    Raises:
        [`PackingError`]: If a row has a hole or the values are not 0 and 1.
    """
    if attention_mask.ndim != 2:
        raise PackingError(
            f"`attention_mask` needs the shape `[B, T]`, but the shape is {list(attention_mask.shape)}. Pass the "
            "tokenizer's 2-D mask, not an expanded one."
        )
    mask = _as_numpy(attention_mask, "attention_mask")
    real = mask != 0
    if not np.array_equal(real, mask):
        raise PackingError(
            f"`attention_mask` holds zeros and ones, but values from {mask.min()} to {mask.max()} were passed. Pass 1 "
            "for real tokens and 0 for pads."
        )
    # A row without a hole rises at most once, counting from a virtual 0 before it.
    rises = np.diff(real.astype(np.int8), axis=1, prepend=0) == 1
    holes = np.flatnonzero(rises.sum(axis=1) > 1)
    if holes.size:
        raise PackingError(
            f"Real tokens must be adjacent, but row {int(holes[0])} of `attention_mask` has zeros between ones. "
            "Remove the masked tokens, or pad on one side only."
        )
    return _as_ints(real.sum(axis=1))


BOUNDARY_KEYS = frozenset(
    {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cu_seqlens_cpu"}
)


_lengths_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def host_lengths(cu_seqlens: torch.Tensor, host_offsets: Sequence[int] | None = None) -> tuple[int, ...]:
    """
    Give the segment lengths that offsets describe, without copying the same tensor from its device twice.

    Args:
        cu_seqlens (`torch.Tensor`):
            Integer tensor of shape `[N + 1]`. A repeated tail is legal and gives no segment.
        host_offsets (`Sequence[int]`, *optional*):
            The same offsets as Python integers. With them nothing is read from the device.

    Returns:
        `tuple[int, ...]`: Tokens in each segment, in row order.
    """
    if host_offsets is not None:
        return _lengths_between(host_offsets)
    # Every layer of a forward gets the same tensor object; `_version` changes when someone writes into it.
    cached = _lengths_of.get(cu_seqlens)
    if cached is None or cached[0] != cu_seqlens._version:
        cached = (cu_seqlens._version, _lengths_between(cu_seqlens.tolist()))
        _lengths_of[cu_seqlens] = cached
    return cached[1]


def _lengths_between(offsets: Sequence[int]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in pairwise(offsets) if stop != start)


def _as_ints(values: Iterable[int]) -> list[int]:
    if isinstance(values, torch.Tensor | np.ndarray):
        values = values.tolist()
    values = list(values)
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise PackingError(f"Segment lengths are integers, but {values[:8]} were passed. Count the tokens.") from None


def _as_numpy(tensor: torch.Tensor, name: str) -> np.ndarray[Any, Any]:
    if tensor.numel() == 0:
        raise PackingError(
            f"`{name}` is empty: its shape is {list(tensor.shape)}. A packed row needs at least 1 token."
        )
    if tensor.is_floating_point():
        raise PackingError(f"`{name}` must hold integers, but its dtype is {tensor.dtype}.")
    return tensor.detach().cpu().numpy()


def _run_lengths(starts: np.ndarray[Any, Any]) -> Sequence[int]:
    where = np.flatnonzero(starts)
    return np.diff(where, append=starts.size).tolist()
