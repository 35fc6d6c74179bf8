"""
A prepared data set as the pack plan sees it: lengths and targets read from Arrow buffers, fragments handed to the
collator.

Nothing is copied or rewritten: the plan works on lengths, and a row's tokens are read when the row is trained.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, IterableDataset

from .boundaries import IGNORE_INDEX
from .errors import PackingError

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Bools = np.ndarray[Any, np.dtype[np.bool_]]

# Samples read at once when a column is scanned: bounds memory, not the result.
_SCAN_BATCH = 10_000
# Samples whose content says which data set it is.
_NUM_KNOWN = 64


@dataclass(frozen=True)
class SampleTable:
    """
    What planning needs to know of every sample, in data order.

    Args:
        lengths (`np.ndarray`):
            int64 `[S]`, tokens of each sample.
        untrainable (`np.ndarray`):
            bool `[S]`, samples without a label left to predict once they are cut to `max_length`.
    """

    lengths: _Ints
    untrainable: _Bools


def read_samples(
    dataset: Dataset, *, max_length: int | None, overlong: str, keep_end: bool, masked: bool = True
) -> SampleTable:
    """
    Read lengths and trainability of every sample.

    Args:
        dataset ([`~datasets.Dataset`]):
            Prepared: columns `input_ids` and `labels`, optionally `seq_lengths`.
        max_length (`int`, *optional*):
            Tokens a sample keeps when it is cut.
        overlong (`str`):
            Policy for longer samples. Only `"truncate"` takes tokens away.
        keep_end (`bool`):
            Whether a cut keeps the end of a sample instead of its start.
        masked (`bool`, *optional*, defaults to `True`):
            Whether labels may be -100. If not, they are not read: a plan reads lengths only.

    Returns:
        [`SampleTable`]: In data order.

    Raises:
        [`PackingError`]: If a sample's labels differ in number from its tokens, or `seq_lengths` do not add up.
    """
    lengths = _list_lengths(dataset, "input_ids")
    check_prepared(dataset, None)
    if "seq_lengths" in dataset.column_names:
        _check_seq_lengths(dataset, lengths, max_length)
    if not masked or "labels" not in dataset.column_names:
        return SampleTable(lengths, lengths <= 1)
    first, last = _target_span(dataset, lengths)
    cut = lengths if max_length is None or overlong != "truncate" else np.minimum(lengths, max_length)
    untrainable = (last <= lengths - cut) if keep_end else (first >= cut)
    return SampleTable(lengths, untrainable)


def tokens_digest(dataset: Dataset) -> str:
    """
    Tell data sets of equal lengths apart by the content of a few dozen samples, without a pass over the data.

    Args:
        dataset ([`~datasets.Dataset`]):
            Prepared: columns `input_ids` and `labels`.

    Returns:
        `str`: Hash of the tokens and labels of up to 64 evenly spaced samples, the same on every machine.
    """
    digest = hashlib.sha256()
    for name in ("input_ids", "labels"):
        if name in dataset.column_names:
            column = _ListColumn(dataset, name)
            for sample in _evenly_spaced(len(dataset)):
                digest.update(np.asarray(column[sample]).astype("<i8").tobytes() + b"|")
    return digest.hexdigest()[:16]


def texts_digest(dataset: Dataset, columns: Sequence[str]) -> str:
    """
    Do the same for samples with images. Images are not decoded: their sizes stand for them.

    Args:
        dataset ([`~datasets.Dataset`]):
            As the user passed it.
        columns (`Sequence[str]`):
            Columns to look at, where the data set has them.

    Returns:
        `str`: Hash of the texts, and the sizes of the images, of up to 64 evenly spaced samples.
    """
    table = dataset.select_columns([name for name in columns if name in dataset.column_names])
    samples = table.with_format("arrow")[_evenly_spaced(len(dataset))].to_pylist()
    text = json.dumps(_without_pixels(samples), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_pixels(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_pixels(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"bytes", "path"}:
        return _image_size(value)
    return {name: _without_pixels(part) for name, part in value.items() if part is not None}


def _image_size(image: dict[str, Any]) -> list[int] | None:
    from PIL import Image

    # A path differs between machines, and so may the bytes of an image that was encoded there.
    source = image["path"] if image["bytes"] is None else io.BytesIO(image["bytes"])
    try:
        with Image.open(source) as opened:
            return list(opened.size)
    except OSError:
        return None


def _evenly_spaced(number: int) -> list[int]:
    samples: list[int] = np.unique(np.linspace(0, number - 1, min(number, _NUM_KNOWN)).astype(int)).tolist()
    return samples


class FragmentDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """
    Fragments of a prepared data set, read in batches from its Arrow buffers.

    Args:
        dataset ([`~datasets.Dataset`]):
            Prepared: columns `input_ids` and `labels`, optionally `seq_lengths`.
        fragments (`np.ndarray`):
            int64 `[F, 3]`: sample, start and length of each fragment, as in [`PackPlan`].
    """

    def __init__(self, dataset: Dataset, fragments: _Ints) -> None:
        self.dataset = dataset
        self.fragments = fragments
        self._columns: dict[str, _ListColumn] | None = None

    def __len__(self) -> int:
        return len(self.fragments)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the files again instead of getting the tokens through a pipe.
        return {**self.__dict__, "_columns": None}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Read several fragments. Each is a dict of numpy views and its number under `fragment`."""
        if self._columns is None:
            names = [name for name in ("input_ids", "labels", "seq_lengths") if name in self.dataset.column_names]
            self._columns = {name: _ListColumn(self.dataset, name) for name in names}
        samples = []
        for index, (sample, start, length) in zip(indices, self.fragments[list(indices)].tolist(), strict=True):
            fragment: dict[str, Any] = {"fragment": index}
            for name, column in self._columns.items():
                values = column[sample]
                # Packed samples are never cut.
                fragment[name] = values if name == "seq_lengths" else values[start : start + length]
            samples.append(fragment)
        return samples


class _ListColumn:
    """A list column as numpy views of its Arrow buffers, through the index mapping of shuffled or filtered data "
    "sets."""

    def __init__(self, dataset: Dataset, name: str) -> None:
        chunks = [chunk for chunk in dataset.data.column(name).chunks if len(chunk)]
        self.ends = np.cumsum([len(chunk) for chunk in chunks])
        self.values = [chunk.values.to_numpy(zero_copy_only=False) for chunk in chunks]
        self.offsets = [chunk.offsets.to_numpy(zero_copy_only=False) for chunk in chunks]
        self.indices = None if dataset._indices is None else dataset._indices.column(0).to_numpy()

    def __getitem__(self, sample: int) -> np.ndarray[Any, Any]:
        row = sample if self.indices is None else int(self.indices[sample])
        chunk = 0 if len(self.values) == 1 else int(np.searchsorted(self.ends, row, side="right"))
        offsets = self.offsets[chunk]
        row -= int(self.ends[chunk]) - (len(offsets) - 1)
        return self.values[chunk][offsets[row] : offsets[row + 1]]  # type: ignore[no-any-return]


def check_prepared(dataset: Dataset, vocab_size: int | None) -> None:
    """
    Check a data set that comes with its tokens.

    Args:
        dataset ([`~datasets.Dataset`]):
            With a column `input_ids`.
        vocab_size (`int`, *optional*):
            Rows of the model's embedding.

    Raises:
        [`PackingError`]: If a column of a sample has another length than its tokens, or a token is not in the
        vocabulary.
    """
    lengths = _list_lengths(dataset, "input_ids")
    for column in ("labels", "attention_mask", "completion_mask", "assistant_masks"):
        if column not in dataset.column_names:
            continue
        others = _list_lengths(dataset, column)
        wrong = np.flatnonzero(others != lengths)
        if wrong.size:
            sample = int(wrong[0])
            raise PackingError(
                f"Every token needs an entry of `{column}`, but sample {sample} has {lengths[sample]} tokens and "
                f"{others[sample]} entries. Tokenise the data again."
            )
    if vocab_size is None:
        return
    ends = np.cumsum(lengths)
    for begin, values in _scan(dataset, "input_ids"):
        wrong = np.flatnonzero((values < 0) | (values >= vocab_size))
        if wrong.size:
            start = ends[begin - 1] if begin else 0
            sample = int(np.searchsorted(ends, start + wrong[0], side="right"))
            raise PackingError(
                f"Token {values[wrong[0]]} of sample {sample} is not in the model's vocabulary of {vocab_size}. "
                "Tokenise the data with the model's own tokenizer."
            )


def drop_masked_tokens(dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """
    Take masked tokens off the ends of pre-tokenised samples and drop the `attention_mask` column.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            With columns `input_ids`, `labels` and `attention_mask`.

    Returns:
        The data set without the column, whose samples hold real tokens only.

    Raises:
        [`PackingError`]: While it is read, if a mask has zeros between ones.
    """

    def trim(sample: dict[str, Any], index: int) -> dict[str, Any]:
        real = np.flatnonzero(sample["attention_mask"])
        if real.size and real[-1] - real[0] + 1 != real.size:
            raise PackingError(
                f"Masked tokens are removed where they begin or end a sample, but `attention_mask` of sample {index} "
                "has zeros in between. Mask labels with -100 instead, or drop the sample."
            )
        kept = slice(int(real[0]), int(real[-1]) + 1) if real.size else slice(0, 0)
        return {name: sample[name][kept] for name in ("input_ids", "labels")}

    progress = {"desc": "Removing masked tokens"} if isinstance(dataset, Dataset) else {}
    return dataset.map(trim, with_indices=True, remove_columns=["attention_mask"], **progress)


def _list_lengths(dataset: Dataset, column: str) -> _Ints:
    """Lengths of a list column from its offsets alone, through the index mapping of shuffled or filtered data sets."""
    lengths = np.concatenate(
        [pc.list_value_length(chunk).to_numpy(zero_copy_only=False) for chunk in dataset.data.column(column).chunks]
        or [np.zeros(0)]
    ).astype(np.int64)
    indices = dataset._indices
    return lengths if indices is None else lengths[indices.column(0).to_numpy()]


def _target_span(dataset: Dataset, lengths: _Ints) -> tuple[_Ints, _Ints]:
    """First and last position of each sample whose label is predicted; beyond the sample and -1 where there is "
    "none."""
    first, last = lengths.copy(), np.full_like(lengths, -1)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for begin, values in _scan(dataset, "labels"):
        number = min(_SCAN_BATCH, len(lengths) - begin)
        sizes = lengths[begin : begin + number]
        offsets = starts[begin : begin + number] - starts[begin]
        is_target = values != IGNORE_INDEX
        # The first token of a segment has nothing before it to be predicted from.
        is_target[offsets[sizes > 0]] = False
        where = np.flatnonzero(is_target)
        if not where.size:
            continue
        sample = np.searchsorted(offsets + sizes, where, side="right")
        found, first_index = np.unique(sample, return_index=True)
        first[begin + found] = where[first_index] - offsets[found]
        last_index = np.append(first_index[1:], sample.size) - 1
        last[begin + found] = where[last_index] - offsets[found]
    return first, last


def _scan(dataset: Dataset, column: str) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    table = dataset.select_columns([column]).with_format("arrow")
    steps = range(0, len(dataset), _SCAN_BATCH)
    for begin in datasets.utils.tqdm(steps, desc=f"Reading {column}", disable=len(steps) < 20):
        chunk = table[begin : begin + _SCAN_BATCH].column(column)
        yield begin, chunk.combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _check_seq_lengths(dataset: Dataset, lengths: _Ints, max_length: int | None) -> None:
    for begin, sums in _sums(dataset, "seq_lengths"):
        wrong = np.flatnonzero(sums != lengths[begin : begin + len(sums)])
        if wrong.size:
            row = begin + int(wrong[0])
            raise PackingError(
                f"`seq_lengths` of packed sample {row} add up to {sums[wrong[0]]}, but it has {lengths[row]} tokens. "
                "Pack the data again, or remove the column if the data is not packed."
            )
    if max_length is not None and lengths.size and lengths.max() > max_length:
        row = int(lengths.argmax())
        raise PackingError(
            f"The data is packed already and cannot be cut, but packed sample {row} has {lengths[row]} tokens and "
            f"`max_length` is {max_length}. Raise `max_length`, or pass the data unpacked."
        )


def _sums(dataset: Dataset, column: str) -> Iterator[tuple[int, _Ints]]:
    counts = _list_lengths(dataset, column)
    for begin, values in _scan(dataset, column):
        sizes = counts[begin : begin + _SCAN_BATCH]
        ends = np.cumsum(sizes)
        totals = np.concatenate([[0], np.cumsum(values)])
        yield begin, (totals[ends] - totals[ends - sizes]).astype(np.int64)
