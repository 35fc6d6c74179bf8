"""From samples to fragments: what happens to samples that are too long, and the count of everything that is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from ..errors import PackingError
from .fill import IntArray

Overlong: TypeAlias = Literal["truncate", "split", "drop", "error"]
Truncation: TypeAlias = Literal["keep_start", "keep_end"]

UNLIMITED = 2**62


@dataclass
class Fragments:
    """
    Fragments of a data set in sample order, and the fate of its samples.

    Args:
        lengths (`np.ndarray`):
            Tokens in each fragment, int64 of shape `[F]`.
        samples (`np.ndarray`, *optional*):
            Sample of each fragment, int64 of shape `[F]`. Without it fragment i is sample i.
        starts (`np.ndarray`, *optional*):
            First token of each fragment in its sample, int64 of shape `[F]`. Without it all are 0.
        counts (`dict[str, int]`):
            Counters of [`PackPlan`] by name.
    """

    lengths: IntArray
    samples: IntArray | None = None
    starts: IntArray | None = None
    counts: dict[str, int] = field(default_factory=dict)

    def table(self) -> IntArray:
        """Sample, start and length of each fragment, int64 of shape `[F, 3]`."""
        table = np.zeros((self.lengths.size, 3), dtype=np.int64)
        table[:, 0] = np.arange(self.lengths.size) if self.samples is None else self.samples
        if self.starts is not None:
            table[:, 1] = self.starts
        table[:, 2] = self.lengths
        return table


@dataclass(frozen=True)
class CutRule:
    """
    What to do with samples that are too long.

    Args:
        max_length (`int`, *optional*):
            Most tokens of a fragment. The default is no limit.
        overlong (`str`, *optional*, defaults to `"truncate"`):
            `"truncate"` cuts a longer sample, `"split"` makes fragments of it, `"drop"` leaves it out, `"error"`
            raises.
        truncation (`str`, *optional*, defaults to `"keep_start"`):
            The part that `"truncate"` keeps, `"keep_start"` or `"keep_end"`.

    Raises:
        [`PackingError`]: If an argument is out of range.
    """

    max_length: int | None = None
    overlong: Overlong = "truncate"
    truncation: Truncation = "keep_start"

    def __post_init__(self) -> None:
        check_choice("overlong", self.overlong, ("truncate", "split", "drop", "error"))
        check_choice("truncation", self.truncation, ("keep_start", "keep_end"))
        if self.max_length is not None:
            check_at_least_1("max_length", self.max_length)

    @property
    def limit(self) -> int:
        """Most tokens of a fragment, a huge number where there is no limit."""
        return UNLIMITED if self.max_length is None else self.max_length

    def apply(self, lengths: Any, exclude: Any = None, first_sample: int = 0) -> Fragments:
        """
        Turn samples into fragments.

        Args:
            lengths (`Sequence[int]` or `np.ndarray`):
                Tokens in each sample, at least 1 unless excluded.
            exclude (`np.ndarray`, *optional*):
                bool of the shape of `lengths`: samples to leave out because no label of theirs is trained on.
            first_sample (`int`, *optional*, defaults to `0`):
                Number of the first sample, for messages.

        Returns:
            [`Fragments`]: Possibly none.

        Raises:
            [`PackingError`]: If a length is below 1, or a sample is too long under `overlong="error"`.
        """
        sizes = as_integers("lengths", lengths)
        counts = {"num_samples": sizes.size, "num_tokens": int(sizes.sum())}
        samples = None
        if exclude is not None:
            masked = _checked_mask(exclude, sizes)
            counts |= {"num_masked_samples": int(masked.sum()), "num_masked_tokens": int(sizes[masked].sum())}
            samples = np.flatnonzero(~masked)
            sizes = sizes[samples]
        if sizes.size and sizes.min() < 1:
            place = int(np.argmin(sizes))
            number = first_sample + int(place if samples is None else samples[place])
            raise PackingError(
                f"Every sample needs at least 1 token, but `lengths[{number}]` is {sizes[place]}. Drop empty samples "
                "before packing, for example with `dataset.filter`."
            )
        too_long = np.flatnonzero(sizes > self.limit)
        if not too_long.size:
            return Fragments(sizes, samples, None, counts)
        if self.overlong == "error":
            number = first_sample + int(too_long[0] if samples is None else samples[too_long[0]])
            raise PackingError(
                f"No sample may be longer than {self.limit} tokens under `overlong: error`, but sample {number} has "
                f"{sizes[too_long[0]]}, and {too_long.size} are too long in all. Raise `max_length`, or set "
                "`overlong` to truncate, split or drop."
            )
        fragments = Fragments(sizes, samples, None, counts)
        return getattr(self, f"_{self.overlong}")(fragments, too_long)

    def _truncate(self, whole: Fragments, too_long: IntArray) -> Fragments:
        num_cut = int(whole.lengths[too_long].sum()) - self.limit * too_long.size
        whole.counts |= {"num_cut_samples": too_long.size, "num_cut_tokens": num_cut}
        lengths = np.minimum(whole.lengths, self.limit)
        starts = whole.lengths - lengths if self.truncation == "keep_end" else None
        return Fragments(lengths, whole.samples, starts, whole.counts)

    def _drop(self, whole: Fragments, too_long: IntArray) -> Fragments:
        num_tokens = int(whole.lengths[too_long].sum())
        whole.counts |= {"num_dropped_samples": too_long.size, "num_dropped_tokens": num_tokens}
        kept = np.flatnonzero(whole.lengths <= self.limit)
        return Fragments(
            whole.lengths[kept], kept if whole.samples is None else whole.samples[kept], None, whole.counts
        )

    def _split(self, whole: Fragments, too_long: IntArray) -> Fragments:
        whole.counts |= {"num_split_samples": too_long.size}
        num_parts = -(-whole.lengths // self.limit)
        owners = np.repeat(np.arange(whole.lengths.size), num_parts)
        starts = (np.arange(owners.size) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)) * self.limit
        lengths = np.minimum(whole.lengths[owners] - starts, self.limit)
        return Fragments(lengths, owners if whole.samples is None else whole.samples[owners], starts, whole.counts)


def as_integers(name: str, values: Sequence[int] | np.ndarray[Any, Any]) -> IntArray:
    """Copy a flat sequence of integers to an int64 array."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PackingError(
            f"`{name}` must be a flat sequence of integers, but its shape is {list(array.shape)} and its dtype is "
            f"{array.dtype}. Pass one integer per sample."
        )
    return array.astype(np.int64)


def check_at_least_1(name: str, value: int) -> None:
    """Raise unless a setting is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise PackingError(f"`{name}` must be an integer of at least 1, but it is {value!r}. Pass a positive integer.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless a setting is one of the choices."""
    if value not in choices:
        raise PackingError(f"`{name}` must be one of {', '.join(choices)}, but it is {value!r}. Pick one of them.")


def _checked_mask(exclude: Any, sizes: IntArray) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask = np.asarray(exclude)
    if mask.dtype != np.bool_ or mask.shape != sizes.shape:
        raise PackingError(
            f"`exclude` needs one bool for each of the {sizes.size} samples, but its dtype is {mask.dtype} and its "
            f"shape is {list(mask.shape)}. Pass a mask made from the same data set."
        )
    return mask
