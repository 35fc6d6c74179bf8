"""The wave layout: what a chunk may hold, and that its size follows the tokens, not the number of segments."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from trl_packing import Boundaries
from trl_packing.ops.layout import ChunkLayout, chunk_layout, cumsum_in_segments, plan_waves


def _layout(lengths: tuple[int, ...], chunk_size: int, *, in_place: bool = False) -> ChunkLayout:
    row = torch.zeros(1, sum(lengths), 1)
    if in_place:
        return chunk_layout(None, Boundaries.from_lengths(lengths).seq_idx, row, chunk_size)
    return chunk_layout(lengths, None, row, chunk_size)


def _draws() -> list[tuple[tuple[int, ...], int]]:
    random = np.random.default_rng(0)
    draws = []
    for _ in range(60):
        longest, count = random.choice([3, 40, 300]), random.integers(1, 60)
        draws.append((tuple(random.integers(1, longest + 1, count).tolist()), int(random.choice([1, 2, 4, 16, 64]))))
    return draws


def test_the_row_drawn_in_the_docstring():
    layout = _layout((9, 2, 3), 4)
    assert layout.waves == [2, 1, 1]
    assert layout.segments.tolist() == [[0, 0, 0, 0], [1, 1, -1, -1], [0, 0, 0, 0], [0, 2, 2, 2]]
    assert layout.continues.tolist() == [[False] * 4, [False] * 4, [True] * 4, [True, False, False, False]]


@pytest.mark.parametrize(("lengths", "chunk_size"), _draws())
def test_every_chunk_takes_over_one_segment_at_most_and_hands_over_full(lengths, chunk_size):
    waves, slots = plan_waves(lengths, chunk_size)
    assert sorted(set(slots.tolist())) == sorted(slots.tolist())
    assert list(waves) == sorted(waves, reverse=True)
    assert len(waves) == -(-max(lengths) // chunk_size)

    layout = _layout(lengths, chunk_size)
    chunks = layout.segments.split(waves)
    for wave, following in pairwise(chunks):
        handing_over = wave[: len(following)]
        assert (handing_over == handing_over[:, :1]).all()
        assert torch.equal(following[:, 0], handing_over[:, 0])
    # The slots of a segment follow the order of its tokens.
    for index, start in enumerate(Boundaries(lengths).offsets[:-1]):
        own = slots[start : start + lengths[index]]
        assert (layout.segments.flatten()[own] == index).all()
        assert (np.diff(own) > 0).all()


@pytest.mark.parametrize(("lengths", "chunk_size"), _draws())
def test_chunks_follow_the_tokens_not_the_segments(lengths, chunk_size):
    waves, slots = plan_waves(lengths, chunk_size)
    assert sum(waves) <= 2 * len(slots) / chunk_size + 1


@pytest.mark.parametrize("num_segments", [1, 32, 256, 8192])
def test_a_row_of_any_number_of_segments_costs_about_the_same(num_segments):
    waves, _ = plan_waves((8192 // num_segments,) * num_segments, 64)
    assert sum(waves) == 128


@pytest.mark.parametrize("in_place", [False, True], ids=["waves", "in-place"])
@pytest.mark.parametrize(("lengths", "chunk_size"), _draws()[:20])
def test_there_and_back_changes_nothing(lengths, chunk_size, in_place):
    layout = _layout(lengths, chunk_size, in_place=in_place)
    row = torch.randn(1, sum(lengths), 2, 3)
    chunks = layout.to_chunks(row)
    assert torch.equal(layout.to_row(chunks), row)
    assert not chunks[layout.segments < 0].any()


def test_sums_restart_without_a_trace_of_other_segments():
    segments = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1]])
    values = torch.tensor([[[1e8, 3.0, 5.0, 0.1, 0.2, 0.7, 0.0, 0.0]]])
    expected = [1e8, 1e8 + 3, 1e8 + 3 + 5, 0.1, 0.1 + 0.2, 0.7, 0.0, 0.0]
    torch.testing.assert_close(cumsum_in_segments(values, segments), torch.tensor([[expected]]), rtol=1e-7, atol=0)
    per_channel = cumsum_in_segments(values[..., None].expand(1, 1, 8, 3), segments)
    assert torch.equal(per_channel, cumsum_in_segments(values, segments)[..., None].expand(1, 1, 8, 3))
