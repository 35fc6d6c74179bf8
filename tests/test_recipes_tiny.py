"""
Every recipe trains as it stands, on a tiny model of its architecture: packed, its adapters, isolation proven.

Only what the size of the machine asks for is replaced: the model's weights, the data, lengths and the number of steps.
Four-bit weights are in `test_qlora.py`.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from launching import TESTS, run
from peft import PeftModel
from tiny_models import tiny_config, tiny_model
from training import VOCAB_SIZE, conversations
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from trl_packing import PackingError, check_lora_targets
from trl_packing.preflight import check_model
from trl_packing.proof import AdapterProof
from trl_packing.quickstart.tiny import byte_tokenizer
from trl_packing.recipe import build_sft, parse_sft
from trl_packing.recipe.config import build_lora

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
# Model type of each recipe.
TYPES = {
    "llama_1b": "llama",
    "llama": "llama",
    "llama_70b": "llama",
    "llama_70b_qlora": "llama",
    "qwen3next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "bamba": "bamba",
    "granite_4_hybrid": "granitemoehybrid",
    "nemotron_h": "nemotron_h",
    "falcon_h1": "falcon_h1",
    "lfm2": "lfm2",
}
# Layer classes that `auto` has to reach on the tiny model: every kind of mixer, and the MLP or the shared expert.
KINDS = {
    "llama": {"LlamaAttention", "LlamaMLP"},
    "qwen3_next": {"Qwen3NextAttention", "Qwen3NextGatedDeltaNet"},
    "qwen3_5": {"Qwen3_5Attention", "Qwen3_5GatedDeltaNet", "Qwen3_5MLP"},
    "qwen3_5_moe": {"Qwen3_5MoeAttention", "Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeMLP"},
    "bamba": {"BambaAttention", "BambaMixer", "BambaMLP"},
    "granitemoehybrid": {"GraniteMoeHybridAttention", "GraniteMoeHybridMambaLayer", "GraniteMoeHybridMLP"},
    "nemotron_h": {"NemotronHAttention", "NemotronHMamba2Mixer", "NemotronHMLP"},
    "falcon_h1": {"FalconH1Attention", "FalconH1Mixer", "FalconH1MLP"},
    "lfm2": {"Lfm2Attention", "Lfm2ShortConv", "Lfm2MLP"},
}


def recipe(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return loaded


def build(model_type: str) -> Any:
    """The class that the checkpoints on the hub have: for Qwen3.5 the one with a vision tower."""
    if not model_type.startswith("qwen3_5"):
        return tiny_model(model_type, vocab_size=VOCAB_SIZE)
    text = tiny_config(f"{model_type}_text", vocab_size=VOCAB_SIZE).to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config_class = transformers.CONFIG_MAPPING[model_type]
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config_class(text_config=text, vision_config=vision))


def words_for(name: str, folder: Path, precision: str, steps: int = 2) -> list[str]:
    """Save the tiny checkpoint and data in a folder, and give the recipe's command line."""
    settings = recipe(name)
    build(TYPES[name]).save_pretrained(folder / "model")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [settings["eos_token"]]})
    tokenizer.save_pretrained(folder / "model")
    samples: list[Any] = conversations(16)
    if settings["dataset_name"] == "trl-lib/tldr":
        samples = [{"prompt": s["messages"][0]["content"], "completion": s["messages"][1]["content"]} for s in samples]
    data = folder / "data.jsonl"
    data.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    changes = {
        "model_name_or_path": folder / "model",
        "dataset_name": data,
        "output_dir": folder / "out",
        "load_in_4bit": "false",
        "max_length": 128,
        "token_budget": 256,
        "gradient_accumulation_steps": 1,
        "max_steps": steps,
        "logging_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": "true",
        "use_cpu": "true",
        **({"dtype": "float32", "bf16": "false"} if precision == "float32" else {}),
    }
    config = ["--config", str(CONFIGS / f"{name}.yaml")]
    return [*config, *(word for key, value in changes.items() for word in (f"--{key}", str(value)))]


def trained(name: str, folder: Path, precision: str) -> Any:
    *settings, _ = parse_sft(words_for(name, folder, precision))
    trainer = build_sft(*settings)
    trainer.train()
    return trainer


def adapters_of(name: str, *targets: str) -> Any:
    """The recipe's adapters, with other targets if some are given."""
    wanted = targets[0] if targets == ("all-linear",) else list(targets)
    changes = ["--lora_config", json.dumps({"target_modules": wanted})] if targets else []
    words = ["--config", str(CONFIGS / f"{name}.yaml"), "--use_cpu", "true", "--bf16", "false", *changes]
    script, _, model_args, _, _ = parse_sft(words)
    return build_lora(model_args, script.lora_config)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TYPES)
def test_recipe_trains_two_steps_and_every_adapter_gets_a_gradient(name: str, precision: str, tmp_path: Path) -> None:
    trainer = trained(name, tmp_path, precision)
    assert trainer.args.packing
    assert trainer.args.gradient_checkpointing
    assert next(p.dtype for p in trainer.model.parameters() if not p.requires_grad) == getattr(torch, precision)
    assert trainer.isolation_report.ok
    assert trainer.state.global_step == 2
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert isinstance(trainer.model, PeftModel)
    proof = next(c for c in trainer.callback_handler.callbacks if isinstance(c, AdapterProof))
    assert proof.gradients is not None
    assert proof.gradients.dead == ()
    assert all(row.num_trained == row.num_adapters for row in proof.gradients.rows)
    assert {row.kind.split(".")[0] for row in proof.gradients.rows} >= KINDS[TYPES[name]]
    names = [name for name, _ in trainer.model.named_modules() if name.endswith("lora_B.default")]
    assert not [name for name in names if "visual" in name or ".experts." in name or ".gate." in name]


@pytest.mark.slow
def test_recipe_script_trains_on_two_processes(tmp_path: Path) -> None:
    words = words_for("qwen3next", tmp_path, "float32")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    result = run([sys.executable, *launcher, ROOT / "recipes" / "sft.py", *words], cwd=tmp_path)
    assert "2 ranks" in result.stdout
    assert result.stdout.count("Isolation: proven") == 1
    table = [line for line in result.stdout.splitlines() if re.search(r"\.\w+_proj|\.in_proj", line)]
    assert table
    assert all(line.split()[1] == line.split()[2] for line in table), table
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_every_recipe_trains_on_two_processes(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in TYPES}
    for folder in folders.values():
        folder.mkdir()
    runs = {str(folder): words_for(name, folder, "float32") for name, folder in folders.items()}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    run([sys.executable, *launcher, TESTS / "recipes_run.py", json.dumps(runs)], cwd=tmp_path, timeout=400)
    for name, folder in folders.items():
        first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
        assert (first["world_size"], first["wrapped"]) == (2, "DistributedDataParallel"), name
        assert first["steps"] == 2, name
        assert first["isolated"], name
        assert first["adapters"] == first["trained"] > 0, name
        assert first == second, name
        assert (folder / "out" / "adapter_model.safetensors").is_file(), name


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("llama", ["lm_head"], "lm_head"),
        ("qwen3next", ["all-linear"], "mlp.gate"),
        ("qwen3next", ["shared_expert.gate_proj"], "gate_proj"),
        ("qwen3next", ["gate"], "mlp.gate"),
        ("qwen3next", ["lm_head"], "lm_head"),
        ("qwen3_5_moe", ["all-linear"], "shared_expert_gate"),
        ("bamba", ["conv1d"], "conv1d"),
        ("granite_4_hybrid", ["conv1d"], "conv1d"),
        ("nemotron_h", ["in_proj", "out_proj"], "out_proj"),
        ("falcon_h1", ["conv1d"], "conv1d"),
        ("lfm2", ["conv.conv"], "conv"),
    ],
)
def test_bad_target_in_a_recipe_is_refused(name: str, targets: list[str], message: str) -> None:
    with pytest.raises(PackingError, match=re.escape(message)):
        check_model(build(TYPES[name]), adapters_of(name, *targets))


@pytest.mark.parametrize(
    ("name", "target", "kind"),
    [
        ("qwen3next", "shared_expert_gate", "Qwen3NextSparseMoeBlock.shared_expert_gate"),
        ("qwen3next", "in_proj_ba", "Qwen3NextGatedDeltaNet.in_proj_ba"),
        ("bamba", "out_proj", "BambaMixer.out_proj"),
    ],
)
def test_target_asked_for_in_a_recipe_is_applied_as_written(name: str, target: str, kind: str) -> None:
    report = check_lora_targets(build(TYPES[name]), adapters_of(name, target))
    assert list(report.adapters) == [kind]


def test_auto_on_qwen3_next_of_full_size_trains_what_the_recipe_says() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers.Qwen3NextConfig())
    lora = check_model(model, adapters_of("qwen3next"))
    report = check_lora_targets(model, lora)
    assert f"{report.num_trainable / 1e6:.1f} M" == "17.1 M"
    assert "17.1 M parameters" in (CONFIGS / "qwen3next.yaml").read_text()


def test_every_recipe_is_here() -> None:
    quickstarts = {path.stem for path in CONFIGS.glob("quickstart*.yaml")}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(TYPES) | quickstarts
