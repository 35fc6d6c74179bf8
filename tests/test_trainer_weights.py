"""A checkpoint's weights come back whole, also where `save_pretrained` renames them; else the run is refused."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import conversations, losses, model_of, packed_trainer
from transformers import TrainerCallback

from trl_packing import PackingError
from trl_packing.trainer.weights import load_weights

RUN = {"packing": True, "token_budget": 400, "save_strategy": "steps", "save_steps": 1, "isolation_check": "off"}
FULL = {**RUN, "max_steps": 4, "learning_rate": 1e-2}
# Experts that are stored one by one, old names, everything renamed, and tied weights.
FAMILIES = ("mixtral", "qwen3_moe", "qwen3_5_moe_text", "nemotron_h", "jamba", "granitemoehybrid", "deepseek_v3")


def full_trainer(folder, family="llama", number=24, **overrides):
    model = {"tied": {"tie_word_embeddings": True}, "bfloat16": {}}.get(family)
    torch.manual_seed(0)
    model = model_of(model_type=family) if model is None else model_of(**model)
    if family == "bfloat16":
        # A router's or a norm's own type, which may be wider than the first parameter's.
        model.to(torch.bfloat16).model.norm.float()
    return packed_trainer(folder, conversations(number), model=model, **{**FULL, **overrides})


def shard(checkpoint: Path, model):
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="100KB")
    assert (checkpoint / "model.safetensors.index.json").is_file()


class States(TrainerCallback):
    """The model's weights at every step."""

    def __init__(self):
        self.steps = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps[state.global_step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model, weights):
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, weights[name])] == []


@pytest.mark.parametrize("family", [*FAMILIES, "tied"])
def test_a_resumed_full_fine_tune_goes_on_bit_for_bit(family, tmp_path):
    whole = full_trainer(tmp_path, family)
    whole.train()
    resumed = full_trainer(tmp_path / "resumed", family, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    assert_same(resumed.model, whole.model.state_dict())


@pytest.mark.parametrize("family", ["mixtral", "nemotron_h", "tied"])
def test_the_best_model_is_the_one_that_was_evaluated(family, tmp_path):
    # The worst loss counts as the best, so that it is not the last.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = full_trainer(
        tmp_path, family, eval_data=conversations(6, seed=5), eval_strategy="steps", eval_steps=1, **best
    )
    trainer.add_callback(states := States())
    trainer.train()
    assert trainer.state.best_global_step < 4
    assert_same(trainer.model, states.steps[trainer.state.best_global_step])
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


@pytest.mark.parametrize("family", ["mixtral", "bfloat16"])
def test_shards_and_mixed_types_come_back_exactly(family, tmp_path):
    trainer = full_trainer(tmp_path, family, max_steps=1)
    trainer.train()
    shard(tmp_path / "checkpoint-1", trainer.model)
    resumed = full_trainer(tmp_path / "resumed", family)
    resumed._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert_same(resumed.model, trainer.model.state_dict())
    assert {param.dtype for param in resumed.model.parameters()} == {p.dtype for p in trainer.model.parameters()}


def test_parameters_stay_the_same_objects(tmp_path):
    """An optimiser may already hold them."""
    full_trainer(tmp_path, max_steps=1).train()
    resumed = full_trainer(tmp_path / "resumed")
    before = [id(param) for param in resumed.model.parameters()]
    resumed._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert [id(param) for param in resumed.model.parameters()] == before


def test_divided_weights_take_their_part(tmp_path):
    """As `load_best_model_at_end` with transformers' own FSDP2, which divides a model while it is built."""
    stored = model_of(model_type="mixtral")
    stored.save_pretrained(tmp_path / "model")
    dist.init_process_group("gloo", init_method=(tmp_path / "group").as_uri(), rank=0, world_size=1)
    try:
        divided = fully_shard(model_of(model_type="mixtral"), mesh=init_device_mesh("cpu", (1,)))
        for param in divided.parameters():
            torch.nn.init.zeros_(param)
        load_weights(divided, tmp_path / "model")
        assert_same(stored, {name: tensor.full_tensor() for name, tensor in divided.state_dict().items()})
    finally:
        dist.destroy_process_group()


def without(file: Path, *names: str) -> None:
    tensors = load_file(file)
    for name in names:
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "stored", "named"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.mlp.gate.weight"),
    ],
)
def test_a_checkpoint_without_one_of_the_parameters_is_refused(family, stored, named, tmp_path):
    full_trainer(tmp_path, family, max_steps=1).train()
    without(tmp_path / "checkpoint-1" / "model.safetensors", stored)
    resumed = full_trainer(tmp_path / "resumed", family)
    with pytest.raises(PackingError, match=f"no tensor of the right shape for 1 of this model's: `{named}`"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    resumed.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(PackingError, match=named):
        resumed._load_best_model()


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    full_trainer(tmp_path, max_steps=1).train()
    wider = packed_trainer(tmp_path / "wider", conversations(), model=model_of(intermediate_size=96), **FULL)
    with pytest.raises(PackingError, match=r"right shape for 6 of this model's: .*mlp.gate_proj.weight"):
        wider.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def lora_trainer(folder, targets=True, **overrides):
    torch.manual_seed(0)
    return packed_trainer(folder, conversations(), lora=targets, **{**RUN, "max_steps": 2, **overrides})


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    trainer = lora_trainer(folder)
    trainer.train()
    return folder / "checkpoint-1", trainer


def test_a_resumed_adapter_goes_on_bit_for_bit(adapter, tmp_path):
    checkpoint, whole = adapter
    resumed = lora_trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed) == losses(whole)


def test_an_adapter_with_more_targets_than_the_checkpoint_is_refused(adapter, tmp_path):
    checkpoint, _ = adapter
    resumed = lora_trainer(tmp_path, ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"])
    with pytest.raises(PackingError, match=r"no tensor .* 4 of this model's: .*up_proj.lora_A.weight`"):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    resumed.state.best_model_checkpoint = str(checkpoint)
    with pytest.raises(PackingError, match="up_proj"):
        resumed._load_best_model()


def test_a_base_weight_that_no_adapter_holds_is_refused(adapter, tmp_path):
    checkpoint, _ = adapter
    resumed = lora_trainer(tmp_path)
    resumed.model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(PackingError, match=r"1 of this model's: `base_model.model.model.norm.weight`"):
        resumed.train(resume_from_checkpoint=str(checkpoint))


def test_a_full_checkpoint_gives_no_adapter(tmp_path):
    full_trainer(tmp_path, max_steps=1).train()
    with pytest.raises(PackingError, match="checkpoint-1 holds no adapter"):
        lora_trainer(tmp_path / "lora").train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
