"""Adapters outlive the run: saved, reloaded by plain PEFT and merged, a packed row's logits stay what training saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_recipes_tiny import build

from trl_packing import Boundaries, check_lora_targets, register_ops, safe_lora_targets

pytestmark = pytest.mark.slow

FAMILIES = (
    "llama",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "bamba",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1",
    "lfm2",
)
WITH_EXPERTS = {
    "qwen3_next": ["experts.gate_up_proj", "experts.down_proj"],
    "qwen3_5_moe": ["experts.gate_up_proj", "experts.down_proj"],
    "granitemoehybrid": ["experts.gate_up_proj", "experts.down_proj"],
    "nemotron_h": ["experts.up_proj", "experts.down_proj"],
}


def adapted(model_type: str, experts: list[str] | None) -> PeftModel:
    model = build(model_type)
    register_ops(model)
    config = LoraConfig(
        r=2, lora_alpha=8, target_modules=safe_lora_targets(model), target_parameters=experts, task_type="CAUSAL_LM"
    )
    assert check_lora_targets(model, config).num_trainable
    peft_model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    for parameter in (p for p in peft_model.parameters() if p.requires_grad):
        parameter.data.normal_(std=0.2, generator=generator)
    return peft_model.eval()


def logits(model: Any) -> torch.Tensor:
    row = Boundaries.from_lengths([7, 1, 9])
    input_ids = torch.arange(3, 3 + row.total_tokens)[None]
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=input_ids, use_cache=False, **row.to_model_kwargs()).logits
    return result


@pytest.mark.parametrize(
    ("model_type", "experts"),
    [*((name, None) for name in FAMILIES), *WITH_EXPERTS.items()],
    ids=[*FAMILIES, *(f"{name}-experts" for name in WITH_EXPERTS)],
)
def test_saved_reloaded_and_merged_adapters_give_the_same_logits(
    model_type: str, experts: list[str] | None, tmp_path: Path
) -> None:
    model = adapted(model_type, experts)
    trained = logits(model)
    with model.disable_adapter():
        assert float((logits(model) - trained).abs().max()) > 1e-2
    model.save_pretrained(tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.") and ".lora_" in name for name in names)
    reloaded = PeftModel.from_pretrained(build(model_type), tmp_path / "adapter").eval()
    assert torch.equal(logits(reloaded), trained)
    merged = reloaded.merge_and_unload()
    # Rounding: 1.1e-5 seen.
    assert float((logits(merged) - trained).abs().max()) <= 5e-5 * float(trained.abs().max())
    # A server finds every weight by the name it has in the base model's checkpoint.
    assert merged.state_dict().keys() == build(model_type).state_dict().keys()
    merged.save_pretrained(tmp_path / "merged")
    whole = type(merged).from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(logits(whole), logits(merged))
