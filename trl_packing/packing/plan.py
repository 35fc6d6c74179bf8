"""
The pack plan: which slice of which sample goes into which packed row, as plain integers. Tokens are not touched.

F fragments, M bins. `plan_packs([5, 3, 9, 2], 8, overlong="split", order="best_fit")` may give:

```text
fragments   0: sample 0 [0, 5)   1: sample 1 [0, 3)   2: sample 2 [0, 8)   3: sample 2 [8, 9)   4: sample 3 [0, 2)
bins        [2]         [0, 1]      [4, 3]
row         22222222    00000111    332
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappush, heapreplace
from typing import Any, overload

import numpy as np

from ..errors import PackingError
from .cut import Fragments
from .fill import IntArray


class Bins(Sequence[IntArray]):
    """
    The bins of a plan: a sequence of int64 arrays of fragment numbers, stored as one array and offsets into it.

    Args:
        flat (`np.ndarray`):
            Fragment numbers of all bins back to back, integers of shape `[F]`.
        offsets (`np.ndarray`):
            int64 of shape `[M + 1]`, from 0 to F, strictly increasing. Bin i is `flat[offsets[i] : offsets[i + 1]]`.
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

    @property
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
        if not isinstance(other, Bins):
            return NotImplemented
        return np.array_equal(self.flat, other.flat) and np.array_equal(self.offsets, other.offsets)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Bins({len(self)} bins of {self.flat.size} fragments)"


@dataclass(frozen=True, eq=False)
class PackPlan:
    """
    What each packed row of one epoch holds, and what became of every sample.

    Args:
        pieces ([`Fragments`]):
            The fragments by column, in sample order. They do not depend on seed and epoch.
        bins (`Sequence[np.ndarray]`):
            Fragment numbers of each packed row, in row order. Every fragment is in exactly one bin.
        token_budget (`int`):
            Most tokens in a row, or 0 where rows are counted in samples.
        max_segments (`int`, *optional*, defaults to `0`):
            Most fragments in a row, or 0 for no limit.
        num_samples (`int`, *optional*, defaults to `0`):
            Samples the plan was made from.
        num_tokens (`int`, *optional*, defaults to `0`):
            Tokens in them.
        num_cut_samples (`int`, *optional*, defaults to `0`):
            Samples that lost tokens to `overlong="truncate"`.
        num_cut_tokens (`int`, *optional*, defaults to `0`):
            Tokens lost that way.
        num_split_samples (`int`, *optional*, defaults to `0`):
            Samples that became several fragments.
        num_dropped_samples (`int`, *optional*, defaults to `0`):
            Samples dropped by `overlong="drop"`.
        num_dropped_tokens (`int`, *optional*, defaults to `0`):
            Tokens in them.
        num_masked_samples (`int`, *optional*, defaults to `0`):
            Samples left out by `exclude`, because no label of theirs is trained on.
        num_masked_tokens (`int`, *optional*, defaults to `0`):
            Tokens in them.
    """

    pieces: Fragments
    bins: Sequence[IntArray]
    token_budget: int
    max_segments: int = 0
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
        return self.lengths.size

    @property
    def lengths(self) -> IntArray:
        """Tokens in each fragment, int64 of shape `[F]`."""
        return self.pieces.lengths

    @cached_property
    def fragments(self) -> IntArray:
        """
        Sample, first token and number of tokens of each fragment, int64 of shape `[F, 3]`. Where nothing is split or
        dropped, fragment i is sample i. Built on first use: a plan of ten million samples needs 240 MB for it.
        """
        return self.pieces.table()

    @cached_property
    def num_planned_tokens(self) -> int:
        """Tokens in all rows."""
        return int(self.lengths[self._bins.flat].sum())

    @cached_property
    def bin_tokens(self) -> IntArray:
        """Tokens in each row, int64 of shape `[M]`."""
        return self.sum_over_bins(self.lengths)

    @property
    def fill_rate(self) -> float:
        """Tokens in all rows divided by rows times token budget, in [0, 1]; 1 where there is no budget or no row."""
        if not self.token_budget or not self.num_bins:
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
        if not self.num_bins:
            return np.zeros(0, dtype=values.dtype)
        return np.add.reduceat(values[self._bins.flat], self._bins.offsets[:-1])

    def without(self, fragments: Sequence[int] | IntArray) -> PackPlan:
        """
        Leave out fragments, and the bins that are then empty.

        Args:
            fragments (`Sequence[int]` or `np.ndarray`):
                Fragment numbers, such as those that an interrupted run has trained on.

        Returns:
            [`PackPlan`]: With the same `fragments`, so that their numbers keep their meaning.
        """
        kept = np.ones(self.num_fragments, dtype=bool)
        kept[np.asarray(fragments, dtype=np.int64)] = False
        kept = kept[self._bins.flat]
        ends = np.append(0, np.cumsum(kept))[self._bins.offsets]
        return replace(self, bins=Bins(self._bins.flat[kept], np.unique(ends)))

    @property
    def _bins(self) -> Bins:
        assert isinstance(self.bins, Bins)
        return self.bins


def split_bins(plan: PackPlan, num_bins: int) -> PackPlan:
    """
    Split the fullest bins in two until there are `num_bins`, so that all epochs have the same number of rows.

    Args:
        plan ([`PackPlan`]):
            Plan with at most `num_bins` bins.
        num_bins (`int`):
            Bins of the result.

    Returns:
        [`PackPlan`]: The same fragments in the same order. The halves of a bin follow each other.

    Raises:
        [`PackingError`]: If the plan has more bins than that, or fewer fragments.
    """
    num_missing = num_bins - plan.num_bins
    bins = plan._bins
    if num_missing < 0 or num_bins > bins.flat.size:
        raise PackingError(
            f"A plan of {plan.num_bins} bins and {bins.flat.size} fragments cannot be split into {num_bins} bins. Ask "
            f"for {plan.num_bins} to {bins.flat.size}."
        )
    if not num_missing:
        return plan
    # No more bins than are missing get split, so the fullest of that number are all that matter.
    can_split = np.flatnonzero(bins.sizes > 1)
    fullest = can_split[np.argsort(-plan.bin_tokens[can_split], kind="stable")[:num_missing]]
    heap = [(-int(plan.bin_tokens[bin]), int(bins.offsets[bin]), int(bins.offsets[bin + 1])) for bin in fullest]
    heapify(heap)
    cuts = []
    for _ in range(num_missing):
        _, start, stop = heap[0]
        tokens = np.cumsum(plan.lengths[bins.flat[start:stop]])
        cut = start + 1 + min(int(np.searchsorted(tokens, tokens[-1] / 2)), tokens.size - 2)
        cuts.append(cut)
        left = int(tokens[cut - start - 1])
        # A half of one fragment can't be split again, so it sorts last.
        heapreplace(heap, (-left if cut - start > 1 else 0, start, cut))
        heappush(heap, (left - int(tokens[-1]) if stop - cut > 1 else 0, cut, stop))
    offsets = np.sort(np.concatenate([bins.offsets, np.array(cuts, dtype=np.int64)]))
    return replace(plan, bins=Bins(bins.flat, offsets))
