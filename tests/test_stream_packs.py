"""Packing a stream: the same promises as the plan, with a bounded number of samples waiting."""

import json

import numpy as np
import pytest

from trl_packing import PackingError, plan_packs
from trl_packing.packing import StreamPacker, stream_packs


def lengths_of(num: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return np.clip(np.rint(np.exp(rng.normal(np.log(60), 1, num))), 1, 1_000).astype(int).tolist()


@pytest.mark.parametrize("num_open_rows", [1, 4, 32, 1_000])
@pytest.mark.parametrize("max_segments", [None, 5])
def test_every_sample_is_in_exactly_one_row_and_no_row_is_over_budget(num_open_rows, max_segments):
    lengths = lengths_of(2_000)
    rows = list(stream_packs(lengths, 1_000, num_open_rows=num_open_rows, max_segments=max_segments))
    spans = np.concatenate(rows)
    assert sorted(spans[:, 0].tolist()) == list(range(2_000))
    assert not spans[:, 1].any()
    assert np.array_equal(spans[:, 2], np.array(lengths)[spans[:, 0]])
    assert max(row[:, 2].sum() for row in rows) <= 1_000
    assert max_segments is None or max(len(row) for row in rows) <= max_segments


def test_rows_are_full():
    lengths = lengths_of(5_000)
    rows = list(stream_packs(lengths, 1_000))
    assert sum(lengths) / (1_000 * len(rows)) > 0.99


def test_rows_are_not_ordered_by_length():
    """TRL's packing of a stream sorts every window of it: long samples first, then shorter and shorter ones."""
    lengths = np.array(lengths_of(3_000))
    rows = [lengths[row[:, 0]] for row in stream_packs(lengths.tolist(), 1_000)]
    longest = np.array([row.max() for row in rows])
    assert abs(np.corrcoef(np.arange(longest.size), longest)[0, 1]) < 0.2
    falling = np.concatenate([np.diff(row) < 0 for row in rows])
    assert 0.4 < falling.mean() < 0.6


def test_the_samples_that_wait_are_bounded():
    packer = StreamPacker(1_000, num_open_rows=4)
    lengths = lengths_of(2_000)
    for length in lengths:
        packer.add(length)
        assert sum(lengths[sample] for sample in packer.waiting_samples) <= 4 * 1_000


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_overlong_samples_fare_as_in_a_plan(overlong, truncation):
    lengths = [10, 9_000, 20, 5_000, 4_096]
    settings = {"overlong": overlong, "truncation": truncation, "max_length": 3_000}
    packer = StreamPacker(4_096, **settings)
    rows = [row for length in lengths for row in packer.add(length)] + packer.flush()
    plan = plan_packs(lengths, 4_096, **settings)
    assert sorted(np.concatenate(rows).tolist()) == plan.fragments.tolist()
    assert all(packer.counts[name] == getattr(plan, name) for name in vars(plan) if name.startswith("num_"))


def test_overlong_error_names_the_sample_of_the_stream():
    with pytest.raises(PackingError, match="sample 2 has 9"):
        list(stream_packs([5, 8, 9], 8, overlong="error"))


@pytest.mark.parametrize("stop", [1, 137, 999])
def test_a_resumed_stream_gives_the_same_rows(stop):
    lengths = lengths_of(1_000)
    whole = [row.tolist() for row in stream_packs(lengths, 1_000)]
    first, second = StreamPacker(1_000), StreamPacker(1_000)
    rows = [row.tolist() for length in lengths[:stop] for row in first.add(length)]
    waiting = first.waiting_samples
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.waiting_samples == waiting
    rows += [row.tolist() for length in lengths[stop:] for row in second.add(length)]
    assert rows + [row.tolist() for row in second.flush()] == whole
    assert second.counts["num_samples"] == 1_000


def test_a_saved_state_does_not_change_when_the_packer_goes_on():
    packer = StreamPacker(1_000)
    for length in (100, 200):
        packer.add(length)
    state = packer.state_dict()
    saved = json.dumps(state)
    packer.add(300)
    packer.flush()
    assert json.dumps(state) == saved


def test_a_stream_may_go_on_after_a_flush():
    packer = StreamPacker(8)
    assert packer.add(5) == []
    assert [row.tolist() for row in packer.flush()] == [[[0, 0, 5]]]
    assert packer.flush() == []
    assert [row.tolist() for row in packer.add(8)] == [[[1, 0, 8]]]


def test_an_empty_stream_gives_no_row():
    assert list(stream_packs([], 8)) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token_budget": 0}, "`token_budget`"),
        ({"num_open_rows": 0}, "`num_open_rows`"),
        ({"num_open_rows": 1_001}, "`num_open_rows` is 1001"),
        ({"max_segments": 0}, "`max_segments`"),
        ({"max_length": 9}, "`max_length` is 9 and `token_budget` is 8"),
        ({"overlong": "cut"}, "`overlong`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_are_named(settings, message):
    with pytest.raises(PackingError, match=message):
        StreamPacker(**({"token_budget": 8} | settings))
    with pytest.raises(PackingError, match=r"`lengths\[1\]` is 0"):
        list(stream_packs([3, 0], 8))
