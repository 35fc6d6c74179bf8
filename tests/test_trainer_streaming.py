"""Streams: every sample once, whole optimiser steps, the same rows as the samples' order says."""

import pytest
import torch
from datasets import Dataset
from training import as_dataset, conversations, losses, packed_trainer

from trl_packing import PackedSFTConfig
from trl_packing.streaming import RowStream


def stream_of(number, num_shards=1):
    return as_dataset(conversations(number)).to_iterable_dataset(num_shards=num_shards)


def tokens(lengths):
    data = [{"input_ids": [7] * length, "labels": [7] * length} for length in lengths]
    return Dataset.from_list(data).to_iterable_dataset()


def row_stream(dataset, packed=True, num_ranks=1, rank=0, rows_per_step=1, **settings):
    args = PackedSFTConfig("unused", use_cpu=True, bf16=False, max_length=16, **settings)
    return RowStream(
        dataset,
        args,
        packed=packed,
        samples_per_row=2,
        num_ranks=num_ranks,
        rank=rank,
        rows_per_step=rows_per_step,
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("num_ranks", "rows_per_step"), [(1, 1), (1, 4), (2, 1), (3, 2), (4, 2)])
@pytest.mark.parametrize("lengths", [[3], [5, 16, 2, 2, 9, 1, 16, 7, 3], list(range(2, 17)) * 3], ids=len)
def test_every_sample_once_on_one_rank_and_equal_whole_steps(packed, num_ranks, rows_per_step, lengths):
    rows = [list(row_stream(tokens(lengths), packed, num_ranks, rank, rows_per_step)) for rank in range(num_ranks)]
    assert len({len(rank_rows) for rank_rows in rows}) == 1
    assert len(rows[0]) % rows_per_step == 0
    seen = sorted(sample["fragment"] for rank_rows in rows for row in rank_rows for sample in row)
    expected = [number for number, length in enumerate(lengths) if length > 1]
    assert seen == expected
    if packed:
        assert all(sum(len(sample["input_ids"]) for sample in row) <= 128 for rank_rows in rows for row in rank_rows)
    else:
        in_order = [sample["fragment"] for step in zip(*rows, strict=True) for row in step for sample in row]
        assert in_order == expected


@pytest.mark.parametrize(
    ("overlong", "kept", "counts"),
    [
        ("truncate", [16, 4], {"num_cut_samples": 1, "num_cut_tokens": 24}),
        ("split", [16, 16, 8, 4], {"num_split_samples": 1}),
        ("drop", [4], {"num_dropped_samples": 1, "num_dropped_tokens": 40}),
    ],
)
def test_overlong_samples_are_counted(overlong, kept, counts, capsys):
    stream = row_stream(tokens([40, 4, 1]), overlong=overlong)
    rows = list(stream)
    assert sorted(len(sample["input_ids"]) for row in rows for sample in row) == sorted(kept)
    assert counts.items() <= stream.counts.items()
    assert stream.counts["num_masked_samples"] == 1
    assert "masked samples 1" in capsys.readouterr().out


def test_waiting_samples_are_bounded():
    stream = row_stream(tokens([16] * 3000), token_budget=64)
    longest = 0
    for row in stream:
        longest = max(longest, len(row))
    assert longest == 4
    assert stream.counts["num_samples"] == 3000


def test_a_stream_trains_like_the_data_set_it_streams(tmp_path):
    run = {"packing": False, "max_steps": 6, "gradient_accumulation_steps": 2}
    stream = packed_trainer(tmp_path, stream_of(48), **run)
    stream.train()
    mapped = packed_trainer(tmp_path, conversations(48), train_sampling_strategy="sequential", **run)
    mapped.train()
    assert losses(stream) == pytest.approx(losses(mapped), rel=1e-6)
    last = [
        entry["num_tokens"] for trainer in (stream, mapped) for entry in trainer.state.log_history if "loss" in entry
    ]
    assert last[5] == last[11]


@pytest.mark.parametrize("workers", [0, 2])
def test_packed_stream_trains_and_evaluates(workers, tmp_path):
    trainer = packed_trainer(
        tmp_path,
        stream_of(30, num_shards=3),
        eval_data=stream_of(9),
        packing=True,
        token_budget=512,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        dataloader_num_workers=workers,
    )
    trainer.train()
    mapped = packed_trainer(tmp_path, conversations(4), model=None, eval_data=conversations(9), packing=True)
    mapped.model.load_state_dict(trainer.model.state_dict())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mapped.evaluate()["eval_loss"], rel=1e-5)


def test_resuming_a_stream_goes_on_where_it_stopped(tmp_path):
    run = {"packing": True, "token_budget": 256, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = packed_trainer(tmp_path / "a", stream_of(60), **run)
    whole.train()
    resumed = packed_trainer(tmp_path / "b", stream_of(60), **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert losses(resumed)[-3:] == losses(whole)[-3:]
    assert torch.equal(resumed.model.lm_head.weight, whole.model.lm_head.weight)
