"""
Two processes on gloo, by every way to spread a model: the same losses from the same adapter, and really divided.

ZeRO takes part where DeepSpeed is installed: `DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from backend_run import adapters
from launching import ENVIRONMENT, TESTS, run
from peft import get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from tiny_models import tiny_model
from training import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from trl_packing._compat import is_available
from trl_packing.preflight import check_model

pytestmark = pytest.mark.slow

BACKENDS = ["ddp", "fsdp2", "native", *(["zero2", "zero3"] if is_available("deepspeed") else [])]
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
RUN = {"max_steps": 3, "learning_rate": 1e-2}


def train_by(backend: str, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Train `tests/backend_run.py` and give what each rank saw."""
    num_ranks = 1 if backend == "one" else 2
    folder.mkdir(exist_ok=True)
    environment = {**ENVIRONMENT, **(FSDP2 if backend == "fsdp2" else {}), "DS_ACCELERATOR": "cpu"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks] if num_ranks > 1 else []
    words = json.dumps({"backend": backend, **RUN, **options})
    # DeepSpeed compiles a communication operation the first time.
    run([sys.executable, *launcher, TESTS / "backend_run.py", folder, words], env=environment, timeout=600)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    assert all(rank["world_size"] == num_ranks for rank in ranks)
    return ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3-Next: Gated DeltaNet, attention and experts."""
    folder = tmp_path_factory.mktemp("backends")
    tiny_model("qwen3_next", vocab_size=VOCAB_SIZE).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> dict[str, Any]:
    """One process that does in two micro-steps what two ranks do in one."""
    (result,) = train_by("one", checkpoint / "one", gradient_accumulation_steps=2)
    assert result["sharded"] == 0
    return result


@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_are_those_of_one_process_and_parameters_are_divided(
    backend: str, checkpoint: Path, alone: dict[str, Any]
) -> None:
    ranks = train_by(backend, checkpoint / backend)
    assert len(alone["losses"]) == 3
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank.get("isolated"), rank.get("leak")
    if backend == "ddp":
        assert [rank["wrapped"] for rank in ranks] == ["DistributedDataParallel"] * 2
    if backend in ("ddp", "zero2"):
        assert [rank["sharded"] for rank in ranks] == [0, 0]
    else:
        assert all(rank["sharded"] > 0.9 for rank in ranks)
    if backend.startswith("zero"):
        assert all(rank["wrapped"] == "DeepSpeedEngine" for rank in ranks)
        assert all(0.49 < rank["optimizer"] < 0.6 for rank in ranks)


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend in ("fsdp2", "zero3")])
def test_a_leak_on_one_rank_stops_all_where_each_holds_a_part_of_the_weights(backend: str, checkpoint: Path) -> None:
    innocent, leaking = train_by(backend, checkpoint / f"{backend}-leaking", leaking_rank=1)
    assert "layers.1.self_attn" in leaking["leak"]
    assert "failed on another rank" in innocent["leak"]


@pytest.mark.parametrize(
    ("backend", "options", "note"),
    [
        ("fsdp2", {"torch_compile": True, "torch_compile_backend": "eager"}, "without torch.compile"),
        (
            "zero3",
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "with gradient checkpointing off, because it is reentrant",
        ),
    ],
    ids=["fsdp2-compile", "zero3-reentrant"],
)
def test_the_log_says_where_a_probe_ran_differently(
    backend: str, options: dict[str, Any], note: str, checkpoint: Path
) -> None:
    if backend not in BACKENDS:
        pytest.skip("DeepSpeed is not installed")
    for rank in train_by(backend, checkpoint / f"{backend}-noted", **options | {"max_steps": 1}):
        assert rank.get("isolated"), rank.get("leak")
        assert "gradient 0" in rank["proof"]
        assert f"The gradient probe ran {note}." in rank["proof"]


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend in ("fsdp2", "zero2", "zero3")])
def test_resuming_goes_on_with_the_same_losses(backend: str, checkpoint: Path) -> None:
    folder = checkpoint / f"{backend}-resumed"
    saving = {"save_strategy": "steps", "save_steps": 1, "save_only_model": False}
    whole = train_by(backend, folder, **saving)
    resumed = train_by(backend, folder, resume=str(folder / "checkpoint-1"), **saving)
    # A resumed run keeps the log of the step before. The third loss depends on the optimiser state too.
    assert [rank["losses"] for rank in resumed] == [rank["losses"] for rank in whole]
    assert len(whole[0]["losses"]) == 3


def test_native_fsdp2_saves_whole_adapters_and_says_that_it_cannot_resume(checkpoint: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    with pytest.raises(AssertionError, match="Resuming is not supported for models sharded at load time"):
        train_by("native", checkpoint / "unsaved", save_only_model=False, **saving)
    train_by("native", checkpoint / "saved", save_only_model=True, **saving)
    saved = load_file(checkpoint / "saved" / "checkpoint-3" / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    model = get_peft_model(model, check_model(model, adapters()))
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in get_peft_model_state_dict(model).items()
    }
