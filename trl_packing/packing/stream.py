"""Rows from a stream of samples whose end is not known, with few rows open at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..errors import PackingError
from .cut import UNLIMITED, CutRule, Overlong, Truncation, check_at_least_1
from .fill import MAX_OPEN_ROWS, IntArray, OnlineBestFit
from .planner import NUM_OPEN_ROWS


class StreamPacker:
    """
    Fill rows by online best fit, one sample at a time.

    It keeps `num_open_rows` rows of at most `token_budget` tokens, so the samples that wait for their row are bounded.
    Rows depend on the samples and their order only. Shuffle the stream before packing it.

    Args:
        token_budget (`int`):
            Most tokens in a packed row.
        max_length (`int`, *optional*):
            Most tokens of a sample; a longer one is overlong. The default is `token_budget`.
        overlong (`str`, *optional*, defaults to `"truncate"`):
            As in [`plan_packs`].
        truncation (`str`, *optional*, defaults to `"keep_start"`):
            As in [`plan_packs`].
        max_segments (`int`, *optional*):
            Most fragments in a row.
        num_open_rows (`int`, *optional*, defaults to `32`):
            Rows kept open, from 1 to 1,000.

    Attributes:
        counts (`Counter[str]`): What became of the samples so far, under the names of [`PackPlan`]'s counters.

    Raises:
        [`PackingError`]: If an argument is out of range.

    Example:

    ```python
    >>> from trl_packing.packing import StreamPacker
    >>> packer = StreamPacker(8)
    >>> [row.tolist() for length in (5, 3, 4) for row in packer.add(length)]
    [[[0, 0, 5], [1, 0, 3]]]
    >>> [row.tolist() for row in packer.flush()]
    [[[2, 0, 4]]]

    ```
    """

    def __init__(
        self,
        token_budget: int,
        *,
        max_length: int | None = None,
        overlong: Overlong = "truncate",
        truncation: Truncation = "keep_start",
        max_segments: int | None = None,
        num_open_rows: int = NUM_OPEN_ROWS,
    ):
        check_at_least_1("token_budget", token_budget)
        check_at_least_1("num_open_rows", num_open_rows)
        if num_open_rows > MAX_OPEN_ROWS:
            raise PackingError(
                f"At most {MAX_OPEN_ROWS} rows stay open, but `num_open_rows` is {num_open_rows}. Lower it."
            )
        if max_segments is not None:
            check_at_least_1("max_segments", max_segments)
        self.rule = CutRule(token_budget if max_length is None else max_length, overlong, truncation)
        if self.rule.limit > token_budget:
            raise PackingError(
                f"A sample must fit into a row, but `max_length` is {max_length} and `token_budget` is "
                f"{token_budget}. Raise `token_budget` or lower `max_length`."
            )
        self.counts: Counter[str] = Counter()
        self._filler = OnlineBestFit(token_budget, num_open_rows, max_segments or UNLIMITED)
        self._waiting: dict[int, tuple[int, int, int]] = {}

    def add(self, length: int) -> list[IntArray]:
        """
        Add the next sample of the stream.

        Args:
            length (`int`):
                Tokens in it, at least 1.

        Returns:
            `list[np.ndarray]`: The rows that are now finished, each int64 of shape `[N, 3]`: sample counted from the
                start of the stream, first token and number of tokens of each fragment.

        Raises:
            [`PackingError`]: If the length is below 1, or above the limit under `overlong="error"`.
        """
        sample = self.counts["num_samples"]
        fragments = self.rule.apply([length], first_sample=sample)
        self.counts.update(fragments.counts)
        first = self._filler.num_items
        for item, (_, start, num) in enumerate(fragments.table().tolist(), start=first):
            self._waiting[item] = (sample, start, num)
        return [self._spans(row) for row in self._filler.feed(fragments.lengths.tolist())]

    def flush(self) -> list[IntArray]:
        """Finish all open rows, fullest first. The stream may go on after it."""
        return [self._spans(row) for row in self._filler.flush()]

    @property
    def waiting_samples(self) -> list[int]:
        """Samples with a fragment in an open row, in stream order: those whose tokens are still needed."""
        return sorted({sample for sample, _, _ in self._waiting.values()})

    def state_dict(self) -> dict[str, Any]:
        """Give the open rows and counters as JSON values, to go on after the samples read so far."""
        return {
            "counts": dict(self.counts),
            "waiting": [[item, *span] for item, span in self._waiting.items()],
            "filler": self._filler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Go on where another packer with the same arguments stopped.

        Args:
            state (`dict[str, Any]`):
                Of that packer's `state_dict`.
        """
        self.counts = Counter(state["counts"])
        self._waiting = {item: (sample, start, num) for item, sample, start, num in state["waiting"]}
        self._filler.load_state_dict(state["filler"])

    def _spans(self, row: list[int]) -> IntArray:
        return np.array([self._waiting.pop(item) for item in row], dtype=np.int64)


def stream_packs(lengths: Iterable[int], token_budget: int, **settings: Any) -> Iterator[IntArray]:
    """
    Pack a stream of samples into rows as they come.

    Args:
        lengths (`Iterable[int]`):
            Tokens in each sample, each at least 1.
        token_budget (`int`):
            Most tokens in a packed row.
        **settings:
            Of [`StreamPacker`]: `max_length`, `overlong`, `truncation`, `max_segments`, `num_open_rows`.

    Returns:
        `Iterator[np.ndarray]`: Rows as they are finished, each int64 of shape `[N, 3]`: sample, first token and number
            of tokens of each fragment. Every sample that is kept is in exactly one row, or spread over rows if split.

    Raises:
        [`PackingError`]: As in [`StreamPacker`].
    """
    packer = StreamPacker(token_budget, **settings)
    for length in lengths:
        yield from packer.add(length)
    yield from packer.flush()
