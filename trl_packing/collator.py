"""
Samples in, one packed row out: the tensors a model trains on, with the boundaries as keyword arguments.

```text
samples        [5 6 7]  [8 9]           pad_to_multiple_of=4
input_ids      5 6 7 8 9 0 0 0          labels         -100 6 7 -100 9 -100 -100 -100
position_ids   0 1 2 0 1 0 1 2          cu_seq_lens_q  0 3 5 8
```

Shapes: T tokens in the row, N segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .boundaries import IGNORE_INDEX, Boundaries
from .errors import PackingError

_Ints = np.ndarray[Any, Any]


@dataclass
class PackedCollator:
    """
    Lay tokenised samples end to end in one row and compute its boundaries on the host.

    Labels are those of the samples (the default is `input_ids`, masked by `completion_mask` and `assistant_masks`
    where those are present), with -100 on the first token of every segment. Samples and data set are never modified.

    Args:
        pad_to_multiple_of (`int`, *optional*):
            Make the row's length a multiple of this, with one alignment segment of token 0 that is never trained on.
        token_budget (`int`, *optional*):
            Most tokens in a row, alignment included.
        max_segments (`int`, *optional*):
            Give every row the same shape: `token_budget` tokens and `max_segments + 2` offsets, of which the tail
            repeats the last. `max_length_q` is rounded up to the budget or 1/2, 1/4 or 1/8 of it. Needs
            `token_budget`.
        position_ids_start (`int`, *optional*, defaults to `0`):
            Position of each segment's first token.
        host_offsets (`bool`, *optional*, defaults to `False`):
            Whether to add `cu_seqlens_cpu`, the offsets as Python integers, for models whose layers take it.

    Returns:
        `dict[str, Any]`: `input_ids` and `labels` int64 `[1, T]`, and the keys of [`Boundaries.to_model_kwargs`].

    Raises:
        [`PackingError`]: If a sample is empty, its columns differ in length, its `attention_mask` has holes, its
            `seq_lengths` do not add up, or the row exceeds a limit.

    Example:

    ```python
    >>> from trl_packing import PackedCollator
    >>> row = PackedCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> row["labels"]
    tensor([[-100,    6,    7, -100,    9]])
    >>> row["cu_seq_lens_q"]
    tensor([0, 3, 5], dtype=torch.int32)

    ```
    """

    pad_to_multiple_of: int | None = None
    token_budget: int | None = None
    max_segments: int | None = None
    position_ids_start: int = 0
    host_offsets: bool = False

    def __post_init__(self) -> None:
        for name in ("pad_to_multiple_of", "token_budget", "max_segments"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PackingError(f"`{name}` must be at least 1, but it is {value}.")
        if self.max_segments is not None and self.token_budget is None:
            raise PackingError("`max_segments` fixes the shape of a row, which also needs `token_budget`. Set both.")

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.pack(samples)[0]

    def pack(self, samples: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], Boundaries]:
        """Give the packed row and its [`Boundaries`], which hold on the host what the row's tensors say."""
        if not samples:
            raise PackingError("A packed row needs at least 1 sample, but the batch is empty.")
        parts = [_read_sample(sample, index) for index, sample in enumerate(samples)]
        lengths = [length for part in parts for length in part.lengths]
        boundaries = self.align(Boundaries.from_lengths(lengths))
        row = {
            "input_ids": _fill([part.input_ids for part in parts], boundaries, pad=0),
            "labels": _fill([part.labels for part in parts], boundaries, pad=IGNORE_INDEX),
        }
        row["labels"][0, list(boundaries.offsets[: boundaries.num_segments])] = IGNORE_INDEX
        kwargs = boundaries.to_model_kwargs(position_ids_start=self.position_ids_start, host_offsets=self.host_offsets)
        return row | kwargs, boundaries

    def align(self, boundaries: Boundaries) -> Boundaries:
        """
        Add the alignment tail and the repeated offsets that this collator's settings ask for.

        Args:
            boundaries ([`Boundaries`]):
                Of the real tokens.

        Returns:
            [`Boundaries`]: Of the whole row.

        Raises:
            [`PackingError`]: If the row exceeds `token_budget` or `max_segments`.
        """
        total = boundaries.total_tokens
        if self.pad_to_multiple_of is not None:
            total = -(-total // self.pad_to_multiple_of) * self.pad_to_multiple_of
        if self.token_budget is not None and total > self.token_budget:
            raise PackingError(
                f"A row holds at most `token_budget` = {self.token_budget} tokens, but these samples need {total}. "
                "Give fewer samples to a row, or raise `token_budget`."
            )
        if self.max_segments is None:
            return boundaries.aligned_to(total)
        assert self.token_budget is not None
        if boundaries.num_segments > self.max_segments:
            raise PackingError(
                f"A row holds at most `max_segments` = {self.max_segments} segments, but there are "
                f"{boundaries.num_segments}. Raise `max_segments`."
            )
        aligned = boundaries.aligned_to(self.token_budget)
        # One offset more than segments, and one segment more for the alignment tail.
        return Boundaries(
            aligned.lengths,
            aligned.num_alignment_tokens,
            num_offsets=self.max_segments + 2,
            max_seqlen=_length_bucket(max(aligned.lengths), self.token_budget),
        )


@dataclass(frozen=True)
class RowInfo:
    """
    What the host knows of one batch and no layer needs. It travels beside the tensors and never reaches the model.

    Args:
        boundaries ([`Boundaries`] or `None`):
            Of the packed row; `None` for a padded batch.
        fragments (`tuple[int, ...]`):
            Fragment number of each segment, or of each row of a padded batch. Segments of a sample that came packed
            share one. A filler row has none.
        num_targets (`int`):
            Tokens whose loss counts.
        num_tokens (`int`):
            Real tokens.
        num_segments (`int`):
            Segments of real tokens.
        target_positions (`np.ndarray`, *optional*):
            int64 `[num_targets]`: where `labels[:, 1:]`, flattened, is not -100.
        num_cut_tokens (`int`, *optional*, defaults to 0):
            Tokens above `max_length` that were cut while the row was made. Where rows are planned, the plan counts.
    """

    boundaries: Boundaries | None
    fragments: tuple[int, ...]
    num_targets: int
    num_tokens: int
    num_segments: int
    target_positions: _Ints | None = field(default=None, repr=False, compare=False)
    num_cut_tokens: int = 0


ROW_INFO = "row_info"
_FILLER = ({"input_ids": [0, 0], "labels": [IGNORE_INDEX, IGNORE_INDEX]},)


@dataclass
class RowCollator:
    """
    The trainer's collator: a packed row with its [`RowInfo`], and a row without loss where a rank has no samples left.

    Args:
        collator ([`PackedCollator`]):
            Makes the row.
    """

    collator: PackedCollator

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        row, boundaries = self.collator.pack(samples or _FILLER)
        # The first token of a row is never predicted.
        targets = target_positions(row["labels"][:, 1:])
        info = RowInfo(
            boundaries=boundaries,
            fragments=tuple(part["fragment"] for sample in samples for part in _segments(sample)),
            num_targets=targets.size,
            num_tokens=boundaries.num_real_tokens if samples else 0,
            num_segments=(boundaries.num_segments - bool(boundaries.num_alignment_tokens)) if samples else 0,
            target_positions=targets,
        )
        return {**row, ROW_INFO: info}


@dataclass
class PaddedCollator:
    """
    A padded batch with its [`RowInfo`], for evaluation with `eval_packing: false`. A sample that came packed becomes
    one row per segment.

    Args:
        collator (`Callable`):
            TRL's collator, which pads.
    """

    collator: Callable[[list[Any]], dict[str, Any]]

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        samples = [part for sample in samples for part in _segments(sample)]
        return with_padded_info(self.collator(list(samples or _FILLER)), samples)


def with_padded_info(
    batch: dict[str, Any], samples: Sequence[Mapping[str, Any]], *, num_cut_tokens: int = 0
) -> dict[str, Any]:
    """
    Add its [`RowInfo`] to a padded batch.

    Args:
        batch (`dict[str, Any]`):
            From TRL's collator.
        samples (`Sequence[Mapping[str, Any]]`):
            Its rows, with their `fragment`. None for a batch without loss.
        num_cut_tokens (`int`, *optional*, defaults to 0):
            Tokens that were cut while it was made.
    """
    targets = target_positions(batch["labels"][:, 1:])
    info = RowInfo(
        boundaries=None,
        fragments=tuple(sample["fragment"] for sample in samples),
        num_targets=targets.size,
        num_tokens=int(batch["attention_mask"].sum()) if samples else 0,
        num_segments=len(samples),
        target_positions=targets,
        num_cut_tokens=num_cut_tokens if samples else 0,
    )
    return {**batch, ROW_INFO: info}


def _segments(sample: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The segments of a sample, which are several if it came packed."""
    if sample.get("seq_lengths") is None:
        return [sample]
    parts: list[Mapping[str, Any]] = []
    for length, end in zip(sample["seq_lengths"], np.cumsum(sample["seq_lengths"]), strict=True):
        columns = {name: sample[name][end - length : end] for name in ("input_ids", "labels") if name in sample}
        parts.append({**columns, "fragment": sample["fragment"]})
    return parts


def target_positions(labels: torch.Tensor) -> _Ints:
    """Say where labels, flattened, are not -100: int64 `[num_targets]`."""
    return np.flatnonzero(labels.numpy() != IGNORE_INDEX)


def _length_bucket(longest: int, token_budget: int) -> int:
    """The budget halved as often as the longest segment allows, three times at most: few values, few graphs."""
    return next(bound for part in (8, 4, 2, 1) if (bound := -(-token_budget // part)) >= longest)


@dataclass
class _Part:
    """One sample's tokens, labels and segment lengths (one, unless the sample came packed)."""

    input_ids: _Ints
    labels: _Ints
    lengths: Sequence[int]


def _read_sample(sample: Mapping[str, Any], index: int) -> _Part:
    input_ids = _as_ints(sample["input_ids"], "input_ids", index)
    if input_ids.size == 0:
        raise PackingError(
            f"Every segment needs at least 1 token, but sample {index} of the batch is empty. Drop empty samples "
            "before packing, for example with `dataset.filter`."
        )
    labels = sample.get("labels")
    if labels is not None:
        labels = _column(labels, "labels", index, input_ids.size)
    else:
        labels = input_ids
        for name in ("completion_mask", "assistant_masks"):
            if sample.get(name) is not None:
                mask = _column(sample[name], name, index, input_ids.size)
                labels = np.where(mask != 0, labels, IGNORE_INDEX)
    lengths: Sequence[int] = (input_ids.size,)
    if sample.get("seq_lengths") is not None:
        lengths = _as_ints(sample["seq_lengths"], "seq_lengths", index).tolist()
        if sum(lengths) != input_ids.size:
            raise PackingError(
                f"`seq_lengths` of sample {index} add up to {sum(lengths)}, but it has {input_ids.size} tokens. Pack "
                "the data again."
            )
    if sample.get("attention_mask") is not None:
        return _without_masked(sample["attention_mask"], _Part(input_ids, labels, lengths), index)
    return _Part(input_ids, labels, lengths)


def _without_masked(attention_mask: Any, part: _Part, index: int) -> _Part:
    real = np.flatnonzero(_column(attention_mask, "attention_mask", index, part.input_ids.size))
    if real.size == part.input_ids.size:
        return part
    if real.size == 0 or real[-1] - real[0] + 1 != real.size or len(part.lengths) > 1:
        raise PackingError(
            f"Masked tokens are removed where they begin or end a sample, but `attention_mask` of sample {index} "
            f"{'has no token left' if real.size == 0 else 'has zeros in between'}. Mask labels with -100 instead, or "
            "drop the sample."
        )
    kept = slice(int(real[0]), int(real[-1]) + 1)
    return _Part(part.input_ids[kept], part.labels[kept], (real.size,))


def _column(values: Any, name: str, index: int, length: int) -> _Ints:
    column = _as_ints(values, name, index)
    if column.size != length:
        raise PackingError(
            f"`{name}` of sample {index} has {column.size} entries, but the sample has {length} tokens. Every token "
            "needs one."
        )
    return column


def _as_ints(values: Any, name: str, index: int) -> _Ints:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise PackingError(
            f"`{name}` of sample {index} must be a flat list of integers, but it has shape {list(array.shape)} and "
            f"dtype {array.dtype}."
        )
    return array


def _fill(parts: list[_Ints], boundaries: Boundaries, pad: int) -> torch.Tensor:
    row = np.empty(boundaries.total_tokens, dtype=np.int64)
    np.concatenate(parts, out=row[: boundaries.num_real_tokens], casting="unsafe")
    row[boundaries.num_real_tokens :] = pad
    return torch.from_numpy(row)[None]
