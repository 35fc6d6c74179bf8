"""Resuming: bit-identical losses, counters that go on, and the refusal of another plan."""

import json
import shutil

import pytest
import torch
from training import conversations, losses, packed_trainer

from trl_packing import PackingError
from trl_packing.resume import last_whole_checkpoint

RUN = {
    "packing": True,
    "token_budget": 400,
    "max_length": 256,
    "num_train_epochs": 3,
    "gradient_accumulation_steps": 2,
    "save_strategy": "steps",
    "save_steps": 1,
}


def trainer_in(folder, **overrides):
    return packed_trainer(folder, conversations(30), **{**RUN, **overrides})


def entries(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = trainer_in(folder)
    trainer.train()
    return folder, trainer


@pytest.mark.parametrize("packing", [True, False])
def test_each_epoch_trains_every_sample_once_in_new_rows(packing, tmp_path):
    trainer = trainer_in(tmp_path, packing=packing)
    epochs = []
    loader = trainer.get_train_dataloader()
    for epoch in range(3):
        loader.set_epoch(epoch)
        epochs.append([batch["row_info"].fragments for batch in loader])
    assert all(sorted(number for row in rows for number in row) == list(range(30)) for rows in epochs)
    assert len({len(rows) for rows in epochs}) == 1
    assert len({tuple(sorted(map(tuple, rows))) for rows in map(set, epochs)}) == 3


@pytest.mark.parametrize("where", ["first_step", "middle_of_epoch_1", "end_of_epoch_0", "epoch_2"])
def test_remaining_losses_are_bit_identical(where, whole, tmp_path):
    folder, reference = whole
    steps = len(losses(reference)) // 3
    step = {"first_step": 1, "middle_of_epoch_1": steps + 1, "end_of_epoch_0": steps, "epoch_2": 2 * steps + 1}[where]
    resumed = trainer_in(tmp_path)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert losses(resumed) == losses(reference)
    assert entries(resumed, "num_tokens") == entries(reference, "num_tokens")
    for ours, theirs in zip(resumed.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_num_tokens_counts_real_tokens_of_all_epochs(whole):
    _, trainer = whole
    assert entries(trainer, "num_tokens")[-1] == 3 * trainer._train_plan.samples.lengths.sum()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"token_budget": 500}, "token_budget"),
        ({"seed": 4}, "seed"),
        ({"packing_order": "best_fit"}, "packing_order"),
        ({"max_length": 200}, "max_length"),
        ({"overlong": "drop"}, "overlong"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps"),
        ({"packing": False}, "packing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_plan_is_refused_with_what_differs(change, named, whole, tmp_path):
    folder, _ = whole
    with pytest.raises(PackingError, match=f"`[^`]*{named}[^`]*` was"):
        trainer_in(tmp_path, **change).train(resume_from_checkpoint=str(folder / "checkpoint-1"))


def test_another_data_set_is_refused(whole, tmp_path):
    folder, _ = whole
    other = packed_trainer(tmp_path, conversations(30, seed=9), **RUN)
    with pytest.raises(PackingError, match="hash of the samples' lengths"):
        other.train(resume_from_checkpoint=str(folder / "checkpoint-1"))


def test_a_checkpoint_of_another_trainer_is_refused(whole, tmp_path):
    folder, _ = whole
    checkpoint = tmp_path / "checkpoint-1"
    shutil.copytree(folder / "checkpoint-1", checkpoint)
    (checkpoint / "packing_state.json").unlink()
    with pytest.raises(PackingError, match="was not written by"):
        trainer_in(tmp_path / "b").train(resume_from_checkpoint=str(checkpoint))


def test_the_last_whole_checkpoint_is_taken(whole, tmp_path):
    folder, _ = whole
    for step in (1, 2, 10):
        shutil.copytree(folder / f"checkpoint-{min(step, 3)}", tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"epoch": ')
    assert last_whole_checkpoint(tmp_path).endswith("checkpoint-2")
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    assert last_whole_checkpoint(tmp_path).endswith("checkpoint-1")
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(PackingError, match="no whole checkpoint"):
        last_whole_checkpoint(tmp_path)


def test_resume_true_takes_it(whole, tmp_path):
    folder, reference = whole
    shutil.copytree(folder / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-3").mkdir()
    resumed = trainer_in(tmp_path, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(reference)


def test_a_checkpoint_says_what_its_plan_was_made_from(whole):
    folder, _ = whole
    state = json.loads((folder / "checkpoint-2" / "packing_state.json").read_text())
    assert state["fingerprint"]["token_budget"] == 400
    assert state["num_tokens"] > 0
