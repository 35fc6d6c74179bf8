"""Several real processes on gloo: the numbers of one process, no hang, every sample once."""

import pytest
import torch
from launching import train_on

pytestmark = pytest.mark.slow

PACKED = {"packing": True, "token_budget": 300, "max_grad_norm": 0.0, "balance": "cost"}


def samples_of(ranks):
    return sorted(number for rank in ranks for row in rank["seen"] for number in row if number >= 0)


def same_gradients(first, second):
    steps = [torch.load(folder / "gradients.pt", weights_only=True) for folder in (first, second)]
    for step, other in zip(*steps, strict=True):
        other = {name.removeprefix("module."): gradient for name, gradient in other.items()}
        norm = torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in other.values()))
        for name, gradient in step.items():
            assert float((gradient - other[name.removeprefix("module.")]).norm()) <= 1e-6 * float(norm), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, train_on(1, folder, num_train_epochs=2, gradient_accumulation_steps=6, **PACKED)


@pytest.mark.parametrize(("num_ranks", "accumulation"), [(2, 3), (3, 2)])
def test_gradients_losses_and_evaluation_are_those_of_one_process(num_ranks, accumulation, alone, tmp_path):
    folder, (reference,) = alone
    ranks = train_on(num_ranks, tmp_path, num_train_epochs=2, gradient_accumulation_steps=accumulation, **PACKED)
    same_gradients(folder, tmp_path)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert rank["num_tokens"] == reference["num_tokens"]
        assert rank["eval_loss"] == pytest.approx(reference["eval_loss"], rel=1e-6)
        assert rank["weights"] == ranks[0]["weights"]
    assert samples_of(ranks) == sorted([*range(30)] * 2)


@pytest.mark.parametrize("packing", [True, False])
def test_fewer_samples_than_ranks_and_one_too_many(packing, tmp_path):
    few = train_on(
        3, tmp_path / "few", num_samples=2, num_train_epochs=1, packing=packing, per_device_train_batch_size=1
    )
    assert samples_of(few) == [0, 1]
    run = {"num_samples": 9, "num_train_epochs": 1, "packing": packing, "max_grad_norm": 0.0}
    ranks = train_on(
        2, tmp_path / "two", gradient_accumulation_steps=2, per_device_train_batch_size=2, max_length=64, **run
    )
    one = train_on(
        1, tmp_path / "one", gradient_accumulation_steps=4, per_device_train_batch_size=2, max_length=64, **run
    )
    assert samples_of(ranks) == samples_of(one) == [*range(9)]
    same_gradients(tmp_path / "one", tmp_path / "two")
    assert ranks[0]["num_tokens"] == one[0]["num_tokens"]


def test_resuming_puts_experts_back_on_every_rank(tmp_path):
    """They are stored one by one, under other names than the model's."""
    run = {**PACKED, "num_train_epochs": 1, "model_type": "mixtral", "learning_rate": 1e-2}
    saving = {"save_strategy": "steps", "save_steps": 1}
    whole = train_on(2, tmp_path / "whole", **run, **saving)
    resumed = train_on(2, tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-1"), **run)
    assert [rank["losses"] for rank in resumed] == [rank["losses"] for rank in whole]
    assert [rank["weights"] for rank in resumed] == [rank["weights"] for rank in whole]


def test_resuming_in_epoch_2_goes_on_with_its_own_plan(tmp_path):
    run = {**PACKED, "num_train_epochs": 3, "gradient_accumulation_steps": 2, "lora": True}
    saving = {"save_strategy": "steps", "save_steps": 1, "save_only_model": False}
    whole = train_on(2, tmp_path / "whole", **run, **saving)
    step = 2 * whole[0]["steps"] // 3 + 1
    resumed = train_on(2, tmp_path / "resumed", resume=str(tmp_path / "whole" / f"checkpoint-{step}"), **run)
    assert resumed[0]["losses"] == whole[0]["losses"]
    assert resumed[0]["num_tokens"] == whole[0]["num_tokens"]
    assert [rank["weights"] for rank in resumed] == [rank["weights"] for rank in whole]
    left = len(resumed[0]["seen"])
    assert 0 < left < len(whole[0]["seen"])
    assert [rank["seen"] for rank in resumed] == [rank["seen"][-left:] for rank in whole]


def test_another_number_of_ranks_goes_on_with_the_samples_that_are_left(tmp_path):
    """As long as a step holds as many rows, its samples are the same on any number of ranks."""
    run = {**PACKED, "num_train_epochs": 1, "token_budget": 150, "max_length": 150}
    two = {"gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
    whole = train_on(2, tmp_path / "whole", **run, **two)
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    (resumed,) = train_on(1, tmp_path / "one", resume=checkpoint, gradient_accumulation_steps=2, **run)
    before = sorted(number for rank in whole for row in rank["seen"][:2] for number in row)
    assert len(before) > 0
    assert sorted(before + samples_of([resumed])) == [*range(30)]
    assert resumed["losses"] == pytest.approx(whole[0]["losses"], rel=1e-5)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_step_of_another_size_trains_the_samples_that_are_left(before, after, tmp_path):
    """In epoch 1 and with as much accumulation, so that a step on fewer ranks holds fewer rows."""
    run = {**PACKED, "num_train_epochs": 3, "token_budget": 150, "max_length": 150, "gradient_accumulation_steps": 2}
    whole = train_on(before, tmp_path / "whole", save_strategy="steps", save_steps=1, **run)
    steps = whole[0]["steps"] // 3
    checkpoint = str(tmp_path / "whole" / f"checkpoint-{steps + 1}")
    resumed = train_on(after, tmp_path / "resumed", resume=checkpoint, **run)
    done = [number for rank in whole for row in rank["seen"][: len(rank["seen"]) // 3 + 2] for number in row]
    assert sorted([n for n in done if n >= 0] + samples_of(resumed)) == sorted([*range(30)] * 3)
    assert len({len(rank["seen"]) for rank in resumed}) == 1
    assert len({rank["weights"] for rank in resumed}) == 1
    assert resumed[0]["epoch"] == 3.0
    assert resumed[0]["num_tokens"][-1] == whole[0]["num_tokens"][-1]


KILLED = {**PACKED, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train_on(2, tmp_path_factory.mktemp("uninterrupted"), **KILLED)


@pytest.mark.parametrize("where", ["in_save", "in_step"])
def test_a_killed_run_goes_on_from_its_last_whole_checkpoint(where, uninterrupted, tmp_path):
    """SIGKILL in epoch 1: to both ranks before the trainer state is saved, or to one while the other waits for it."""
    step = uninterrupted[0]["steps"] // 2 + 2
    with pytest.raises(AssertionError, match="SIGKILL"):
        train_on(2, tmp_path, **{f"kill_{where}": step}, **KILLED)
    weights = tmp_path / f"checkpoint-{step}" / "model.safetensors"
    assert weights.is_file() == (where == "in_save")
    resumed = train_on(2, tmp_path, resume=True, **KILLED)
    for rank, whole in zip(resumed, uninterrupted, strict=True):
        assert rank["losses"] == whole["losses"]
        assert rank["weights"] == whole["weights"]
        assert rank["seen"] == whole["seen"][-len(rank["seen"]) :]
    steps_per_epoch = uninterrupted[0]["steps"] // 2
    micro_steps = len(uninterrupted[0]["seen"]) // 2
    assert len(resumed[0]["seen"]) == micro_steps - 2 * (step - 1 - steps_per_epoch)


def test_evaluating_before_training_keeps_ranks_together(tmp_path):
    """And a streamed evaluation set beside a training set that is none gives the same loss."""
    first = train_on(2, tmp_path / "first", evaluate_first=True, eval_streaming=True, max_steps=3, **PACKED)
    second = train_on(2, tmp_path / "second", max_steps=3, **PACKED)
    assert first[0]["weights"] == first[1]["weights"]
    assert first[0]["losses"] == second[0]["losses"]
    for rank in (*first, *second):
        assert rank["eval_loss"] == pytest.approx(second[0]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("num_ranks", "shards", "accumulation", "empty"),
    [(2, 4, 2, False), (2, 4, 1, False), (2, 3, 2, False), (3, 2, 1, False), (2, 4, 2, True)],
)
def test_streams_neither_hang_nor_drift(num_ranks, shards, accumulation, empty, tmp_path):
    ranks = train_on(
        num_ranks,
        tmp_path,
        streaming=shards,
        empty_shard=empty,
        eval_streaming=True,
        max_steps=3,
        gradient_accumulation_steps=accumulation,
        eval_strategy="steps",
        eval_steps=2,
        **{**PACKED, "token_budget": 700},
    )
    assert len({len(rank["seen"]) for rank in ranks}) == 1
    assert len({rank["weights"] for rank in ranks}) == 1
    assert ranks[0]["eval_loss"] == pytest.approx(ranks[1]["eval_loss"], rel=0)
    whole = 30 - (30 // shards if empty else 0)
    seen = samples_of(ranks)
    assert len(seen) >= whole
    assert set(seen) == set(range(whole))


def test_a_leak_stops_every_rank(tmp_path):
    with pytest.raises(AssertionError, match="LeakError"):
        train_on(2, tmp_path, model_type="bloom", max_steps=1, **PACKED)
