"""
The pack plan: which slice of which sample goes into which packed row, as plain integers. Tokens are not touched.

F fragments, M bins. `plan_packs([5, 3, 9, 2], 8, overlong="split", order="best_fit")` may give:

```text
fragments   0: sample 0 [0, 5)   1: sample 1 [0, 3)   2: sample 2 [0, 8)   3: sample 2 [8, 9)   4: sample 3 [0, 2)
bins        [2]          [0, 1]          [4, 3]
row         2222222 2    00000 111       33 2
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heapreplace
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from ..errors import PackingError
from .fill import IntArray, best_fit_decreasing, online_best_fit

Overlong: TypeAlias = Literal["truncate", "split", "drop", "error"]
Truncation: TypeAlias = Literal["keep_start", "keep_end"]
Order: TypeAlias = Literal["shuffled", "best_fit"]

NUM_OPEN_ROWS = 32
_UNLIMITED = 2**62


class Bins(Sequence[IntArray]):
    """
    The bins of a plan: a sequence of int64 arrays of fragment numbers, stored as one array and offsets into it.

    Args:
        flat (`np.ndarray`):
            Fragment numbers of all bins back to back, integers of shape `[F]`.
        offsets (`np.ndarray`):
            int64 of shape `[M + 1]`, from 0 to F. Bin i is `flat[offsets[i] : offsets[i + 1]]`.
    """

    def __init__(self, flat: IntArray, offsets: IntArray):
        self.flat = flat
        self.offsets = offsets

    @classmethod
    def from_arrays(cls, bins: Sequence[Any]) -> Bins:
        """Store a sequence of bins, each a sequence of fragment numbers."""
        arrays = [np.asarray(numbers, dtype=np.int64) for numbers in bins]
        flat = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)
        return cls(flat, np.cumsum([0, *(array.size for array in arrays)], dtype=np.int64))

    @cached_property
    def sizes(self) -> IntArray:
        """Fragments in each bin, int64 of shape `[M]`."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return self.offsets.size - 1

    @overload
    def __getitem__(self, index: int) -> IntArray: ...
    @overload
    def __getitem__(self, index: slice) -> list[IntArray]: ...
    def __getitem__(self, index: int | slice) -> IntArray | list[IntArray]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self.flat[self.offsets[number] : self.offsets[number + 1]].astype(np.int64)

    def __iter__(self) -> Iterator[IntArray]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Bins)
            and np.array_equal(self.flat, other.flat)
            and np.array_equal(self.offsets, other.offsets)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Bins({len(self)} bins of {self.flat.size} fragments)"


@dataclass(frozen=True, eq=False)
class PackPlan:
    """
    What each packed row of one epoch holds, and what became of every sample.

    Args:
        fragments (`np.ndarray`):
            int64 of shape `[F, 3]`: sample, first token and number of tokens of each fragment, in sample order. Where
            nothing is split or dropped, fragment i is sample i. It does not depend on seed and epoch.
        bins (`Sequence[np.ndarray]`):
            Fragment numbers of each packed row, in row order. Every fragment is in exactly one bin.
        token_budget (`int`):
            Most tokens in a row, or 0 where rows are counted in samples.
        num_samples (`int`):
            Samples the plan was made from.
        num_tokens (`int`):
            Tokens in them.
        num_cut_samples (`int`):
            Samples that lost tokens to `overlong="truncate"`.
        num_cut_tokens (`int`):
            Tokens lost that way.
        num_split_samples (`int`):
            Samples that became several fragments.
        num_dropped_samples (`int`):
            Samples dropped by `overlong="drop"`.
        num_dropped_tokens (`int`):
            Tokens in them.
        num_masked_samples (`int`):
            Samples left out by `exclude`, because no label of theirs is trained on.
        num_masked_tokens (`int`):
            Tokens in them.
    """

    fragments: IntArray
    bins: Sequence[IntArray]
    token_budget: int
    num_samples: int = 0
    num_tokens: int = 0
    num_cut_samples: int = 0
    num_cut_tokens: int = 0
    num_split_samples: int = 0
    num_dropped_samples: int = 0
    num_dropped_tokens: int = 0
    num_masked_samples: int = 0
    num_masked_tokens: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.bins, Bins):
            object.__setattr__(self, "bins", Bins.from_arrays(self.bins))

    @property
    def num_bins(self) -> int:
        """Packed rows in the epoch."""
        return len(self.bins)

    @property
    def num_fragments(self) -> int:
        """Segments in the epoch."""
        return len(self.fragments)

    @property
    def lengths(self) -> IntArray:
        """Tokens in each fragment, int64 of shape `[F]`."""
        return self.fragments[:, 2]

    @cached_property
    def num_planned_tokens(self) -> int:
        """Tokens in all rows."""
        return int(self.lengths.sum())

    @cached_property
    def bin_tokens(self) -> IntArray:
        """Tokens in each row, int64 of shape `[M]`."""
        return self.sum_over_bins(self.lengths)

    @property
    def fill_rate(self) -> float:
        """Tokens in all rows divided by rows times token budget, in [0, 1]; 1 where there is no budget."""
        if not self.token_budget:
            return 1.0
        return self.num_planned_tokens / (self.num_bins * self.token_budget)

    def sum_over_bins(self, values: np.ndarray[Any, Any]) -> Any:
        """
        Add up one value per fragment over each bin.

        Args:
            values (`np.ndarray`):
                Numbers of shape `[F]`.

        Returns:
            `np.ndarray`: Sums of shape `[M]`, in the dtype of `values`.
        """
        bins = self._bins
        return np.add.reduceat(values[bins.flat], bins.offsets[:-1])

    @property
    def _bins(self) -> Bins:
        assert isinstance(self.bins, Bins)
        return self.bins


def plan_packs(
    lengths: Sequence[int] | np.ndarray[Any, Any],
    token_budget: int,
    *,
    max_length: int | None = None,
    order: Order = "shuffled",
    overlong: Overlong = "truncate",
    truncation: Truncation = "keep_start",
    seed: int = 0,
    epoch: int = 0,
    max_segments: int | None = None,
    exclude: np.ndarray[Any, Any] | None = None,
) -> PackPlan:
    """
    Plan one epoch of packed rows over a whole data set.

    Args:
        lengths (`Sequence[int]` or `np.ndarray`):
            Tokens in each sample. Every entry must be at least 1.
        token_budget (`int`):
            Most tokens in a packed row.
        max_length (`int`, *optional*):
            Most tokens of a sample; a longer one is overlong. The default is `token_budget`.
        order (`str`, *optional*, defaults to `"shuffled"`):
            `"shuffled"` fills rows from a shuffled stream, so that their composition is random. `"best_fit"` gives the
            fullest rows, but puts samples of like length together.
        overlong (`str`, *optional*, defaults to `"truncate"`):
            What happens to an overlong sample: `"truncate"` cuts it, `"split"` makes fragments of at most `max_length`
            tokens, `"drop"` leaves it out, `"error"` raises.
        truncation (`str`, *optional*, defaults to `"keep_start"`):
            The part that `"truncate"` keeps, `"keep_start"` or `"keep_end"`.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the run, at least 0.
        epoch (`int`, *optional*, defaults to `0`):
            Epoch number. Each epoch groups the samples anew.
        max_segments (`int`, *optional*):
            Most fragments in a row.
        exclude (`np.ndarray`, *optional*):
            bool of shape `[num_samples]`: samples to leave out because no label of theirs is trained on. Their length
            may be 0.

    Returns:
        [`PackPlan`]: The same for the same arguments on every machine.

    Raises:
        [`PackingError`]: If an argument is out of range, a length is below 1, no sample is left, or a sample is overlong
            under `overlong="error"`.

    Example:

    ```python
    >>> from trl_packing import plan_packs
    >>> plan = plan_packs([5, 3, 9, 2], 8, order="best_fit")
    >>> plan.num_bins, plan.num_cut_tokens, round(plan.fill_rate, 2)
    (3, 1, 0.75)

    ```
    """
    _check_at_least_1("token_budget", token_budget)
    if max_length is not None and max_length > token_budget:
        raise PackingError(
            f"A sample must fit into a row, but `max_length` is {max_length} and `token_budget` is {token_budget}. Raise "
            "`token_budget` or lower `max_length`."
        )
    _check_choice("order", order, ("shuffled", "best_fit"))
    if max_segments is not None:
        _check_at_least_1("max_segments", max_segments)
    max_length = token_budget if max_length is None else max_length
    plan = _cut(lengths, token_budget, max_length, overlong, truncation, exclude)
    rng = epoch_generator(seed, epoch)
    limit = _UNLIMITED if max_segments is None else max_segments
    fragment_lengths = np.ascontiguousarray(plan.lengths)
    if order == "best_fit":
        flat, offsets = best_fit_decreasing(fragment_lengths, token_budget, limit, rng)
    else:
        flat, offsets = online_best_fit(fragment_lengths, token_budget, limit, rng, NUM_OPEN_ROWS)
    return replace(plan, bins=Bins(flat, offsets))


def plan_batches(
    lengths: Sequence[int] | np.ndarray[Any, Any],
    batch_size: int,
    *,
    order: Sequence[int] | np.ndarray[Any, Any],
    max_length: int | None = None,
    overlong: Overlong = "truncate",
    truncation: Truncation = "keep_start",
    exclude: np.ndarray[Any, Any] | None = None,
) -> PackPlan:
    """
    Plan one epoch in which each row holds consecutive samples of a given order, without a token budget.

    Args:
        lengths (`Sequence[int]` or `np.ndarray`):
            Tokens in each sample. Every entry must be at least 1.
        batch_size (`int`):
            Fragments per row. Only the last row may hold fewer.
        order (`Sequence[int]` or `np.ndarray`):
            Every sample number once: the epoch's permutation. The fragments of a split sample stay in sequence.
        max_length (`int`, *optional*):
            Most tokens of a sample; a longer one is overlong. The default is no limit.
        overlong (`str`, *optional*, defaults to `"truncate"`):
            As in [`plan_packs`].
        truncation (`str`, *optional*, defaults to `"keep_start"`):
            As in [`plan_packs`].
        exclude (`np.ndarray`, *optional*):
            As in [`plan_packs`].

    Returns:
        [`PackPlan`]: With a `token_budget` of 0.

    Raises:
        [`PackingError`]: As in [`plan_packs`], and if `order` isn't a permutation of the samples.
    """
    _check_at_least_1("batch_size", batch_size)
    plan = _cut(lengths, 0, max_length, overlong, truncation, exclude)
    numbers = _as_int64("order", order)
    if numbers.size != plan.num_samples or not np.array_equal(np.sort(numbers), np.arange(plan.num_samples)):
        raise PackingError(
            f"`order` must hold each of the {plan.num_samples} sample numbers once, but it is {_sketch(numbers)}. Pass a "
            "permutation of all samples."
        )
    rank = np.empty_like(numbers)
    rank[numbers] = np.arange(numbers.size)
    flat = np.argsort(rank[plan.fragments[:, 0]], kind="stable")
    offsets = np.append(np.arange(0, flat.size, batch_size), flat.size)
    return replace(plan, bins=Bins(flat, offsets))


def split_bins(plan: PackPlan, num_bins: int) -> PackPlan:
    """
    Split the fullest bins in two until there are `num_bins`, so that all epochs have the same number of rows.

    Args:
        plan ([`PackPlan`]):
            Plan with at most `num_bins` bins.
        num_bins (`int`):
            Bins of the result.

    Returns:
        [`PackPlan`]: The same fragments. A bin that is split keeps its place, its other half goes to the end.

    Raises:
        [`PackingError`]: If the plan has more bins than that, or fewer fragments.
    """
    if not plan.num_bins <= num_bins <= plan.num_fragments:
        raise PackingError(
            f"A plan of {plan.num_bins} bins and {plan.num_fragments} fragments cannot be split into {num_bins} bins. Ask "
            f"for {plan.num_bins} to {plan.num_fragments}."
        )
    if plan.num_bins == num_bins:
        return plan
    lengths, bins = plan.lengths, list(plan.bins)
    # Tokens count as none where there is nothing to split, so the heap's top can be split as long as any bin can.
    heap = [(-int(lengths[bin].sum()) if bin.size > 1 else 0, number) for number, bin in enumerate(bins)]
    heapify(heap)
    while len(bins) < num_bins:
        number = heap[0][1]
        tokens = np.cumsum(lengths[bins[number]])
        middle = int(np.clip(np.searchsorted(tokens, tokens[-1] / 2), 1, tokens.size - 1))
        bins[number], other = bins[number][:middle], bins[number][middle:]
        heapreplace(heap, (-int(tokens[middle - 1]) if middle > 1 else 0, number))
        heap.append((-int(tokens[-1] - tokens[middle - 1]) if other.size > 1 else 0, len(bins)))
        heapify(heap)
        bins.append(other)
    return replace(plan, bins=bins)


def epoch_generator(seed: int, epoch: int) -> np.random.Generator:
    """Give the random generator of one epoch, the same on every machine."""
    if seed < 0 or epoch < 0:
        raise PackingError(
            f"`seed` and `epoch` must be at least 0, but they are {seed} and {epoch}. Pass other numbers."
        )
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))


def _cut(
    lengths: Sequence[int] | np.ndarray[Any, Any],
    token_budget: int,
    max_length: int | None,
    overlong: str,
    truncation: str,
    exclude: np.ndarray[Any, Any] | None,
) -> PackPlan:
    """Turn samples into fragments and count what is lost. The result has no bins yet."""
    _check_choice("overlong", overlong, ("truncate", "split", "drop", "error"))
    _check_choice("truncation", truncation, ("keep_start", "keep_end"))
    if max_length is not None:
        _check_at_least_1("max_length", max_length)
    sizes = _as_int64("lengths", lengths)
    masked = np.zeros(sizes.size, dtype=bool) if exclude is None else np.asarray(exclude)
    if masked.dtype != bool or masked.shape != sizes.shape:
        raise PackingError(
            f"`exclude` needs one bool for each of the {sizes.size} samples, but it has the dtype {masked.dtype} and the "
            f"shape {list(masked.shape)}. Pass a mask made from the same data set."
        )
    empty = np.flatnonzero((sizes < 1) & ~masked)
    if empty.size:
        raise PackingError(
            f"Every sample needs at least 1 token, but `lengths[{empty[0]}]` is {sizes[empty[0]]}. Drop empty samples "
            "before packing, for example with `dataset.filter`."
        )
    limit = _UNLIMITED if max_length is None else max_length
    too_long = (sizes > limit) & ~masked
    if overlong == "error" and too_long.any():
        first = int(np.flatnonzero(too_long)[0])
        raise PackingError(
            f"No sample may be longer than {limit} tokens under `overlong: error`, but sample {first} has {sizes[first]}, "
            f"and {int(too_long.sum())} samples are too long. Raise `max_length`, or set `overlong` to truncate, split or "
            "drop."
        )
    num_too_long, tokens_too_long = int(too_long.sum()), int(sizes[too_long].sum())
    counters = {
        "num_samples": sizes.size,
        "num_tokens": int(sizes.sum()),
        "num_masked_samples": int(masked.sum()),
        "num_masked_tokens": int(sizes[masked].sum()),
    }
    kept = ~masked
    if overlong == "drop":
        counters |= {"num_dropped_samples": num_too_long, "num_dropped_tokens": tokens_too_long}
        kept &= ~too_long
    samples = np.flatnonzero(kept)
    if not samples.size:
        raise PackingError(
            f"At least one sample must be left to train on, but of {sizes.size} samples {int(masked.sum())} have no "
            f"trained label and {counters.get('num_dropped_samples', 0)} were dropped as overlong. Check the data set, its "
            "labels and `max_length`."
        )
    if overlong == "split":
        counters["num_split_samples"] = num_too_long
        return PackPlan(_split(sizes, samples, limit), (), token_budget, **counters)
    if overlong == "truncate":
        counters |= {"num_cut_samples": num_too_long, "num_cut_tokens": tokens_too_long - num_too_long * limit}
    fragments = np.zeros((samples.size, 3), dtype=np.int64)
    fragments[:, 0] = samples
    fragments[:, 2] = np.minimum(sizes[samples], limit)
    if truncation == "keep_end":
        fragments[:, 1] = sizes[samples] - fragments[:, 2]
    return PackPlan(fragments, (), token_budget, **counters)


def _split(sizes: IntArray, samples: IntArray, limit: int) -> IntArray:
    num_parts = -(-sizes[samples] // limit)
    fragments = np.empty((int(num_parts.sum()), 3), dtype=np.int64)
    fragments[:, 0] = np.repeat(samples, num_parts)
    first_parts = np.cumsum(num_parts) - num_parts
    fragments[:, 1] = (np.arange(len(fragments)) - np.repeat(first_parts, num_parts)) * min(limit, int(sizes.max()))
    fragments[:, 2] = np.minimum(sizes[fragments[:, 0]] - fragments[:, 1], limit)
    return fragments


def _as_int64(name: str, values: Sequence[int] | np.ndarray[Any, Any]) -> IntArray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PackingError(
            f"`{name}` must be a flat sequence of integers, but its shape is {list(array.shape)} and its dtype "
            f"{array.dtype}. Pass one integer per sample."
        )
    return array.astype(np.int64, copy=False)


def _sketch(numbers: IntArray) -> str:
    shown = ", ".join(str(number) for number in numbers[:5].tolist())
    return f"[{shown}{', ...' if numbers.size > 5 else ''}] of {numbers.size} numbers"


def _check_at_least_1(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise PackingError(f"`{name}` must be an integer of at least 1, but it is {value!r}. Pass a positive number.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PackingError(f"`{name}` must be one of {', '.join(choices)}, but it is {value!r}. Pick one of them.")
