"""The collator: one row, the right labels, and the samples that must be refused or trimmed."""

import copy
import pickle

import numpy as np
import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packing import PackedCollator, PackingError
from trl_packing.collator import ROW_INFO, PaddedCollator, RowCollator


def sample(*ids, **columns):
    return {"input_ids": list(ids), **columns}


def test_row_equals_trls_padding_free_row():
    rng = np.random.default_rng(0)
    samples = []
    for length in (5, 1, 12, 3):
        input_ids = rng.integers(1, 99, length)
        samples.append({"input_ids": input_ids.tolist(), "labels": np.where(input_ids % 3, input_ids, -100).tolist()})
    expected = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(samples)
    row = PackedCollator()(samples)
    assert row.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert row[key].dtype == value.dtype
            assert torch.equal(row[key], value), key
        else:
            assert row[key] == value
            assert isinstance(row[key], int)


@pytest.mark.parametrize("convert", [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, dtype=np.int32)])
def test_lists_arrays_and_tensors_give_the_same_row(convert):
    row = PackedCollator()([{"input_ids": convert([5, 6, 7]), "labels": convert([-100, 6, 7])}, sample(8, 9)])
    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert row["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    assert row["input_ids"].dtype == row["labels"].dtype == torch.int64


def test_last_token_never_predicts_next_segment():
    row = PackedCollator()([sample(1, 2, 3), sample(4, 5)])
    assert row["labels"].tolist() == [[-100, 2, 3, -100, 5]]


def test_samples_are_not_modified():
    samples = [{"input_ids": np.array([1, 2]), "labels": np.array([1, 2])}, sample(3, labels=[3])]
    before = copy.deepcopy(samples)
    PackedCollator(pad_to_multiple_of=8)(samples)
    assert str(samples) == str(before)


def test_pads_are_one_segment_and_never_trained():
    row = PackedCollator(pad_to_multiple_of=512)([sample(*range(1, 101)), sample(*range(1, 38))])
    assert row["cu_seq_lens_q"].tolist() == [0, 100, 137, 512]
    assert row["max_length_q"] == 375
    assert row["seq_idx"].unique().numel() == 3
    assert (row["labels"][0, 137:] == -100).all()
    assert (row["input_ids"][0, 137:] == 0).all()


def test_masks_decide_the_labels_where_there_are_none():
    row = PackedCollator()([sample(1, 2, 3, 4, completion_mask=[0, 0, 1, 1], assistant_masks=[0, 1, 1, 0])])
    assert row["labels"].tolist() == [[-100, -100, 3, -100]]
    given = sample(1, 2, 3, labels=[1, 2, 3], completion_mask=[0, 0, 0])
    assert PackedCollator()([given])["labels"].tolist() == [[-100, 2, 3]]


def test_masked_ends_are_removed_and_holes_refused():
    row = PackedCollator()(
        [
            sample(0, 0, 5, 6, attention_mask=[0, 0, 1, 1]),
            sample(7, 8, 0, labels=[-100, 8, -100], attention_mask=[1, 1, 0]),
        ]
    )
    assert row["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert row["labels"].tolist() == [[-100, 6, -100, 8]]
    assert "attention_mask" not in row
    with pytest.raises(PackingError, match="sample 1 has zeros in between"):
        PackedCollator()([sample(1), sample(1, 2, 3, attention_mask=[1, 0, 1])])
    with pytest.raises(PackingError, match="no token left"):
        PackedCollator()([sample(1, 2, attention_mask=[0, 0])])


def test_packed_samples_keep_their_segments():
    row = PackedCollator()([sample(1, 2, 3, 4, 5, seq_lengths=[2, 3]), sample(6)])
    assert row["cu_seq_lens_q"].tolist() == [0, 2, 5, 6]
    assert row["labels"].tolist() == [[-100, 2, -100, 4, 5, -100]]
    with pytest.raises(PackingError, match="add up to 4, but it has 3 tokens"):
        PackedCollator()([sample(1, 2, 3, seq_lengths=[2, 2])])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "batch is empty"),
        ([sample(1), sample()], "sample 1 of the batch is empty"),
        ([sample(1, 2, labels=[1])], "`labels` of sample 0 has 1 entries, but the sample has 2"),
        ([sample(1, 2, attention_mask=[1])], "`attention_mask` of sample 0"),
        ([sample(1, 2, completion_mask=[1, 0, 1])], "`completion_mask` of sample 0"),
        ([{"input_ids": [[1, 2], [3, 4]]}], "flat list of integers"),
        ([{"input_ids": [1.5, 2.0]}], "flat list of integers"),
    ],
)
def test_bad_samples_are_refused_by_name(samples, message):
    with pytest.raises(PackingError, match=message):
        PackedCollator()(samples)


def test_a_row_never_exceeds_its_budget():
    collator = PackedCollator(token_budget=4)
    assert collator([sample(1, 2, 3, 4)])["input_ids"].shape == (1, 4)
    with pytest.raises(PackingError, match="at most `token_budget` = 4 tokens, but these samples need 5"):
        collator([sample(1, 2, 3), sample(4, 5)])


def test_fixed_rows_have_one_shape():
    collator = PackedCollator(token_budget=8, max_segments=3)
    rows = [collator(samples) for samples in ([sample(1)], [sample(1, 2), sample(3)], [sample(*range(1, 9))])]
    assert {row["input_ids"].shape for row in rows} == {(1, 8)}
    assert {row["cu_seq_lens_q"].shape for row in rows} == {(5,)}
    assert rows[0]["cu_seq_lens_q"].tolist() == [0, 1, 8, 8, 8]
    assert rows[2]["cu_seq_lens_q"].tolist() == [0, 8, 8, 8, 8]
    with pytest.raises(PackingError, match="`max_segments` = 3 segments, but there are 4"):
        collator([sample(1)] * 4)
    with pytest.raises(PackingError, match="token_budget"):
        PackedCollator(max_segments=3)


def test_positions_start_where_the_model_starts_them():
    assert PackedCollator(position_ids_start=2)([sample(1, 2), sample(3)])["position_ids"].tolist() == [[2, 3, 2]]


def test_row_info_counts_real_tokens_only():
    collate = pickle.loads(pickle.dumps(RowCollator(PackedCollator(pad_to_multiple_of=8))))
    info = collate([sample(1, 2, 3, fragment=4), sample(5, 6, labels=[-100, -100], fragment=9)])[ROW_INFO]
    assert (info.fragments, info.num_targets, info.num_tokens, info.num_segments) == ((4, 9), 2, 5, 2)


@pytest.mark.parametrize("padded", [False, True], ids=["row", "padded"])
def test_every_segment_of_a_sample_that_came_packed_has_its_number(padded):
    stock = DataCollatorForLanguageModeling(pad_token_id=0)
    collate = PaddedCollator(stock) if padded else RowCollator(PackedCollator())
    batch = collate([sample(1, 2, 3, 4, 5, seq_lengths=[2, 3], fragment=0), sample(6, 7, seq_lengths=[2], fragment=1)])
    info = batch[ROW_INFO]
    assert (info.fragments, info.num_targets, info.num_tokens, info.num_segments) == ((0, 0, 1), 4, 7, 3)
    if padded:
        assert batch["input_ids"].tolist() == [[1, 2, 0], [3, 4, 5], [6, 7, 0]]


def test_a_filler_row_has_no_target_and_counts_nowhere():
    for collate in (RowCollator(PackedCollator()), PaddedCollator(DataCollatorForLanguageModeling(pad_token_id=0))):
        batch = collate([])
        assert (batch["labels"] == -100).all()
        info = batch[ROW_INFO]
        assert (info.fragments, info.num_targets, info.num_tokens, info.num_segments) == ((), 0, 0, 0)
