"""Every config of the repository parses, holds only keys that exist, and names LoRA targets that are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from peft import get_peft_model
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from trl_packing.preflight import check_model
from trl_packing.quickstart import TINY_NAMES
from trl_packing.recipe import parse_sft
from trl_packing.recipe.config import build_lora

CONFIGS = Path(__file__).parents[1] / "configs"
LAUNCH = sorted((CONFIGS / "accelerate").glob("*.yaml"))
RECIPES = sorted(path for path in CONFIGS.rglob("*.yaml") if path not in LAUNCH)
# The architecture of each recipe. Whole runs are in test_recipes_tiny.py.
ARCHITECTURES = {
    "llama_1b": "llama",
    "llama": "llama",
    "llama_70b": "llama",
    "llama_70b_qlora": "llama",
    "qwen3next": "qwen3_next",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "bamba": "bamba",
    "granite_4_hybrid": "granitemoehybrid",
    "nemotron_h": "nemotron_h",
    "falcon_h1": "falcon_h1",
    "lfm2": "lfm2",
    "quickstart_tiny": "llama",
    "quickstart": "llama",
    "quickstart_qwen3next": "qwen3_next",
    "quickstart_bamba": "bamba",
}


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(CONFIGS)) for path in paths]


def parse(path: Path) -> Any:
    # bf16 needs a GPU already when the settings are built.
    return parse_sft(["--config", str(path), "--use_cpu", "true", "--bf16", "false"])


@pytest.mark.parametrize("path", RECIPES, ids=names(RECIPES))
def test_recipe_parses_with_known_keys_only(path: Path) -> None:
    script, training, model, _, launch = parse(path)
    assert model.model_name_or_path == yaml.safe_load(path.read_text())["model_name_or_path"]
    assert script.dataset_name
    assert training.packing
    assert training.resolved_token_budget == training.token_budget
    # A recipe says what is trained, and `configs/accelerate` how it is spread.
    assert not launch.options


@pytest.mark.parametrize("path", [*RECIPES, *LAUNCH], ids=names([*RECIPES, *LAUNCH]))
def test_header_tells_purpose_command_hardware_and_override(path: Path) -> None:
    header = path.read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in header)
    for word in ("Purpose:", "Command:", "Hardware:", "Override:"):
        assert sum(line.startswith(f"# {word}") for line in header) == 1, word
    assert any(path.name in line for line in header)


def test_every_recipe_has_an_architecture_here() -> None:
    assert {path.stem for path in RECIPES} == set(ARCHITECTURES)


@pytest.mark.parametrize("path", RECIPES, ids=names(RECIPES))
def test_output_folders_differ(path: Path) -> None:
    assert parse(path)[1].output_dir == f"runs/{path.stem}"


@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem.startswith("quickstart")], ids=lambda path: path.stem)
def test_quickstart_needs_no_hub_and_no_gpu(path: Path) -> None:
    script, training, model, _, _ = parse_sft(["--config", str(path)])
    assert script.dataset_name == "quickstart/conversations"
    assert model.model_name_or_path in {*TINY_NAMES, "quickstart/smollm2-135m"}
    assert training.use_cpu
    assert model.dtype == "float32"
    assert training.report_to == []


@pytest.mark.parametrize("path", LAUNCH, ids=names(LAUNCH))
def test_accelerate_reads_its_configs(path: Path) -> None:
    # Refuses unknown keys.
    loaded = load_config_from_file(str(path))
    known = vars(launch_command_parser().parse_args(["script.py"]))
    for section, prefix in ((loaded.fsdp_config, "fsdp"), (loaded.deepspeed_config, "")):
        assert [key for key in section or {} if key not in known] == [], prefix
    assert {"MULTI_GPU", "FSDP", "DEEPSPEED"} >= {str(loaded.distributed_type).removeprefix("DistributedType.")}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_adapters_spare_what_never_trains(name: str) -> None:
    script, _, model_args, _, _ = parse(CONFIGS / f"{name}.yaml")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(ARCHITECTURES[name]))
    lora = build_lora(model_args, script.lora_config)
    wanted = lora.target_modules
    lora = check_model(model, lora)
    hit = [module for module, _ in get_peft_model(model, lora).named_modules() if module.endswith("lora_B.default")]
    assert hit
    if wanted not in ("auto", "all-linear"):
        assert [target for target in wanted if not any(f".{target}." in module for module in hit)] == []
    never = [r"conv1d", r"conv\.conv", r"\.gate\.", r"shared_expert_gate", r"router", r"\bexperts\b", r"lm_head"]
    assert [module for module in hit if any(re.search(pattern, module) for pattern in never)] == []
