"""Every config of the repository parses, holds only keys that exist, and names LoRA targets that are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from trl_packing.quickstart import TINY_NAMES
from trl_packing.quickstart.tiny import tiny_config
from trl_packing.recipe import parse_sft
from trl_packing.recipe.config import build_lora

CONFIGS = Path(__file__).parents[1] / "configs"
LAUNCH = sorted((CONFIGS / "accelerate").glob("*.yaml"))
RECIPES = sorted(path for path in CONFIGS.rglob("*.yaml") if path not in LAUNCH)
ARCHITECTURES = {"llama": "llama", "qwen3next": "qwen3_next", "bamba": "bamba"}


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(CONFIGS)) for path in paths]


def parse(path: Path) -> Any:
    # bf16 needs a GPU already when the settings are built.
    return parse_sft(["--config", str(path), "--use_cpu", "true", "--bf16", "false"])


def targets(path: Path) -> list[str]:
    script, _, model, _, _ = parse(path)
    return list(build_lora(model, script.lora_config).target_modules)


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


@pytest.mark.parametrize("name", [*ARCHITECTURES, "quickstart_qwen3next", "quickstart_bamba"])
def test_lora_targets_exist_and_spare_what_never_trains(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    architecture = ARCHITECTURES.get(name) or ARCHITECTURES[name.removeprefix("quickstart_")]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(architecture))
    script, _, model_args, _, _ = parse(path)
    wanted = targets(path)
    adapted = get_peft_model(model, build_lora(model_args, script.lora_config))
    hit = [module for module, _ in adapted.named_modules() if module.endswith("lora_B.default")]
    assert [target for target in wanted if not any(f".{target}." in module for module in hit)] == []
    never = [r"mamba\.out_proj", r"conv1d", r"\.gate\.", r"experts", r"lm_head", r"shared_expert"]
    assert [module for module in hit if any(re.search(pattern, module) for pattern in never)] == []


def test_qwen3_5_pattern_reaches_the_language_model_only() -> None:
    text = tiny_config("qwen3_5").to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    script, _, model_args, _, _ = parse(CONFIGS / "qwen3_5.yaml")
    lora = build_lora(model_args, script.lora_config)
    assert isinstance(lora, LoraConfig)
    adapted = get_peft_model(model, lora)
    hit = [name for name, _ in adapted.named_modules() if name.endswith("lora_B.default")]
    assert all("language_model" in name for name in hit)
    for target in re.findall(r"[a-z_\\.]+(?=[|)])", str(lora.target_modules)):
        assert any(f"{target}.".replace("\\", "") in name for name in hit), target
