"""
How a packed row is cut into chunks so that the algebra inside a chunk and the scan over chunks keep segments apart.

Shapes: T tokens in the row, N segments, M chunks of C slots.

The scans of this folder do the algebra inside all chunks at once and then walk over the *waves*: wave 0 holds the
first chunk of every segment, wave 1 the second chunk of those that have one, and so on, longest segment first. So the
chunks of a wave are one slice, chunk `r` of a wave continues chunk `r` of the wave before, and a step of the walk
serves all segments at once. Segments shorter than a chunk share one, and the chunk that a long segment leaves half
empty takes short ones in: the number of chunks follows the tokens, not the segments. Chunks of 4, lengths (9, 2, 3):

```text
wave 0   a0 a1 a2 a3 | b0 b1 -- --
wave 1   a4 a5 a6 a7
wave 2   a8 c0 c1 c2
```

Without host lengths, as under torch.compile, the row is cut where it lies and each wave is one chunk.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..boundaries import Boundaries
from ..errors import PackingError

# Two segments never share a number, and a pad shares none with a token.
_PAD = -1


@dataclass(frozen=True)
class ChunkLayout:
    """
    Where each token of a packed row lies in `[M, C]` chunk slots, and which state each chunk may read and hand on.

    Args:
        segments (`torch.Tensor`):
            Integer of shape `[M, C]`: the segment number of each slot, -1 for pads.
        continues (`torch.Tensor`):
            Bool of shape `[M, C]`: whether the slot belongs to the segment whose state the chunk takes over.
        waves (`list[int]`):
            Chunks per wave, never increasing. Chunk `r` of a wave takes over from chunk `r` of the wave before. Empty
            means that every chunk is a wave of its own.
        total_tokens (`int`):
            Tokens in the row, T.
        slots (`torch.Tensor`, *optional*):
            int64 of shape `[T]`: the flat slot of each token. The default means token `t` lies in slot `t`.
    """

    segments: torch.Tensor
    continues: torch.Tensor
    waves: list[int]
    total_tokens: int
    slots: torch.Tensor | None = None

    @property
    def attends(self) -> torch.Tensor:
        """Bool of shape `[M, C, C]`: whether the row's slot may see the column's: same segment, and not after it."""
        return (self.segments[:, :, None] == self.segments[:, None, :]).tril()

    @property
    def hands_over(self) -> torch.Tensor:
        """Bool of shape `[M, C]`: whether the slot belongs to the segment whose state the chunk hands on."""
        return self.segments == self.segments[:, -1:]

    @property
    def num_first(self) -> int:
        """Chunks of the first wave: those that take over no state."""
        return self.waves[0] if self.waves else 1

    def handing_on(self, chunks: torch.Tensor) -> torch.Tensor:
        """Select from `[M, ...]` the chunks that hand a state on: the i-th of them to chunk `num_first + i`."""
        if not self.waves:
            return chunks[:-1]
        # Split, not index: the backward pass of n slices of one tensor fills n tensors of its size.
        waves = zip(chunks.split(self.waves), self.waves[1:], strict=False)
        return torch.cat([chunks[:0], *(wave[:num_next] for wave, num_next in waves)])

    def to_chunks(self, row: torch.Tensor) -> torch.Tensor:
        """Lay `[1, T, ...]` out as `[M, C, ...]`, zeros at pads."""
        num_chunks, chunk_size = self.segments.shape
        if self.slots is None:
            num_pads = num_chunks * chunk_size - self.total_tokens
            flat = F.pad(row[0], (0, 0) * (row.ndim - 2) + (0, num_pads))
        else:
            flat = row.new_zeros(num_chunks * chunk_size, *row.shape[2:]).index_copy(0, self.slots, row[0])
        return flat.unflatten(0, (num_chunks, chunk_size))

    def to_row(self, chunks: torch.Tensor) -> torch.Tensor:
        """Undo `to_chunks`."""
        flat = chunks.flatten(0, 1)
        return (flat[: self.total_tokens] if self.slots is None else flat.index_select(0, self.slots))[None]


def chunk_layout(
    lengths: tuple[int, ...] | None, seq_idx: torch.Tensor | None, row: torch.Tensor, chunk_size: int
) -> ChunkLayout:
    """
    Choose the layout of a packed row: waves if its lengths are known on the host, else the row as it lies.

    Args:
        lengths (`tuple[int, ...]`, *optional*):
            Tokens in each segment.
        seq_idx (`torch.Tensor`, *optional*):
            Segment number of each token, integer of shape `[1, T]`. Used where `lengths` is not given, or under
            torch.compile where both are.
        row (`torch.Tensor`):
            A tensor of shape `[1, T, ...]` on the device of the computation.
        chunk_size (`int`):
            Slots per chunk, C.

    Returns:
        [`ChunkLayout`]: On the device of `row`.

    Raises:
        [`PackingError`]: If there is more than one batch row, no boundaries are given, or they do not fit the row.
    """
    num_tokens = row.shape[1]
    check_boundaries(lengths, seq_idx, row.shape[0], num_tokens)
    if lengths is None or (seq_idx is not None and torch.compiler.is_compiling()):
        return _layout_in_place(seq_idx, num_tokens, chunk_size)
    return _layout_in_waves(lengths, chunk_size, row.device)


def check_boundaries(
    lengths: tuple[int, ...] | None, seq_idx: torch.Tensor | None, batch_size: int, num_tokens: int
) -> None:
    """Raise [`PackingError`] unless `lengths` or `seq_idx` describes the one row of `num_tokens` tokens."""
    if lengths is None and seq_idx is None:
        raise PackingError(
            "This operation keeps segments apart, but got neither `lengths` nor `seq_idx`. Pass one of them, or call "
            "the original function for a row without boundaries."
        )
    if batch_size != 1:
        raise PackingError(
            f"Boundaries belong to one packed row, but the batch size is {batch_size}. Lay the rows end to end first, "
            "for example with `pack_rows`."
        )
    if lengths is not None and sum(lengths) != num_tokens:
        raise PackingError(
            f"The row holds {num_tokens} tokens, but `lengths` add up to {sum(lengths)}. Pass the lengths of this row."
        )
    if seq_idx is not None and tuple(seq_idx.shape) != (1, num_tokens):
        raise PackingError(
            f"`seq_idx` needs the shape [1, {num_tokens}] of the row, but its shape is {list(seq_idx.shape)}. Pass "
            "the segment numbers of this row."
        )


def cumsum_in_segments(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """
    Sum over the slots of each chunk, from the start of each segment.

    A plain cumsum minus its value at the start would let the rounding of one segment depend on the others.

    Args:
        values (`torch.Tensor`):
            Float of shape `[M, H, C]` or `[M, H, C, K]`.
        segments (`torch.Tensor`):
            Integer of shape `[M, C]`.

    Returns:
        `torch.Tensor`: Shape of `values`.
    """
    distance = 1
    while distance < segments.shape[1]:
        joined = (segments[:, distance:] == segments[:, :-distance])[:, None]
        joined = joined if values.ndim == 3 else joined[..., None]
        earlier = torch.where(joined, values[:, :, :-distance], 0)
        values = values + F.pad(earlier, (0, 0) * (values.ndim - 3) + (distance, 0))
        distance *= 2
    return values


def exp_where(mask: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Give `exp(exponent)` where `mask` holds, else 0. Masking afterwards would overflow, and give NaN gradients."""
    return exponent.masked_fill(~mask, -torch.inf).exp()


def computation_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Give the dtype to compute in: float32, or float64 for float64 input."""
    return torch.promote_types(tensor.dtype, torch.float32)


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Switch autocast off on the tensor's device: matrix products inside a scan need float32."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _layout_in_place(seq_idx: torch.Tensor, num_tokens: int, chunk_size: int) -> ChunkLayout:
    num_chunks = -(-num_tokens // chunk_size)
    segments = F.pad(seq_idx[0], (0, num_chunks * chunk_size - num_tokens), value=_PAD).view(num_chunks, chunk_size)
    handed_over = F.pad(segments[:-1, -1:], (0, 0, 1, 0), value=_PAD - 1)
    return ChunkLayout(segments, segments == handed_over, [], num_tokens)


@lru_cache(maxsize=8)
def _layout_in_waves(lengths: tuple[int, ...], chunk_size: int, device: torch.device) -> ChunkLayout:
    Boundaries(lengths)
    waves, slots = plan_waves(lengths, chunk_size)
    segments = np.full((sum(waves), chunk_size), _PAD)
    segments.reshape(-1)[slots] = np.repeat(np.arange(len(lengths)), lengths)
    continues = segments == segments[:, :1]
    continues[: waves[0]] = False
    # The layout outlives this call, and tensors made in inference mode cannot be used in a later backward pass.
    with torch.inference_mode(False):
        tensors = [torch.from_numpy(array).to(device) for array in (segments, continues, slots)]
    return ChunkLayout(tensors[0], tensors[1], list(waves), len(slots), tensors[2])


def plan_waves(lengths: tuple[int, ...], chunk_size: int) -> tuple[tuple[int, ...], np.ndarray[Any, Any]]:
    """
    Place the segments of a row into chunks, chunks into waves.

    Args:
        lengths (`tuple[int, ...]`):
            Tokens in each segment, each at least 1.
        chunk_size (`int`):
            Slots per chunk.

    Returns:
        `tuple`: Chunks per wave, and the flat slot of each token, an int64 array of shape `[T]`.
    """
    sizes = np.asarray(lengths)
    depths = -(-sizes // chunk_size)
    is_long = sizes >= chunk_size
    longs = np.flatnonzero(is_long)[np.argsort(-depths[is_long], kind="stable")]
    waves = [int((depths[longs] > wave).sum()) for wave in range(depths[longs].max(initial=0))] or [0]
    # A bin is a chunk with room for short segments: the last one of a long segment, or a new one in wave 0.
    tails = [rank for rank, segment in enumerate(longs) if sizes[segment] % chunk_size]
    rooms = [chunk_size - int(sizes[longs[rank]]) % chunk_size for rank in tails]
    shorts = np.flatnonzero(~is_long)
    bins, offsets, num_bins = _best_fit(sizes[shorts], rooms, chunk_size)

    waves[0] += num_bins - len(tails)
    first_chunks = np.concatenate([[0], np.cumsum(waves)[:-1]])
    chunks_of_bins = [int(first_chunks[depths[longs[rank]] - 1]) + rank for rank in tails]
    chunks_of_bins += range(len(longs), waves[0])
    chunks, starts = np.zeros_like(sizes), np.zeros_like(sizes)
    chunks[longs] = np.arange(len(longs))
    chunks[shorts], starts[shorts] = np.asarray(chunks_of_bins, dtype=int)[bins], offsets

    positions = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chunks = np.repeat(chunks, sizes) + first_chunks[positions // chunk_size]
    return tuple(waves), chunks * chunk_size + positions % chunk_size + np.repeat(starts, sizes)


def _best_fit(sizes: np.ndarray[Any, Any], rooms: list[int], chunk_size: int) -> tuple[list[int], list[int], int]:
    """Put each item, largest first, into the fullest bin with room for it, opening bins of `chunk_size` as needed."""
    bins, offsets, num_bins = [0] * len(sizes), [0] * len(sizes), len(rooms)
    bins_by_room: list[list[int]] = [[] for _ in range(chunk_size + 1)]
    for number, room in enumerate(rooms):
        bins_by_room[room].append(number)
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        room = next((room for room in range(size, chunk_size) if bins_by_room[room]), chunk_size)
        if room == chunk_size:
            bins_by_room[room].append(num_bins)
            num_bins += 1
        bins[item] = bins_by_room[room].pop()
        # A bin that was a tail starts after the tail, which is what its missing room stands for.
        offsets[item] = chunk_size - room
        bins_by_room[room - size].append(bins[item])
    return bins, offsets, num_bins
