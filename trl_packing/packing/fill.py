"""
Two ways of filling rows, on plain integers: best fit decreasing over a length histogram, and online best fit.

N fragments, M bins. Both take fragment lengths that already fit the budget and give bins of fragment numbers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

IntArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

# The low bits of a key hold an open row's number, the high bits its free space. Few bits keep the integers small and
# fast.
_ROW_BITS = 10
_ROW_MASK = (1 << _ROW_BITS) - 1
_BLOCK = 2**17
MAX_OPEN_ROWS = 1_000


def best_fit_decreasing(
    lengths: IntArray, token_budget: int, max_segments: int, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """
    Fill rows by best-fit decreasing, treating all fragments of one length at once.

    Fragments of one length are interchangeable, so a length and its count replace them until the bins are known. The
    cost grows with the fragments and the distinct lengths, and the number of bins is that of the textbook loop. `rng`
    decides which of the fragments of one length goes where, and the order of the bins.

    Args:
        lengths (`np.ndarray`):
            Tokens of each fragment, int64 of shape `[N]`, each from 1 to `token_budget`.
        token_budget (`int`):
            Most tokens in a bin.
        max_segments (`int`):
            Most fragments in a bin.
        rng (`np.random.Generator`):
            Source of both shuffles.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: The fragment numbers of all bins back to back, int32 or int64 of shape `[N]`,
            and the int64 offsets of the bins in it, of shape `[M + 1]`.
    """
    order = _by_falling_length(lengths, rng)
    counts = np.bincount(lengths)
    distinct = np.flatnonzero(counts)[::-1]
    runs = _runs(distinct.tolist(), counts[distinct].tolist(), token_budget, max_segments)
    first_bins, num_bins, per_bin, first_slots = np.array(runs, dtype=np.int64).T

    # Sizes of the bins, from what each run adds to a range of them.
    changes = np.zeros(int((first_bins + num_bins).max()) + 1, dtype=np.int64)
    np.add.at(changes, first_bins, per_bin)
    np.add.at(changes, first_bins + num_bins, -per_bin)
    sizes = np.cumsum(changes[:-1])
    shuffled = rng.permutation(sizes.size)
    offsets = _offsets(sizes[shuffled])
    bin_starts = np.empty(sizes.size, dtype=order.dtype)
    bin_starts[shuffled] = offsets[:-1]

    # What one run puts into one bin starts at the bin's start plus the fragments that are in there already. Written so
    # that adding a fragment's own number in `order` gives its place.
    bin_numbers = np.repeat((first_bins - _offsets(num_bins)[:-1]).astype(order.dtype), num_bins)
    bin_numbers += np.arange(bin_numbers.size, dtype=order.dtype)
    entry_sizes = np.repeat(per_bin.astype(order.dtype), num_bins)
    starts = bin_starts[bin_numbers]
    starts += np.repeat(first_slots.astype(order.dtype), num_bins)
    starts += entry_sizes
    starts -= np.cumsum(entry_sizes, dtype=order.dtype)
    places = np.repeat(starts, entry_sizes)
    places += np.arange(order.size, dtype=order.dtype)
    flat = np.empty_like(order)
    flat[places] = order
    return flat, offsets


def _by_falling_length(lengths: IntArray, rng: np.random.Generator) -> IntArray:
    """Fragment numbers, longest first, fragments of one length in random order."""
    longest = int(lengths.max())
    order: IntArray | None = None
    # numpy sorts 16-bit keys by radix, several times faster than wider ones: sort by the low half, then the high half.
    for shift in range(0, (longest - 1).bit_length() or 1, 16):
        keys = ((longest - lengths) >> shift).astype(np.uint16)
        if order is not None:
            keys = keys[order]
        places = np.argsort(keys, kind="stable").astype(_number_type(lengths.size))
        order = places if order is None else order[places]
    assert order is not None
    # Shuffling each group of equal lengths by itself stays in the processor's cache.
    ends = _offsets(np.bincount(lengths)[::-1])
    several = np.flatnonzero(np.diff(ends) > 1)
    for start, stop in zip(ends[several].tolist(), ends[several + 1].tolist(), strict=True):
        rng.shuffle(order[start:stop])
    return order


def _shuffled_numbers(num: int, rng: np.random.Generator) -> IntArray:
    numbers: IntArray = np.arange(num, dtype=_number_type(num))
    rng.shuffle(numbers)
    return numbers


def _number_type(num: int) -> Any:
    """The smaller integers halve the memory of large plans."""
    return np.int32 if num < 2**31 else np.int64


def _offsets(sizes: IntArray) -> IntArray:
    offsets = np.zeros(sizes.size + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _runs(
    distinct: list[int], counts: list[int], token_budget: int, max_segments: int
) -> list[tuple[int, int, int, int]]:
    """
    Best-fit decreasing over (length, count) pairs, longest first.

    A run `(bin, num, per, slot)` says: the next `num * per` fragments go into the bins `bin .. bin + num`, `per` into
    each, and those bins held `slot` fragments before. A bin that is the best fit for a length stays the best fit after
    it took one, so it takes as many as it can at once.
    """
    shortest = distinct[-1]
    runs: list[tuple[int, int, int, int]] = []
    # Open bins by free space: ranges (bin, num, slot) of bins with equal content counts.
    open_bins: dict[int, list[tuple[int, int, int]]] = {}
    spaces: list[int] = []
    num_opened = 0

    def put(space: int, length: int, first: int, num: int, per: int, slot: int) -> None:
        runs.append((first, num, per, slot))
        space -= per * length
        if space < shortest or slot + per == max_segments:
            return
        if space in open_bins:
            open_bins[space].append((first, num, slot + per))
        else:
            open_bins[space] = [(first, num, slot + per)]
            insort(spaces, space)

    for length, count in zip(distinct, counts, strict=True):
        while count:
            index = bisect_left(spaces, length)
            if index < len(spaces):
                space = spaces[index]
                ranges = open_bins[space]
                first, available, slot = ranges.pop()
                if not ranges:
                    del open_bins[space], spaces[index]
            else:
                space, first, available, slot = token_budget, num_opened, count, 0
            per = min(space // length, max_segments - slot)
            num = min(available, count // per)
            if num:
                put(space, length, first, num, per, slot)
                count -= num * per
            rest = min(count, per - 1) if num < available else 0
            if rest:
                put(space, length, first + num, 1, rest, slot)
                count -= rest
                num += 1
            if first == num_opened:
                num_opened += num
            elif num < available:
                if space in open_bins:
                    open_bins[space].append((first + num, available - num, slot))
                else:
                    open_bins[space] = [(first + num, available - num, slot)]
                    insort(spaces, space)
    return runs


class OnlineBestFit:
    """
    Best fit over a stream with few open rows: each fragment goes to the open row it fills best.

    Where none has room a new row opens, and if that is one too many, the fullest row closes. A row also closes once
    nothing fits any more. Which fragments share a row depends on their order in the stream only, so a shuffled stream
    gives rows of random composition.

    Args:
        token_budget (`int`):
            Most tokens in a row.
        num_open_rows (`int`):
            Rows kept open.
        max_segments (`int`):
            Most fragments in a row.
        shortest (`int`, *optional*, defaults to `1`):
            Tokens of the shortest fragment to come. A row with less room than that closes.
    """

    def __init__(self, token_budget: int, num_open_rows: int, max_segments: int, shortest: int = 1):
        self.token_budget = token_budget
        self.num_open_rows = num_open_rows
        self.max_segments = max_segments
        self.shortest = shortest
        self.num_items = 0
        # One sorted list of (free space, row number) packed into integers, and the items of each row number.
        self._keys: list[int] = []
        self._rows: list[list[int]] = [[] for _ in range(num_open_rows + 1)]
        self._unused = list(range(num_open_rows + 1))

    def feed(self, lengths: Iterable[int]) -> Iterator[list[int]]:
        """
        Add fragments and give the rows that close, each as the item numbers it holds. Items are numbered from 0 across
        calls. A call must be exhausted before the next one, and may be left after any row that it gave.

        Args:
            lengths (`Iterable[int]`):
                Tokens of each fragment, each from `shortest` to `token_budget`.

        Returns:
            `Iterator[list[int]]`: Closed rows.
        """
        keys, rows, unused = self._keys, self._rows, self._unused
        new_row = self.token_budget << _ROW_BITS
        too_full = self.shortest << _ROW_BITS
        num_open_rows, max_segments = self.num_open_rows, self.max_segments
        item = self.num_items
        for length in lengths:
            size = length << _ROW_BITS
            index = bisect_left(keys, size)
            if index == len(keys):
                key = new_row | unused.pop()
            elif keys[index] > size << 2:
                key = keys.pop()
            else:
                key = keys.pop(index)
            number = key & _ROW_MASK
            row = rows[number]
            row.append(item)
            key -= size
            item += 1
            if key >= too_full and len(row) < max_segments:
                insort(keys, key)
                if len(keys) <= num_open_rows:
                    continue
                number = keys.pop(0) & _ROW_MASK
                row = rows[number]
            rows[number] = []
            unused.append(number)
            self.num_items = item
            yield row
        self.num_items = item

    def flush(self) -> Iterator[list[int]]:
        """Close all open rows, fullest first."""
        while self._keys:
            number = self._keys.pop(0) & _ROW_MASK
            row, self._rows[number] = self._rows[number], []
            self._unused.append(number)
            yield row

    def state_dict(self) -> dict[str, Any]:
        """Give the open rows as JSON values."""
        open_rows = [[key >> _ROW_BITS, key & _ROW_MASK, list(self._rows[key & _ROW_MASK])] for key in self._keys]
        return {"num_items": self.num_items, "open_rows": open_rows, "unused": list(self._unused)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the open rows of another filler with the same arguments."""
        self.num_items = state["num_items"]
        self._keys = [space << _ROW_BITS | number for space, number, _ in state["open_rows"]]
        self._rows = [[] for _ in range(self.num_open_rows + 1)]
        for _, number, row in state["open_rows"]:
            self._rows[number] = list(row)
        self._unused = list(state["unused"])


def online_best_fit(
    lengths: IntArray, token_budget: int, max_segments: int, rng: np.random.Generator, num_open_rows: int
) -> tuple[IntArray, IntArray]:
    """
    Fill rows by online best fit over a shuffled stream. Arguments and result as in [`best_fit_decreasing`].

    Args:
        lengths (`np.ndarray`):
            Tokens of each fragment, int64 of shape `[N]`, each from 1 to `token_budget`.
        token_budget (`int`):
            Most tokens in a bin.
        max_segments (`int`):
            Most fragments in a bin.
        rng (`np.random.Generator`):
            Source of the shuffle.
        num_open_rows (`int`):
            Rows kept open.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: Fragment numbers of all bins and the offsets of the bins.
    """
    order = _shuffled_numbers(lengths.size, rng)
    packer = OnlineBestFit(token_budget, num_open_rows, max_segments, int(lengths.min()))
    items: list[IntArray] = []
    sizes: list[int] = []
    # Python integers take eight times the memory of numpy's, so only a block of them exists at a time.
    for start in range(0, order.size, _BLOCK):
        block = lengths[order[start : start + _BLOCK]].tolist()
        items.append(_collected(packer.feed(block), sizes, order.dtype))
    items.append(_collected(packer.flush(), sizes, order.dtype))
    closed, closed_sizes = np.concatenate(items), np.array(sizes, dtype=np.int64)

    shuffled = rng.permutation(closed_sizes.size)
    offsets = _offsets(closed_sizes[shuffled])
    moves = (_offsets(closed_sizes)[shuffled] - offsets[:-1]).astype(order.dtype)
    places = np.repeat(moves, closed_sizes[shuffled])
    places += np.arange(order.size, dtype=order.dtype)
    return order[closed[places]], offsets


def _collected(rows: Iterable[list[int]], sizes: list[int], dtype: Any) -> IntArray:
    """The items of the rows back to back. Appends the number of items in each row to `sizes`."""
    flat: list[int] = []
    for row in rows:
        flat += row
        sizes.append(len(row))
    return np.array(flat, dtype=dtype)
