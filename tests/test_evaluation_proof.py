"""An evaluation is proven before its first packed row, in eval mode, with or without training before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from training import VOCAB_SIZE, conversations, losses, model_of, packed_trainer

from trl_packing import LeakError, check_isolation

DATA = conversations(6)


def leaking() -> Any:
    """Sinks of gpt_oss under `eager`, whose mask knows nothing of segments."""
    return tiny_model("gpt_oss", attn_implementation="eager", vocab_size=VOCAB_SIZE)


class MixesInEvalMode(nn.Module):
    """An MLP that adds up the row, but not while training."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.inner(hidden)
        return output if self.training else output + hidden.cumsum(1)


def mixing_in_eval_mode() -> Any:
    model = model_of()
    for layer in model.model.layers:
        layer.mlp = MixesInEvalMode(layer.mlp)
    return model


@pytest.mark.parametrize("call", ["evaluate", "predict"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "flat"])
def test_without_training_a_leaking_model_is_not_evaluated(packing, call, tmp_path):
    trainer = packed_trainer(tmp_path, DATA, model=leaking(), eval_data=DATA, packing=packing)
    arguments = [trainer.eval_dataset] if call == "predict" else []
    for _ in range(2):
        with pytest.raises(LeakError, match="GptOssAttention"):
            getattr(trainer, call)(*arguments)


def test_a_layer_that_mixes_only_in_eval_mode_stops_the_evaluation(tmp_path):
    trainer = packed_trainer(tmp_path, DATA, model=mixing_in_eval_mode(), eval_data=DATA, packing=True, max_steps=1)
    trainer.train()
    assert trainer.isolation_report.ok
    with pytest.raises(LeakError, match=r"layers\.0\.mlp.*MixesInEvalMode"):
        trainer.evaluate()


def test_the_check_runs_in_the_mode_that_it_is_told(varlen):
    model = mixing_in_eval_mode()
    assert check_isolation(model).ok
    report = check_isolation(model, training=False, gradients=False)
    assert not report.ok
    assert report.layers[0].name == "model.layers.0.mlp"
    assert check_isolation(model_of(), training=False).ok


@pytest.mark.parametrize(
    "overrides",
    [
        {"packing": True, "isolation_check": "off"},
        {"packing": True, "eval_packing": False},
        {"packing": False, "per_device_eval_batch_size": 1},
    ],
    ids=["off", "padded", "one_sample_a_row"],
)
def test_an_evaluation_that_cannot_mix_or_is_not_to_be_proven_runs(overrides, tmp_path):
    trainer = packed_trainer(tmp_path, DATA, model=leaking(), eval_data=DATA, **overrides)
    trainer.evaluate()
    assert trainer.isolation_report is None


def test_the_proof_runs_once_and_says_so(tmp_path, capsys):
    trainer = packed_trainer(tmp_path, DATA, eval_data=DATA, packing=True, max_steps=2, eval_steps=1)
    trainer.evaluate()
    trainer.evaluate()
    assert capsys.readouterr().out.count("In eval mode.") == 1
    assert trainer.isolation_report.ok
    trainer.train()
    assert trainer.isolation_report.probe("gradient").status == "passed"


def test_the_proof_before_an_evaluation_changes_no_number(tmp_path):
    runs = []
    for check in ("error", "off"):
        trainer = packed_trainer(
            tmp_path,
            conversations(),
            eval_data=DATA,
            lora=True,
            model=model_of(attention_dropout=0.1),
            max_steps=3,
            eval_strategy="steps",
            eval_steps=1,
            isolation_check=check,
        )
        trainer.train()
        evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        runs.append((losses(trainer), evaluations, weights))
    assert len(runs[0][1]) == 3
    assert runs[0][:2] == runs[1][:2]
    assert all(torch.equal(tensor, runs[1][2][name]) for name, tensor in runs[0][2].items())
