"""4-bit weights: packed training that is exact and divided, or a refusal where they save nothing or are misread."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from test_backends import train_by
from test_lora import fused_mamba
from test_recipes_tiny import words_for
from tiny_models import tiny_config, tiny_model
from torch import nn
from training import VOCAB_SIZE, as_dataset, conversations, settings
from transformers import AutoModelForCausalLM
from transformers.models.bamba import modeling_bamba

from trl_packing import (
    Boundaries,
    PackedSFTConfig,
    PackedSFTTrainer,
    PackingError,
    check_lora_targets,
    register_ops,
)
from trl_packing._compat import is_available
from trl_packing.lora.check import without_weights
from trl_packing.lora.quantized import (
    check_quantized_layers,
    refuse_idle_quantization,
    refuse_undivided_weights,
)
from trl_packing.proof import AdapterProof
from trl_packing.quickstart.tiny import byte_tokenizer
from trl_packing.recipe import build_sft, parse_sft
from trl_packing.recipe.plan import estimate_sft

needs_bitsandbytes = pytest.mark.skipif(not is_available("bitsandbytes"), reason="bitsandbytes is not installed")
# The storage that FSDP2 can divide.
STORED = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"}


class PackedLinear(nn.Linear):
    """Like a 4-bit layer of bitsandbytes: the weight has another shape, may be stored as floats, has no gradient."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        size = linear.weight.numel() // 2 // torch.empty((), dtype=dtype).element_size()
        self.weight = nn.Parameter(torch.zeros(size, 1, dtype=dtype), requires_grad=False)
        self.weight.quant_state = None


def trained(name: str, folder: Path, *words: str) -> Any:
    *run, _ = parse_sft([*words_for(name, folder, "bfloat16"), "--load_in_4bit", "true", *words])
    trainer = build_sft(*run)
    trainer.train()
    return trainer


def quantized_layers(model: nn.Module) -> set[str]:
    layers = (name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit")
    return {name.split(".")[-2] for name in layers if name.endswith(".base_layer")}


@needs_bitsandbytes
def test_qlora_recipe_trains_packed_and_its_adapter_loads_in_plain_peft(tmp_path: Path) -> None:
    trainer = trained("llama_70b_qlora", tmp_path)
    assert trainer.isolation_report.ok
    assert quantized_layers(trainer.model) == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    proof = next(c for c in trainer.callback_handler.callbacks if isinstance(c, AdapterProof))
    assert all(row.num_trained == row.num_adapters for row in proof.gradients.rows)
    trainer.save_model()
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype="bfloat16", quantization_config=trainer.model.config.quantization_config
    )
    # TRL trains the adapters of a quantised model in bfloat16; PEFT would load them in float32.
    reloaded = PeftModel.from_pretrained(base, tmp_path / "out", autocast_adapter_dtype=False).eval()
    base.set_attn_implementation("varlen")
    row = Boundaries.from_lengths([5, 9, 2])
    inputs = {"input_ids": torch.arange(16)[None], "use_cache": False, **row.to_model_kwargs()}
    with torch.no_grad():
        logits = reloaded(**inputs).logits
        # accelerate turns a model's outputs into float32.
        assert torch.equal(logits.float(), trainer.model.eval()(**inputs).logits)
        with reloaded.disable_adapter():
            assert not torch.equal(logits, reloaded(**inputs).logits)


@needs_bitsandbytes
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "nemotron_h", "falcon_h1", "lfm2"])
def test_hybrids_train_on_4_bits(name: str, tmp_path: Path) -> None:
    """Mixers included: on the way our operations run, `out_proj` is called, so its bits are never misread."""
    trainer = trained(name, tmp_path)
    assert trainer.isolation_report.ok
    assert quantized_layers(trainer.model) & {"in_proj", "in_proj_qkv"}


@needs_bitsandbytes
@pytest.mark.slow
def test_fsdp2_divides_4_bit_weights(tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=VOCAB_SIZE, dtype=torch.bfloat16).save_pretrained(tmp_path / "llama")
    run = {"checkpoint": "llama", "dtype": "bfloat16", "quantization": STORED}
    (alone,) = train_by("one", tmp_path / "one", gradient_accumulation_steps=2, **run)
    for rank in train_by("fsdp2", tmp_path / "fsdp2", **run):
        # Both reduce gradients in bfloat16, in another order.
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert rank["isolated"]
        assert rank["sharded"] == 1.0
    with pytest.raises(AssertionError, match="Set `bnb_4bit_quant_storage: bfloat16`"):
        train_by("fsdp2", tmp_path / "whole", **run | {"quantization": {"load_in_4bit": True}})


# ---- what is refused


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text", "mixtral"])
def test_models_made_of_experts_are_refused(model_type: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type]())
    with pytest.raises(PackingError, match=r"9\d% of the weights are experts in 3-D parameters such as `model.*FSDP2"):
        refuse_idle_quantization(model)


@pytest.mark.parametrize("model_type", ["llama", "bamba", "falcon_h1", "lfm2", "qwen3_5_text"])
def test_models_of_linear_layers_are_not(model_type: str) -> None:
    with torch.device("meta"):
        refuse_idle_quantization(AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type]()))


def test_experts_are_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    config = tiny_config("mixtral", vocab_size=VOCAB_SIZE, intermediate_size=256)
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    args = PackedSFTConfig(
        **settings(tmp_path / "out", model_init_kwargs={"quantization_config": {"load_in_4bit": True}})
    )
    with pytest.raises(PackingError, match="would save nothing on MixtralForCausalLM"):
        PackedSFTTrainer(
            model=str(tmp_path / "model"),
            args=args,
            train_dataset=as_dataset(conversations(2)),
            processing_class=byte_tokenizer(),
        )


def test_out_proj_whose_bits_a_fused_kernel_would_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("bamba")
    model.is_loaded_in_4bit = True
    monkeypatch.setattr(modeling_bamba, "mamba2_split_conv1d_scan_combined", fused_mamba)
    check_quantized_layers(model)
    mamba = model.model.layers[0].mamba
    mamba.out_proj = PackedLinear(mamba.out_proj)
    with pytest.raises(PackingError, match=r"`model.layers.0.mamba.out_proj`.*skip_modules: \[lm_head, out_proj\]"):
        check_quantized_layers(model)
    monkeypatch.undo()
    # Our dispatcher passes over the fused path where a projection is frozen, so the layer calls it.
    register_ops(model)
    check_quantized_layers(model)


def test_a_quantised_output_head_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head = PackedLinear(model.lm_head)
    check_quantized_layers(model)
    model.is_loaded_in_4bit = True
    with pytest.raises(PackingError, match=r"`lm_head`.*the loss is computed from its weight"):
        check_quantized_layers(model)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
def test_packed_layers_count_with_their_real_size(dtype: torch.dtype) -> None:
    model, quantised = tiny_model("llama"), tiny_model("llama")
    attention = quantised.model.layers[0].self_attn
    attention.k_proj = PackedLinear(attention.k_proj, dtype)
    skeleton = without_weights(quantised)
    layer = skeleton.model.layers[0].self_attn.k_proj
    assert (type(layer), layer.weight.shape) == (nn.Linear, (32, 64))
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    config = LoraConfig(r=2, target_modules=["k_proj"])
    assert check_lora_targets(quantised, config).num_trainable == check_lora_targets(model, config).num_trainable


@pytest.mark.parametrize(("dtype", "divides"), [(torch.uint8, False), (torch.bfloat16, True)], ids=str)
def test_storage_that_fsdp_would_not_divide_is_refused(dtype: torch.dtype, divides: bool) -> None:
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    attention.k_proj = PackedLinear(attention.k_proj, dtype)
    with nullcontext() if divides else pytest.raises(PackingError, match=r"`model.layers.0.self_attn.k_proj`.*uint8"):
        refuse_undivided_weights(model)


@needs_bitsandbytes
def test_the_memory_estimate_sees_4_bits_however_they_are_set(tmp_path: Path) -> None:
    words = [*words_for("llama_1b", tmp_path, "bfloat16"), "--bf16", "false"]
    estimates = []
    given = '{"quantization_config": {"load_in_4bit": true, "bnb_4bit_use_double_quant": true}}'
    for changes in (
        [],
        ["--load_in_4bit", "true", "--use_bnb_nested_quant", "true"],
        ["--model_init_kwargs", given],
    ):
        script, training, model, _, _ = parse_sft([*words, *changes])
        estimates.append(estimate_sft(script, training, model, mixed_precision=False))
    plain, by_switch, by_mapping = (estimate.weights for estimate in estimates)
    assert by_mapping == by_switch < 0.8 * plain
