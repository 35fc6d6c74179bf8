"""Resuming: bit-identical losses, counters that go on, and the refusal of another plan."""

import json
import shutil
from itertools import chain

import numpy as np
import pytest
import torch
from datasets import Dataset, Image, List, Value
from tiny_vision import picture_talks
from training import conversations, losses, packed_trainer, tokens_of
from transformers import TrainerCallback

from trl_packing import PackingError
from trl_packing.dataset import texts_digest, tokens_digest
from trl_packing.resume import last_whole_checkpoint
from trl_packing.trainer.resuming import _move_schedule

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
    Seen().watch(trainer)
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
        ({"packing": False}, "packing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_plan_is_refused_with_what_differs(change, named, whole, tmp_path):
    folder, _ = whole
    with pytest.raises(PackingError, match=f"`[^`]*{named}[^`]*` was"):
        trainer_in(tmp_path, **change).train(resume_from_checkpoint=str(folder / "checkpoint-1"))


def flat(steps):
    return list(chain.from_iterable(steps))


class Seen(TrainerCallback):
    """Fragments and learning rate of every optimiser step."""

    def __init__(self):
        self.steps, self.rates, self.epochs = [], [], []

    def watch(self, trainer):
        compute_loss = trainer.compute_loss

        def watching(model, inputs, *args, **kwargs):
            self.steps[-1] += [number for number in inputs["row_info"].fragments if number >= 0]
            return compute_loss(model, inputs, *args, **kwargs)

        trainer.seen = self
        trainer.compute_loss = watching
        trainer.add_callback(self)
        return trainer

    def on_step_begin(self, args, state, control, **kwargs):
        self.steps.append([])

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args, state, control, **kwargs):
        self.epochs.append(state.epoch)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("where", ["middle_of_epoch_0", "end_of_epoch_0", "middle_of_epoch_1", "last_step"])
def test_another_accumulation_trains_the_samples_that_are_left(accumulation, where, whole, tmp_path):
    folder, reference = whole
    steps = len(losses(reference)) // 3
    step = {
        "middle_of_epoch_0": 1,
        "end_of_epoch_0": steps,
        "middle_of_epoch_1": steps + 1,
        "last_step": 3 * steps - 1,
    }[where]
    # What the first run trained of its last epoch.
    before, seen = reference.seen.steps[step // steps * steps : step], Seen()
    resumed = seen.watch(trainer_in(tmp_path, gradient_accumulation_steps=accumulation))
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    # Every step trains something, every epoch trains every sample once, and the run ends where it should.
    assert all(seen.steps)
    trained = sorted(flat(before + seen.steps))
    assert trained == sorted([*range(30)] * (3 - step // steps))
    ends = [number for number, epoch in enumerate(seen.epochs) if epoch % 1 == 0]
    assert len(ends) == 3 - step // steps
    assert sorted(flat(before + seen.steps[: ends[0] + 1])) == [*range(30)]
    assert resumed.state.epoch == 3.0
    assert resumed.state.global_step == resumed.state.max_steps == step + len(seen.steps)
    assert entries(resumed, "num_tokens")[-1] == entries(reference, "num_tokens")[-1]
    # The linear schedule goes on about where it was, and ends at zero.
    assert seen.rates == sorted(seen.rates, reverse=True)
    assert seen.rates[0] == pytest.approx(1e-3 * (1 - step / (3 * steps)), abs=1e-3 * accumulation / (3 * steps))
    assert set(resumed.lr_scheduler.get_last_lr()) == {0.0}


def test_a_run_of_another_accumulation_can_be_resumed_itself(whole, tmp_path):
    folder, reference = whole
    middle = len(losses(reference)) // 3 + 1
    again = trainer_in(tmp_path / "again", gradient_accumulation_steps=3)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{middle}"))
    assert not (tmp_path / "again" / f"checkpoint-{middle}").exists()
    for step in range(middle + 1, again.state.global_step):
        resumed = trainer_in(tmp_path / f"from-{step}", gradient_accumulation_steps=3, save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / "again" / f"checkpoint-{step}"))
        assert losses(resumed) == losses(again)
        assert entries(resumed, "learning_rate") == entries(again, "learning_rate")
    seen = Seen()
    back = seen.watch(trainer_in(tmp_path / "back"))
    back.train(resume_from_checkpoint=str(tmp_path / "again" / f"checkpoint-{middle + 1}"))
    assert back.state.epoch == 3.0
    assert set(flat(seen.steps[-(len(losses(reference)) // 3) :])) == set(range(30))


def test_more_epochs_may_be_asked_for(whole, tmp_path):
    folder, reference = whole
    seen = Seen()
    resumed = seen.watch(trainer_in(tmp_path, num_train_epochs=5))
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{len(losses(reference)) // 3}"))
    assert sorted(flat(seen.steps)) == sorted([*range(30)] * 4)


def grows(folder, **overrides):
    """A run of 8 rows an epoch whose plan of another epoch would need more."""
    random = np.random.default_rng(18)
    lengths = random.integers(20, 60, 23).tolist()
    data = Dataset.from_list([{"input_ids": random.integers(5, 250, length).tolist()} for length in lengths])
    run = {"packing": True, "token_budget": 128, "max_length": 64, "num_train_epochs": 1, "balance": "none"}
    return packed_trainer(folder, data, **{**run, "isolation_check": "off", "save_strategy": "epoch", **overrides})


def test_the_last_save_needs_no_plan_of_an_epoch_that_is_not_trained(tmp_path):
    trainer = grows(tmp_path)
    assert trainer._train_plan.for_epoch(1).num_bins > trainer._sampler.num_rows == 8
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-8" / "packing_state.json").read_text())
    assert (state["epoch"], state["num_fragments"]) == (1, 0)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """7 steps of an epoch of 8; three epochs planned together have 9 rows each."""
    trainer = Seen().watch(grows(tmp_path_factory.mktemp("short"), max_steps=7, save_strategy="steps", save_steps=1))
    trainer.train()
    return trainer


@pytest.mark.parametrize("step", [1, 4, 6])
def test_more_steps_may_be_asked_for(step, short, tmp_path):
    def longer(folder):
        return grows(folder, max_steps=24, save_strategy="steps", save_steps=5)

    seen = Seen()
    resumed = seen.watch(longer(tmp_path))
    resumed.train(resume_from_checkpoint=f"{short.args.output_dir}/checkpoint-{step}")
    assert len(resumed._sampler) == 9 > len(short._sampler)
    assert resumed.state.global_step == step + len(seen.steps) == 24
    # Every epoch trains every sample once, also the one that was begun with other rows.
    before = short.seen.steps[:step]
    ends = [number for number, epoch in enumerate(seen.epochs) if epoch % 1 == 0]
    assert sorted(flat(before + seen.steps[: ends[0] + 1])) == [*range(23)]
    assert sorted(flat(seen.steps[ends[0] + 1 : ends[1] + 1])) == [*range(23)]
    assert seen.rates == pytest.approx([1e-3 * (1 - number / 24) for number in range(step, 24)])
    again = longer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-15"))
    assert losses(again) == losses(resumed)


def test_steps_that_no_epoch_holds_are_refused_with_the_reason(short, tmp_path):
    trainer = grows(tmp_path, max_steps=27)
    with pytest.raises(PackingError, match=r"`max_steps` = 27 plans 3 epochs of 9 steps.*only 20 of 21 are left"):
        trainer.train(resume_from_checkpoint=f"{short.args.output_dir}/checkpoint-6")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"num_train_epochs": 1}, "num_train_epochs"),
        ({"num_train_epochs": 2, "gradient_accumulation_steps": 2}, "num_train_epochs"),
        ({"max_steps": 7}, "max_steps"),
    ],
    ids=["fewer_epochs", "another_accumulation", "fewer_steps"],
)
def test_a_run_at_its_end_trains_nothing_more(overrides, named, tmp_path, capsys):
    trainer = grows(tmp_path, num_train_epochs=2)
    trainer.train()
    step = trainer.state.global_step
    resumed = grows(tmp_path, **overrides)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert resumed.state.global_step == step
    assert f"Nothing is left to train: the checkpoint has {step} steps" in (out := capsys.readouterr().out)
    assert f"`{named}` is" in out


def test_steps_of_another_size_cannot_add_up_to_max_steps(whole, tmp_path):
    folder, _ = whole
    trainer = trainer_in(tmp_path, max_steps=9, gradient_accumulation_steps=1)
    with pytest.raises(PackingError, match="`max_steps` counts optimiser steps"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))


def test_a_schedule_that_cannot_move_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(PackingError, match="schedule of a OneCycleLR cannot be moved"):
        _move_schedule(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10), 3)


def test_a_part_of_an_epoch_ends_where_it_should(whole, tmp_path):
    folder, _ = whole
    seen = Seen()
    resumed = seen.watch(trainer_in(tmp_path, num_train_epochs=1.5, gradient_accumulation_steps=1))
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert resumed.state.epoch == pytest.approx(1.5, abs=1 / len(resumed._sampler))


def test_another_data_set_is_refused(whole, tmp_path):
    folder, _ = whole
    other = packed_trainer(tmp_path, conversations(30, seed=9), **RUN)
    with pytest.raises(PackingError, match="hash of the samples' lengths"):
        other.train(resume_from_checkpoint=str(folder / "checkpoint-1"))


def test_another_order_of_the_samples_is_refused(tmp_path):
    run = {"packing": False, "save_steps": 1, "max_steps": 2}
    trainer_in(tmp_path / "random", **run).train()
    other = trainer_in(tmp_path / "sequential", **run, train_sampling_strategy="sequential")
    with pytest.raises(PackingError, match="`train_sampling_strategy` was 'random' and is 'sequential'"):
        other.train(resume_from_checkpoint=str(tmp_path / "random" / "checkpoint-1"))


def test_rows_with_another_headroom_are_refused(tmp_path):
    """Exact rows leave room for balancing, fixed ones do not: other rows, in which samples come in another order."""
    lengths = np.clip(np.random.default_rng(0).lognormal(2.5, 1.0, 400), 2, 256).astype(int)
    lengths[:6] = 250
    run = {**RUN, "token_budget": 512, "max_steps": 2, "max_segments": 64}
    exact = packed_trainer(tmp_path / "exact", tokens_of(*lengths), **run)
    assert exact._train_plan.headroom > 0
    exact.train()
    fixed = packed_trainer(tmp_path / "fixed", tokens_of(*lengths), **run, row_shape="fixed")
    with pytest.raises(PackingError, match="headroom"):
        fixed.train(resume_from_checkpoint=str(tmp_path / "exact" / "checkpoint-1"))


def test_other_data_of_equal_lengths_is_refused(whole, tmp_path):
    folder, _ = whole
    talks = conversations(30)
    for talk in talks:
        for message in talk["messages"]:
            message["content"] = message["content"][::-1]
    other = packed_trainer(tmp_path, talks, **RUN)
    with pytest.raises(PackingError, match="hash of some samples' content` was") as refusal:
        other.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert "lengths" not in str(refusal.value)


def test_the_hash_of_the_content_is_the_same_however_the_data_is_stored(tmp_path):
    random = np.random.default_rng(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in (random.integers(0, 9, 5).tolist() for _ in range(300))]
    data = Dataset.from_list(rows)
    digest = tokens_digest(data)
    assert tokens_digest(Dataset.from_list(rows[::-1])) != digest
    data.save_to_disk(tmp_path / "data", num_shards=3)
    assert tokens_digest(Dataset.load_from_disk(tmp_path / "data")) == digest
    assert tokens_digest(Dataset.from_list(rows[::-1]).select(range(299, -1, -1)).with_format("torch")) == digest
    narrow = data.features.copy()
    narrow["input_ids"] = List(Value("int32"))
    assert tokens_digest(data.cast(narrow)) == digest
    masked = [{**row, "labels": [-100, *row["labels"][1:]]} for row in rows]
    assert tokens_digest(Dataset.from_list(masked)) != digest


def test_samples_with_images_are_known_by_their_texts_and_sizes(tmp_path):
    columns = ["messages", "images", "not there"]
    talks = picture_talks(12)
    digest = texts_digest(talks, columns)
    talks.save_to_disk(tmp_path / "talks")
    assert texts_digest(Dataset.load_from_disk(tmp_path / "talks"), columns) == digest
    assert texts_digest(picture_talks(12, seed=5), columns) != digest
    # Files on one machine, bytes on another, and a column that nobody trains on.
    files = []
    for number, talk in enumerate(talks):
        paths = [str(tmp_path / f"{number}-{index}.png") for index in range(len(talk["images"]))]
        for path, image in zip(paths, talk["images"], strict=True):
            image.save(path)
        files.append({"id": number, "messages": talk["messages"], "images": paths})
    stored = Dataset.from_list(files).cast_column("images", List(Image()))
    assert texts_digest(stored, columns) == digest
    wider = [{**talk, "images": [image.resize((99, 28)) for image in talk["images"]]} for talk in talks]
    assert texts_digest(Dataset.from_list(wider), columns) != digest


def test_a_checkpoint_of_another_trainer_is_refused(whole, tmp_path):
    folder, _ = whole
    checkpoint = tmp_path / "checkpoint-1"
    shutil.copytree(folder / "checkpoint-1", checkpoint)
    (checkpoint / "packing_state.json").unlink()
    with pytest.raises(PackingError, match="was not written by"):
        trainer_in(tmp_path / "b").train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_without_optimiser_state_is_refused(tmp_path):
    """It would train on with new moments and no warning."""
    trainer_in(tmp_path, save_only_model=True, max_steps=2).train()
    assert (tmp_path / "checkpoint-1" / "model.safetensors").is_file()
    with pytest.raises(PackingError, match="checkpoint-1 holds no optimiser state"):
        trainer_in(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


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
