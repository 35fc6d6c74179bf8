"""Evaluation: the token-weighted loss of the set, whatever the batches, and per-sample losses in data order."""

import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from training import conversations, gradients_alone, model_of, packed_trainer

from trl_packing import PackingError

VARIANTS = {
    "flat": {"packing": False},
    "flat_batch_1": {"packing": False, "per_device_eval_batch_size": 1},
    "packed": {"packing": True},
    "packed_small_rows": {"packing": True, "token_budget": 256},
    "packed_eval_only": {"packing": False, "eval_packing": True},
    "padded": {"packing": True, "eval_packing": False, "per_device_eval_batch_size": 5},
    "padded_batch_1": {"packing": True, "eval_packing": False, "per_device_eval_batch_size": 1},
    "aligned": {"packing": True, "pad_to_multiple_of": 64},
    "fixed": {"packing": True, "row_shape": "fixed", "max_segments": 12, "token_budget": 512},
    "aligned_fixed": {
        **{"packing": True, "row_shape": "fixed", "max_segments": 12},
        **{"token_budget": 500, "pad_to_multiple_of": 64},
    },
    "split": {"packing": True, "overlong": "split", "max_length": 200},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Weights that predict some tokens right, so that an accuracy can be wrong."""
    folder = tmp_path_factory.mktemp("trained")
    trainer = packed_trainer(folder, conversations(40), packing=True, max_steps=25, learning_rate=1e-2)
    trainer.train()
    return trainer.model.state_dict()


def trained_model(trained, attn_implementation="varlen"):
    model = model_of(attn_implementation)
    model.load_state_dict(trained)
    return model


@pytest.fixture(scope="module")
def reference(trained):
    """Loss of every sample alone through the plain model."""
    data = conversations(17, seed=5)
    trainer = packed_trainer("unused", data, model=model_of("sdpa"))
    model = trained_model(trained, "eager").eval()
    entries = [gradients_alone(model, [sample])[0] for sample in trainer.train_dataset]
    counts = [len(sample["input_ids"]) - 1 for sample in trainer.train_dataset]
    return data, entries, counts


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_does_not_depend_on_how_the_set_was_batched(variant, reference, trained, tmp_path):
    data, entries, counts = reference
    path = tmp_path / "losses.jsonl"
    trainer = packed_trainer(
        tmp_path,
        conversations(4),
        model=trained_model(trained),
        eval_data=data,
        eval_per_sample=str(path),
        **VARIANTS[variant],
    )
    metrics = trainer.evaluate()
    expected = float(np.average(entries, weights=counts))
    assert metrics["eval_loss"] == pytest.approx(expected, rel=2e-6)
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["sample"] for entry in written] == list(range(17))
    assert [entry["num_tokens"] for entry in written] == counts
    np.testing.assert_allclose([entry["loss"] for entry in written], entries, rtol=1e-5)


def test_accuracy_is_weighted_by_predicted_tokens(reference, trained, tmp_path):
    data, _, _ = reference
    accuracies = set()
    for variant in ("flat", "flat_batch_1", "packed", "padded"):
        trainer = packed_trainer(
            tmp_path, conversations(4), model=trained_model(trained), eval_data=data, **VARIANTS[variant]
        )
        accuracies.add(round(trainer.evaluate()["eval_mean_token_accuracy"], 9))
    assert len(accuracies) == 1
    assert 0.1 < accuracies.pop() < 1.0


def test_a_split_samples_fragments_are_added_up(tmp_path):
    path = tmp_path / "losses.jsonl"
    data = conversations(6, seed=1)
    trainer = packed_trainer(
        tmp_path, data, eval_data=data, packing=True, overlong="split", max_length=30, eval_per_sample=str(path)
    )
    trainer.evaluate()
    lengths = trainer._train_plan.samples.lengths
    fragments = trainer._train_plan.for_epoch(0).fragments
    written = [json.loads(line) for line in path.read_text().splitlines()]
    for entry in written:
        parts = (fragments[:, 0] == entry["sample"]).sum()
        assert parts == math.ceil(lengths[entry["sample"]] / 30)
        assert entry["num_tokens"] == lengths[entry["sample"]] - parts


@pytest.mark.parametrize(
    ("overlong", "said"),
    [
        ("truncate", "cut 3 samples longer than `max_length`: 116 tokens lost"),
        ("split", "split 3 samples longer than `max_length`: in fragments, no token lost"),
        ("drop", "dropped 3 samples longer than `max_length`: 356 tokens lost"),
    ],
)
def test_overlong_samples_meet_one_fate_however_the_set_is_packed(overlong, said, trained, tmp_path, capsys):
    data, results = Dataset.from_list(conversations(12)), []
    for options in (
        {"eval_packing": True},
        {"eval_packing": False},
        {"eval_packing": False, "per_device_eval_batch_size": 1},
        {"packing": False},
        {"eval_packing": False, "max_length": None, "token_budget": 80},
        {"stream": True},
        {"stream": True, "eval_packing": False},
    ):
        stream = options.pop("stream", False)
        trainer = packed_trainer(
            tmp_path,
            conversations(4),
            model=trained_model(trained),
            eval_data=data.to_iterable_dataset() if stream else data,
            **{"packing": True, "overlong": overlong, "max_length": 80, "token_budget": 160, **options},
        )
        before = capsys.readouterr().out
        results.append(trainer.evaluate()["eval_loss"])
        assert stream or f"Evaluation set: {said}." in before
        # Once, and not at every evaluation.
        assert "Evaluation set" not in capsys.readouterr().out
    assert results == pytest.approx([results[0]] * len(results), rel=2e-6)


@pytest.mark.parametrize("eval_packing", [True, False, None])
def test_an_overlong_sample_of_an_evaluation_set_stops_before_work_under_error(eval_packing, tmp_path):
    with pytest.raises(
        PackingError, match=r"Evaluation set `long`: No sample may be longer than 80 .* sample 0 has 101"
    ):
        packed_trainer(
            tmp_path,
            [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
            eval_data={"long": Dataset.from_list(conversations(12))},
            overlong="error",
            max_length=80,
            eval_packing=eval_packing,
        )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_per_sample_losses_of_a_stream_are_those_of_the_data(num_workers, tmp_path):
    path = tmp_path / "losses.jsonl"
    data = Dataset.from_list(conversations(6, seed=1))
    written = []
    for eval_data in (data, data.to_iterable_dataset(num_shards=3)):
        trainer = packed_trainer(
            tmp_path,
            conversations(4),
            eval_data=eval_data,
            packing=True,
            eval_per_sample=str(path),
            dataloader_num_workers=num_workers,
        )
        trainer.evaluate()
        written.append([json.loads(line) for line in path.read_text().splitlines()])
    assert [entry["sample"] for entry in written[1]] == list(range(6))
    assert [entry["num_tokens"] for entry in written[1]] == [entry["num_tokens"] for entry in written[0]]
    losses = [[entry["loss"] for entry in entries] for entries in written]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize("eval_packing", [True, False])
def test_per_sample_losses_of_data_that_came_packed_hold_all_its_segments(eval_packing, trained, tmp_path):
    path = tmp_path / "losses.jsonl"
    ids = [list(range(5, 15)), list(range(20, 35)), list(range(40, 46))]
    rows = [{"input_ids": row, "seq_lengths": sizes} for row, sizes in zip(ids, ([4, 6], [15], [3, 3]), strict=True)]
    parts = [ids[0][:4], ids[0][4:], ids[1], ids[2][:3], ids[2][3:]]
    model = trained_model(trained, "eager").eval()
    alone = [gradients_alone(model, [{"input_ids": part, "labels": part}])[0] for part in parts]
    trainer = packed_trainer(
        tmp_path,
        conversations(4),
        model=trained_model(trained),
        eval_data=Dataset.from_list(rows),
        packing=True,
        eval_packing=eval_packing,
        eval_per_sample=str(path),
    )
    trainer.evaluate()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["num_tokens"] for entry in written] == [8, 14, 4]
    expected = [np.average(alone[:2], weights=[3, 5]), alone[2], np.average(alone[3:])]
    np.testing.assert_allclose([entry["loss"] for entry in written], expected, rtol=1e-5)


def test_compute_metrics_sees_every_predicted_token_once(reference, trained, tmp_path):
    data, _, counts = reference
    seen = {}

    def compute_metrics(prediction):
        labels = prediction.label_ids[:, 1:]
        hits = prediction.predictions[:, :-1].argmax(-1) == labels
        seen["targets"] = int((labels != -100).sum())
        return {"accuracy": float(hits[labels != -100].mean())}

    trainer = packed_trainer(
        tmp_path,
        conversations(4),
        model=trained_model(trained),
        eval_data=data,
        packing=True,
        token_budget=300,
        compute_metrics=compute_metrics,
    )
    metrics = trainer.evaluate()
    assert seen["targets"] == sum(counts)
    assert metrics["eval_accuracy"] == pytest.approx(metrics["eval_mean_token_accuracy"], abs=1e-6)


def test_several_sets_and_a_raw_set_are_evaluated(tmp_path):
    sets = {"a": Dataset.from_list(conversations(5)), "b": Dataset.from_list(conversations(7, seed=2))}
    path = tmp_path / "losses.jsonl"
    trainer = packed_trainer(tmp_path, conversations(4), eval_data=sets, packing=True, eval_per_sample=str(path))
    metrics = trainer.evaluate()
    assert {"eval_a_loss", "eval_b_loss"} <= set(metrics)
    assert len((tmp_path / "losses-b.jsonl").read_text().splitlines()) == 7
    raw = trainer.evaluate(Dataset.from_list(conversations(7, seed=2)))
    assert raw["eval_loss"] == pytest.approx(metrics["eval_b_loss"], rel=1e-6)


def test_evaluation_leaves_training_as_it_was(tmp_path):
    from training import losses

    curves = []
    for eval_strategy in ("no", "steps"):
        trainer = packed_trainer(
            tmp_path,
            conversations(),
            eval_data=conversations(5),
            packing=True,
            max_steps=4,
            eval_strategy=eval_strategy,
            eval_steps=2,
            token_budget=300,
            max_length=256,
        )
        trainer.train()
        curves.append(losses(trainer))
    assert curves[0] == curves[1]
    assert torch.isfinite(torch.tensor(curves[0])).all()
