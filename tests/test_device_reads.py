"""No device-to-host read in a training micro-step, and the log is what it was."""

import pytest
import torch
from datasets import Dataset
from device_reads import FLASH, DeviceReads, micro_steps, register_flash_stand_in, remove_flash_stand_in, side
from training import conversations, losses, model_of, packed_trainer, settings
from trl import kernels
from trl.trainer import utils as trl_utils

RUN = {
    "gradient_accumulation_steps": 4,
    "per_device_train_batch_size": 2,
    "max_length": 24,
    "max_steps": 2,
    "logging_steps": 100,
}


@pytest.fixture
def like_a_gpu(monkeypatch):
    """TRL's head picks positions on a GPU only; its kernel's own check stays as it is."""
    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: True)


@pytest.fixture
def flash_stand_in():
    register_flash_stand_in()
    yield FLASH
    remove_flash_stand_in()


def dataset(number=40):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 24, (number,), generator=generator).tolist()
    ids = [torch.randint(3, 200, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": [[-100, *sample[1:]] for sample in ids]})


def test_the_counter_sees_every_kind_of_read():
    values = torch.tensor([1.0, 0.0, 2.0], requires_grad=True)
    mask = values.detach() > 0
    with DeviceReads() as reads:
        values[0].item()
        bool(mask.any())
        int(values[2])
        mask.nonzero()
        mask.tolist()
        values.detach().masked_select(mask)
        assert len(reads.places) == 6
        # A mask as an index is read again in the backward pass.
        values[mask].sum().backward()
    assert len(reads.places) == 8
    assert all("test_device_reads.py:" in place for place in reads.places)
    with DeviceReads() as reads:
        (values * 2).sum().backward()
        values.detach().index_select(0, torch.tensor([0]))
    assert reads.places == []


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_next", "bamba"])
def test_ours_reads_nothing_in_a_micro_step(model_type, tmp_path, like_a_gpu):
    model = model_of(model_type=model_type, num_hidden_layers=3 if model_type in ("qwen3_next", "bamba") else 2)
    steps = micro_steps(side("ours", model, dataset(), settings(tmp_path, **RUN)))
    assert len(steps) >= 2
    assert [dict(step) for step in steps] == [{}] * len(steps)


@pytest.mark.parametrize("overrides", [{"row_shape": "fixed", "max_segments": 16}, {"loss_type": "dft"}], ids=str)
def test_no_setting_brings_a_read_back(overrides, tmp_path, like_a_gpu):
    steps = micro_steps(side("ours", model_of(), dataset(), settings(tmp_path, **RUN, **overrides)))
    assert [dict(step) for step in steps] == [{}] * len(steps)


def test_the_others_read_in_every_micro_step(tmp_path, like_a_gpu, flash_stand_in):
    """What the counter is held against. A number that moves means that upstream has changed."""
    counts = {}
    for name in ("transformers", "TRL"):
        for num_layers in (1, 2):
            model = model_of(flash_stand_in if name == "transformers" else "sdpa", num_hidden_layers=num_layers)
            steps = micro_steps(side(name, model, dataset(), settings(tmp_path, **RUN)))
            assert len({step.total() for step in steps}) == 1, steps
            counts[name, num_layers] = steps[0].total()
    per_layer = counts["transformers", 2] - counts["transformers", 1]
    assert per_layer >= 4
    assert counts["TRL", 1] == counts["TRL", 2] == 12


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_logged_as_the_trainers_filter_does(bad, tmp_path):
    runs = []
    for filtered_by_the_trainer in (True, False):
        trainer = packed_trainer(
            tmp_path, conversations(), max_steps=4, logging_steps=2, gradient_accumulation_steps=2, learning_rate=0.0
        )
        assert not trainer.args.logging_nan_inf_filter
        if filtered_by_the_trainer:
            trainer.args.logging_nan_inf_filter, trainer._replaces_nan_losses = True, False
        calls, compute_loss = [], trainer.compute_loss

        def spoiled(*args, calls=calls, compute_loss=compute_loss, **kwargs):
            calls.append(None)
            loss = compute_loss(*args, **kwargs)
            return loss * bad if len(calls) in (4, 5) else loss

        trainer.compute_loss = spoiled
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == runs[1]
    assert all(loss == loss and loss != float("inf") for loss in runs[1])


def test_without_the_filter_a_nan_reaches_the_log(tmp_path):
    trainer = packed_trainer(tmp_path, conversations(), max_steps=1, logging_nan_inf_filter=False)
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: compute_loss(*args, **kwargs) * float("nan")
    trainer.train()
    assert losses(trainer)[0] != losses(trainer)[0]


def test_the_head_scores_predicted_positions_alone_with_the_same_result(tmp_path):
    """Positions from the host against every position, as TRL does it off a GPU."""
    results = []
    for positions in (True, False):
        trainer = packed_trainer(tmp_path, dataset(8), packing=True, max_length=100)
        batch = next(iter(trainer.get_train_dataloader()))
        info = batch["row_info"]
        assert info.target_positions.size == info.num_targets
        if not positions:
            object.__setattr__(info, "target_positions", None)
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        gradients = [param.grad for param in trainer.model.parameters()]
        results.append((loss.detach(), trainer._sums["train"].sums["entropy"], gradients))
        assert trl_utils._ChunkedLogProbFunction is kernels.ChunkedLogProbFunction
    torch.testing.assert_close(*(result[:2] for result in results), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*(result[2] for result in results), rtol=1e-5, atol=1e-7)
