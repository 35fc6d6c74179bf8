"""The memory estimate, against what the CPU allocator hands out, against the recipes' table, and in its own terms."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_packing import PackingError, safe_lora_targets
from trl_packing.memory import estimate_memory, measured_peak
from trl_packing.quickstart.tiny import tiny_config

ALL = {"r": 8, "target_modules": "auto"}
GIB = 2**30
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("memory")


def estimate(architecture: str = "llama", lora: bool = True, **options: Any) -> Any:
    peft_config = LoraConfig(**ALL) if lora else None
    return estimate_memory(tiny_config(architecture), **{"row_tokens": 512, "peft_config": peft_config, **options})


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "qwen3_next", "bamba"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True, "checkpointing": True}, {"lora": False, "checkpointing": True}, {"lora": False, "bf16": True}],
    ids=["lora-fp32", "lora-bf16-checkpointing", "all-fp32-checkpointing", "all-bf16"],
)
def test_the_estimate_is_near_the_measured_peak(benchmark: Any, architecture: str, options: dict[str, Any]) -> None:
    measured, estimated = benchmark.measure(benchmark.Case(architecture, **options))
    assert estimated == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": (24,)},
        {"lengths": (512,)},
        {"lengths": (16,) * 16, "sizes": {"num_hidden_layers": 6, "hidden_size": 64}},
        {"small_tile": False, "lengths": (32, 32), "sizes": {"vocab_size": 4_096}},
    ],
    ids=["weights", "one-segment", "deep", "logits"],
)
def test_whatever_takes_most_is_estimated(benchmark: Any, options: dict[str, Any]) -> None:
    measured, estimated = benchmark.measure(benchmark.Case("llama", **options))
    assert estimated == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
def test_shares_of_two_processes_are_measured_too(benchmark: Any) -> None:
    cases = benchmark.rank_cases()
    results = benchmark.measure_on_ranks(cases)
    for case, (measured, estimated) in zip(cases, results, strict=True):
        assert estimated == pytest.approx(measured, rel=0.15), case.name
    by_name = {(case.sharding, case.lora): measured for case, (measured, _) in zip(cases, results, strict=True)}
    # FSDP2 really divided something.
    assert by_name["fsdp2", False] < 0.7 * by_name["ddp", False]


@pytest.mark.parametrize(
    "name",
    [
        "Llama-3.2-1B",
        "Llama-3.1-8B",
        pytest.param("Llama-3.3-70B", marks=pytest.mark.slow),
        "Bamba-9B-v2",
        "Qwen3-Next-80B-A3B",
        "the same + experts",
    ],
)
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning")
def test_the_recipes_table_is_met(benchmark: Any, name: str) -> None:
    for label, paper, estimated in benchmark.recipe_rows(name):
        exact = label in ("base", "trained")
        assert estimated == pytest.approx(paper, rel=0.01 if exact else 0.25), label


def test_factors_of_our_operations_are_those_they_have(benchmark: Any) -> None:
    for name, counted, estimated in benchmark.operations():
        assert estimated == pytest.approx(counted, rel=0.15), name


def test_measuring_counts_what_is_held_at_a_time() -> None:
    def function() -> None:
        first = torch.zeros(1_000)
        del first
        second, third = torch.zeros(2_000), torch.zeros(500)
        del second, third
        torch.zeros(100)

    assert measured_peak(function) == pytest.approx(4 * 2_500, rel=0.01)


def test_nothing_is_loaded_for_an_estimate() -> None:
    config = transformers.LlamaConfig(**LLAMA_8B)
    peft_config = LoraConfig(**ALL)
    before = config.to_dict(), copy.deepcopy(peft_config.to_dict())
    held = measured_peak(lambda: estimate_memory(config, row_tokens=8_192, peft_config=peft_config))
    assert held < 2**24
    assert (config.to_dict(), peft_config.to_dict()) == before


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "qwen3_next", "bamba"])
def test_parameters_are_those_of_the_model_with_its_adapters(architecture: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(architecture), dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(**{**ALL, "target_modules": safe_lora_targets(model)}))
    result = estimate(architecture)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert result.num_trained == sum(weight.numel() for weight in trained)
    assert result.num_parameters == sum(weight.numel() for weight in model.parameters())
    assert result.trained_weights == sum(weight.numel() * weight.element_size() for weight in trained)
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    assert result.weights == sum(weight.numel() * weight.element_size() for weight in frozen)
    assert result.optimizer == 2 * result.trained_weights


def test_fsdp_divides_what_ddp_repeats() -> None:
    alone, ddp = estimate(lora=False), estimate(lora=False, num_ranks=4)
    fsdp = estimate(lora=False, num_ranks=4, sharding="fsdp2")
    for part in ("trained_weights", "optimizer"):
        assert getattr(ddp, part) == getattr(alone, part) == pytest.approx(4 * getattr(fsdp, part), rel=0.01)
    assert (alone.gathered, ddp.gathered) == (0, 0)
    assert fsdp.gathered > 0
    # DDP sends gradients from a buffer of their size.
    assert ddp.gradients == alone.gradients + ddp.trained_weights


def test_activations_grow_with_the_row_and_shrink_with_checkpointing() -> None:
    kept = estimate(gradient_checkpointing=False)
    twice = estimate(gradient_checkpointing=False, row_tokens=1_024)
    assert twice.activations == pytest.approx(2 * kept.activations, rel=0.01)
    assert estimate().activations < 0.6 * kept.activations
    assert twice.weights == kept.weights


def test_the_peak_moves_to_where_most_is_held() -> None:
    two_layers = transformers.LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 2})

    def peak(row_tokens: int, **options: Any) -> Any:
        return estimate_memory(two_layers, row_tokens=row_tokens, **options)

    adapters = LoraConfig(**ALL)
    assert peak(16_384, peft_config=adapters).peak_at == "last layer"
    assert peak(4_096, peft_config=adapters, device="cpu").peak_at == "loss"
    # All gradients of a model trained whole are there when its first layer is reached.
    assert peak(64).peak_at == "first layer"
    first, later = (peak(16_384, peft_config=adapters, gradient_accumulation_steps=steps) for steps in (1, 4))
    assert later.total - first.total == later.gradients == first.trained_weights


def test_quantised_weights_take_half_a_byte_and_a_scale() -> None:
    config = transformers.LlamaConfig(**LLAMA_8B)
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    options: dict[str, Any] = {"row_tokens": 4_096, "peft_config": LoraConfig(**ALL)}
    whole = estimate_memory(config, **options)
    small = estimate_memory(config, quantization_config=quantised, **options)
    unquantised = 2 * 2 * 128_256 * 4_096 + 2 * 65 * 4_096
    linear = whole.weights - unquantised
    assert small.weights == pytest.approx(unquantised + linear / 2 * 0.5166, rel=0.001)
    # TRL converts adapters on a quantised model to bfloat16.
    assert small.trained_weights == whole.trained_weights / 2
    assert 5 * GIB < small.weights < 6 * GIB


def test_quantising_saves_nothing_on_experts() -> None:
    config = transformers.Qwen3NextConfig(num_hidden_layers=4)
    peft_config = LoraConfig(r=8, target_modules=["q_proj", "in_proj_qkvz"])
    quantised = BitsAndBytesConfig(load_in_4bit=True)
    options: dict[str, Any] = {"row_tokens": 4_096, "peft_config": peft_config}
    saved = estimate_memory(config, quantization_config=quantised, **options).weights
    assert saved > 0.95 * estimate_memory(config, **options).weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding": "fsdp"}, "`sharding` must be one of ddp, fsdp2, but it is 'fsdp'"),
        ({"row_tokens": 0}, "`row_tokens` must be at least 1, but it is 0"),
        ({"num_ranks": 0}, "`num_ranks` must be at least 1, but it is 0"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        estimate(**options)


def test_a_model_without_a_list_of_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.Module.modules", lambda module: iter([module]))
    from trl_packing.memory.model import decoder_layers

    with pytest.raises(PackingError, match="no list of so many modules"):
        decoder_layers(transformers.LlamaForCausalLM(tiny_config("llama")), tiny_config("llama"))


@pytest.mark.parametrize("width", [80, 100])
def test_text_and_json_say_the_same(width: int) -> None:
    result = estimate(num_ranks=8, sharding="fsdp2", row_tokens=2**20)
    values = json.loads(json.dumps(result.to_dict()))
    parts = ("weights", "trained_weights", "gradients", "optimizer", "gathered", "activations", "logits")
    assert values["total"] == sum(values[part] for part in parts) == result.total
    text = result.to_text(width)
    assert text.isascii()
    assert max(map(len, text.split("\n"))) <= width
    words = " ".join(text.split())
    assert f"total {result.total / GIB:.2f} GiB largest at the {result.peak_at}" in words
    assert "Memory per GPU (8 with fsdp2)" in words
    assert "of a row of 1,048,576 tokens" in words
