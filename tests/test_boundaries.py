"""Boundaries: every conversion against a plain loop, and the inputs that must be refused."""

import pytest
import torch

from trl_packing import Boundaries, PackingError
from trl_packing.boundaries import host_lengths, lengths_from_attention_mask

LAYOUTS = [(1,), (1, 1, 1, 1), (1, 64, 1), (65,), (63, 1), (11, 6, 1, 9), (3, 4, 1), (100, 37)]
RANDOM = [tuple(torch.randint(1, 50, (n,), generator=torch.Generator().manual_seed(n)).tolist()) for n in range(1, 30)]


def ids(lengths):
    return "seg" + "-".join(map(str, lengths[:6]))


@pytest.mark.parametrize("lengths", LAYOUTS + RANDOM, ids=ids)
def test_views_say_what_a_loop_over_tokens_says(lengths):
    boundaries = Boundaries.from_lengths(lengths)
    offsets, seq_idx, positions = [0], [], []
    for number, length in enumerate(lengths):
        offsets.append(offsets[-1] + length)
        seq_idx += [number] * length
        positions += range(length)
    assert boundaries.cu_seqlens.tolist() == offsets == list(boundaries.offsets)
    assert boundaries.cu_seqlens.dtype == boundaries.seq_idx.dtype == torch.int32
    assert boundaries.seq_idx.tolist() == [seq_idx]
    assert boundaries.position_ids().tolist() == [positions]
    assert boundaries.position_ids().dtype == torch.int64
    assert boundaries.position_ids(2).tolist() == [[position + 2 for position in positions]]
    assert boundaries.max_seqlen == max(lengths)
    assert isinstance(boundaries.max_seqlen, int)
    assert boundaries.total_tokens == sum(lengths) == boundaries.num_real_tokens


@pytest.mark.parametrize("lengths", LAYOUTS + RANDOM, ids=ids)
@pytest.mark.parametrize("start", [0, 1, 2, 7])
def test_every_conversion_round_trips(lengths, start):
    boundaries = Boundaries.from_lengths(lengths)
    assert Boundaries.from_position_ids(boundaries.position_ids(start)) == boundaries
    assert Boundaries.from_seq_idx(boundaries.seq_idx) == boundaries
    width = max(lengths)
    right = torch.tensor([[1] * length + [0] * (width - length) for length in lengths])
    assert Boundaries.from_attention_mask(right) == boundaries
    assert Boundaries.from_attention_mask(right.flip(1).bool()) == boundaries


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        ([2, 3, 4, 2, 3], (3, 2)),
        ([5, 6, 7, 0, 1], (3, 2)),
        ([0, 0, 0], (1, 1, 1)),
        ([[0, 1, 0], [0, 1, 2]], (2, 1, 3)),
        ([[3, 4], [5, 6]], (2, 2)),
        ([9], (1,)),
    ],
)
def test_a_segment_starts_wherever_positions_do_not_go_on(positions, lengths):
    assert Boundaries.from_position_ids(torch.tensor(positions)).lengths == lengths


def test_mrope_positions_are_no_boundaries():
    with pytest.raises(PackingError, match="M-RoPE"):
        Boundaries.from_position_ids(torch.zeros(3, 1, 6, dtype=torch.long))


def test_pads_are_one_segment():
    boundaries = Boundaries.from_lengths([100, 37]).aligned_to(512)
    assert boundaries.cu_seqlens.tolist() == [0, 100, 137, 512]
    assert boundaries.seq_idx.unique().tolist() == [0, 1, 2]
    assert boundaries.max_seqlen == 375
    assert boundaries.num_real_tokens == 137
    assert boundaries.num_alignment_tokens == 375


def test_a_row_that_is_aligned_already_gets_no_tail():
    assert Boundaries.from_lengths([3, 5]).aligned_to(8) == Boundaries.from_lengths([3, 5])
    with pytest.raises(PackingError, match="cannot be aligned"):
        Boundaries.from_lengths([3, 5]).aligned_to(7)
    with pytest.raises(PackingError, match="cannot be aligned"):
        Boundaries.from_lengths([3]).aligned_to(7).aligned_to(9)


def test_fixed_shapes_repeat_the_last_offset():
    boundaries = Boundaries((3, 5), num_offsets=6, max_seqlen=16)
    assert boundaries.cu_seqlens.tolist() == [0, 3, 8, 8, 8, 8]
    assert boundaries.max_seqlen == 16
    assert host_lengths(boundaries.cu_seqlens) == (3, 5)
    with pytest.raises(PackingError, match="max_segments"):
        Boundaries((3, 5), num_offsets=2)
    with pytest.raises(PackingError, match="skip"):
        Boundaries((3, 5), max_seqlen=4)


def test_model_kwargs_are_new_tensors_without_a_mask():
    boundaries = Boundaries.from_lengths([2, 3])
    first, second = boundaries.to_model_kwargs(), boundaries.to_model_kwargs()
    expected = {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
    assert set(first) == expected
    assert first["cu_seq_lens_q"].data_ptr() != second["cu_seq_lens_q"].data_ptr()
    assert first["cu_seq_lens_q"] is first["cu_seq_lens_k"]
    assert boundaries.to_model_kwargs(host_offsets=True)["cu_seqlens_cpu"] == (0, 2, 5)
    first["cu_seq_lens_q"].zero_()
    assert boundaries.cu_seqlens.tolist() == [0, 2, 5]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Boundaries.from_lengths([]), "at least one segment"),
        (lambda: Boundaries.from_lengths([3, 0]), r"`lengths\[1\]` is 0"),
        (lambda: Boundaries.from_lengths([-1]), "at least 1 token"),
        (lambda: Boundaries.from_seq_idx(torch.tensor([0, 1, 0])), "comes back"),
        (lambda: Boundaries.from_seq_idx(torch.tensor([0, -1])), "negative"),
        (lambda: Boundaries.from_seq_idx(torch.zeros(2, 3, dtype=torch.int32)), "one row"),
        (lambda: Boundaries.from_attention_mask(torch.tensor([[1, 0, 1]])), "row 0"),
        (lambda: Boundaries.from_attention_mask(torch.tensor([[1, 1, 0], [0, 2, 2]])), "zeros and ones"),
        (lambda: Boundaries.from_attention_mask(torch.zeros(2, 3, dtype=torch.long)), "at least one segment"),
        (lambda: Boundaries.from_attention_mask(torch.ones(1, 1, 3, 3)), "2-D mask"),
        (lambda: Boundaries.from_position_ids(torch.zeros(2, 0, dtype=torch.long)), "is empty"),
        (lambda: Boundaries.from_position_ids(torch.zeros(2, 3)), "integers"),
        (lambda: Boundaries((3, 2), num_alignment_tokens=1), "the last one"),
    ],
)
def test_bad_input_is_refused_with_its_value(build, message):
    with pytest.raises(PackingError, match=message):
        build()


def test_empty_rows_of_a_padded_batch_are_counted_and_give_no_segment():
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1]])
    assert lengths_from_attention_mask(mask) == [2, 0, 3]
    assert Boundaries.from_attention_mask(mask).lengths == (2, 3)


def test_host_lengths_read_a_tensor_once_and_notice_writes(monkeypatch):
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(1) or original(tensor))
    assert host_lengths(cu_seqlens) == host_lengths(cu_seqlens) == (2, 3)
    assert len(reads) == 1
    cu_seqlens[1] = 1
    assert host_lengths(cu_seqlens) == (1, 4)
    assert host_lengths(cu_seqlens, (0, 5)) == (5,)
    assert len(reads) == 2
