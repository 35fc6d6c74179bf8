"""LoRA trains what it says: all `auto` targets receive gradients, and adapters that train nothing are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from tiny_models import tiny_model
from torch import nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.bamba import modeling_bamba

from trl_packing import Boundaries, PackingError, check_lora_targets, register_ops, safe_lora_targets
from trl_packing.lora import adapter_gradients
from trl_packing.lora.gradients import _on_any_rank

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
DELTA_NET = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}
TARGETS = {
    "llama": ATTENTION | MLP,
    "qwen3_next": ATTENTION | {"in_proj_qkvz", "in_proj_ba", "out_proj"},
    "qwen3_5_text": ATTENTION | DELTA_NET | MLP,
    "qwen3_5_moe_text": ATTENTION | DELTA_NET | MLP,
    "bamba": ATTENTION | MLP | {"in_proj", "out_proj"},
    "granitemoehybrid": ATTENTION | {"in_proj", "out_proj", "input_linear", "output_linear"},
    "falcon_h1": ATTENTION | MLP | {"in_proj"},
    "nemotron_h": ATTENTION | {"in_proj", "up_proj", "down_proj"},
    "lfm2": {"q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "mamba": {"in_proj", "x_proj"},
}
PACKED_TYPES = [name for name in TARGETS if name not in ("gpt2", "mamba")]


def one_step(model: nn.Module, *, packed: bool = True) -> None:
    """The backward of a packed row of three samples."""
    torch.manual_seed(0)
    boundaries = Boundaries.from_lengths([9, 1, 7])
    input_ids = torch.randint(3, 120, (1, boundaries.total_tokens))
    kwargs = boundaries.to_model_kwargs() if packed else {}
    model(input_ids=input_ids, labels=input_ids, use_cache=False, **kwargs).loss.backward()


# ---- auto


@pytest.mark.parametrize("model_type", TARGETS)
def test_auto_takes_every_linear_layer_that_trains(model_type: str) -> None:
    model = tiny_model(model_type)
    assert set(safe_lora_targets(model)) == TARGETS[model_type]


@pytest.mark.parametrize("model_type", PACKED_TYPES)
def test_every_adapter_of_auto_receives_a_gradient(model_type: str) -> None:
    model = tiny_model(model_type)
    register_ops(model)
    config = LoraConfig(r=2, target_modules=safe_lora_targets(model))
    report = check_lora_targets(model, config)
    peft_model = get_peft_model(model, config)
    one_step(peft_model)
    gradients = adapter_gradients(peft_model)
    assert gradients.dead == ()
    assert {row.kind: row.num_trained for row in gradients.rows} == report.adapters
    assert report.num_trainable == peft_model.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text", "granitemoehybrid", "lfm2_moe", "jetmoe"])
def test_auto_leaves_routers_and_experts_alone(model_type: str) -> None:
    model = tiny_model(model_type)
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=safe_lora_targets(model)))
    names = [name for name, parameter in peft_model.named_parameters() if parameter.requires_grad]
    assert names
    assert not [name for name in names if "router" in name or ".gate." in name or ".experts." in name]
    assert not [name for name in names if "shared_expert_gate" in name]


def test_auto_leaves_experts_of_an_older_layout_alone() -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.experts = nn.ModuleList([nn.Linear(64, 64)])
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=safe_lora_targets(model)))
    assert not [name for name in peft_model.base_model.targeted_module_names if "experts" in name]


def test_auto_endings_match_the_chosen_modules_only() -> None:
    # A vision tower with the names of the text model, as the hub checkpoints of Qwen3.5 and Gemma have it.
    model = tiny_model("gemma3")
    config = LoraConfig(r=2, target_modules=safe_lora_targets(model))
    names = get_peft_model(model, config).base_model.targeted_module_names
    assert names
    assert all(name.startswith("model.language_model.") for name in names)


# ---- projections whose weight a kernel reads


def fused_mamba(zxbcdt: torch.Tensor, conv1d_weight: Any, *args: Any, outproj_weight: Any, **kwargs: Any) -> Any:
    """A stand-in for the fused kernel: what matters is that it multiplies by the weight it is given."""
    return zxbcdt[..., : outproj_weight.shape[1]] @ outproj_weight.T + conv1d_weight.sum()


@pytest.fixture
def fused_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file as transformers makes it where the package is installed."""
    package = ModuleType("stand_in_mamba_ssm")
    package.mamba_split_conv1d_scan_combined = fused_mamba
    monkeypatch.setitem(sys.modules, package.__name__, package)
    torch_function = modeling_bamba.mamba2_split_conv1d_scan_combined
    decorate = use_kernel_func_from_hub_with_fallback("mamba_split_conv1d_scan_combined", package.__name__)
    wrapped = decorate(torch_function)
    monkeypatch.setattr(modeling_bamba, "mamba2_split_conv1d_scan_combined", wrapped)


def test_adapter_that_a_fused_kernel_passes_by_is_refused(fused_package: None) -> None:
    model = tiny_model("bamba")
    with pytest.raises(PackingError, match=r"`model.layers.0.mamba.out_proj`.*would train nothing.*Remove `out_proj`"):
        check_lora_targets(model, LoraConfig(target_modules="all-linear"))
    assert "out_proj" not in safe_lora_targets(model)
    # The refusal is right: without it, this adapter would not train.
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=["in_proj", "out_proj"]))
    one_step(peft_model, packed=False)
    gradients = adapter_gradients(peft_model)
    assert gradients.dead == ("model.layers.0.mamba.out_proj", "model.layers.2.mamba.out_proj")
    with pytest.raises(PackingError, match=r"2 adapters received no gradient.*model.layers.0.mamba.out_proj"):
        gradients.raise_if_dead()


def test_adapter_on_the_unfused_path_is_legal(fused_package: None) -> None:
    model = tiny_model("bamba")
    register_ops(model)
    assert "out_proj" in safe_lora_targets(model)
    config = LoraConfig(r=2, target_modules=["out_proj"])
    check_lora_targets(model, config)
    peft_model = get_peft_model(model, config)
    one_step(peft_model)
    assert adapter_gradients(peft_model).dead == ()


def test_pissa_on_a_fused_path_is_refused(fused_package: None) -> None:
    with pytest.raises(PackingError, match="would train nothing"):
        check_lora_targets(tiny_model("bamba"), LoraConfig(target_modules=["out_proj"], init_lora_weights="pissa"))


def test_function_that_nobody_knows_counts_as_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_bamba, "mamba2_split_conv1d_scan_combined", fused_mamba)
    with pytest.raises(PackingError, match="hands its weight to `mamba2_split_conv1d_scan_combined`"):
        check_lora_targets(tiny_model("bamba"), LoraConfig(target_modules=["out_proj"]))


# ---- other refusals


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("bamba", {"target_modules": ["q_proj", "conv1d"], "r": 192}, r"`model.layers.0.mamba.conv1d`.*train nothing"),
        ("lfm2", {"target_modules": ["conv.conv"], "r": 64}, r"`model.layers.0.conv.conv`.*would train nothing"),
        ("mamba", {"target_modules": ["dt_proj"]}, r"dt_proj`.*multiplies by its weight"),
        ("nemotron_h", {"target_modules": ["out_proj"]}, "PEFT cannot adapt NemotronHForCausalLM.*out_proj"),
        ("llama", {"target_modules": ["q_proj", "lm_head"]}, "output head `lm_head` would train nothing"),
        ("llama", {"target_modules": ["q_prj"]}, "PEFT cannot adapt LlamaForCausalLM.*q_prj"),
        ("qwen3_next", {"target_modules": "all-linear"}, r"would not adapt what.*all-linear.*experts.gate_up_proj"),
        ("qwen3_next", {"target_modules": ["shared_expert.gate_proj"]}, "PEFT cannot adapt.*gate_proj"),
        ("qwen3_next", {"target_modules": ["shared_expert.down_proj"]}, r"leave out.*shared_expert.down_proj"),
        ("qwen3_next", {"target_modules": ["q_proj", "gate_proj", "up_proj"]}, r"adapt.*experts.gate_up_proj"),
        ("qwen3_next", {"target_modules": r".*layers\.2.*q_proj|.*layers\.0.*out_proj"}, "would not adapt what"),
        ("dbrx", {"target_modules": "all-linear"}, r"what chooses experts: `transformer.blocks.*router.layer`"),
    ],
    ids=[
        "conv", "short-conv", "dt_proj", "mamba-guard", "lm_head", "typo", "all-linear", "shared-gate", "shared-down",
        "gate-up", "regex", "router",
    ],
)  # fmt: skip
def test_bad_targets_are_refused_by_name(model_type: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        check_lora_targets(tiny_model(model_type), LoraConfig(**config))


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ],
    ids=lambda config: type(config).__name__,
)
def test_virtual_tokens_are_refused_by_name(config: Any) -> None:
    with pytest.raises(PackingError, match=f"{type(config).__name__} adds virtual tokens once per row"):
        check_lora_targets(tiny_model("llama"), config)


def test_alora_is_refused_by_name() -> None:
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
    with pytest.raises(PackingError, match="aLoRA"):
        check_lora_targets(tiny_model("llama"), config)


def test_tied_head_that_trls_loss_cannot_read_is_refused() -> None:
    config = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2])
    with pytest.raises(PackingError, match="`trainable_token_indices` on embeddings that are tied"):
        check_lora_targets(tiny_model("llama", tie_word_embeddings=True), config)
    assert check_lora_targets(tiny_model("llama", tie_word_embeddings=False), config).num_trainable > 0
    whole = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    assert check_lora_targets(tiny_model("llama", tie_word_embeddings=True), whole).num_trainable > 0


# ---- what is accepted, and as what


def test_experts_are_adapted_on_request() -> None:
    model = tiny_model("qwen3_next")
    register_ops(model)
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, target_modules=safe_lora_targets(model), target_parameters=experts, lora_dropout=0.0)
    report = check_lora_targets(model, config)
    assert report.adapters["Qwen3NextExperts.gate_up_proj"] == report.adapters["Qwen3NextExperts.down_proj"] == 3
    peft_model = get_peft_model(model, config)
    one_step(peft_model)
    gradients = adapter_gradients(peft_model)
    assert {row.kind: row.num_adapters for row in gradients.rows} == report.adapters
    assert gradients.dead == ()


def test_router_named_on_purpose_is_adapted_as_written() -> None:
    report = check_lora_targets(tiny_model("dbrx"), LoraConfig(r=2, target_modules=["router.layer"]))
    assert list(report.adapters) == ["DbrxRouter.layer"]


def test_check_changes_neither_model_nor_config() -> None:
    model = tiny_model("qwen3_5_moe_text")
    before = {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()}
    config = LoraConfig(target_modules="all-linear", exclude_modules=["shared_expert_gate"], init_lora_weights="pissa")
    written = config.to_dict()
    check_lora_targets(model, config)
    assert {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()} == before
    assert config.to_dict() == written
    assert not hasattr(model, "peft_config")


def test_target_that_matches_nothing_is_said_aloud() -> None:
    with pytest.warns(UserWarning, match="No module of LlamaForCausalLM .* is called `v_prj`"):
        report = check_lora_targets(tiny_model("llama"), LoraConfig(target_modules=["q_proj", "v_prj"]))
    assert report.adapters == {"LlamaAttention.q_proj": 2}


def test_pefts_default_targets_are_said_aloud() -> None:
    with pytest.warns(UserWarning, match="PEFT's own choice adapts 4 of 15 linear layers"):
        check_lora_targets(tiny_model("llama"), LoraConfig())


def test_wrapped_model_is_checked_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    peft_model = get_peft_model(tiny_model("bamba"), LoraConfig(r=2, target_modules=["in_proj", "out_proj"]))
    assert check_lora_targets(peft_model).adapters == {"BambaMixer.in_proj": 2, "BambaMixer.out_proj": 2}
    monkeypatch.setattr(modeling_bamba, "mamba2_split_conv1d_scan_combined", fused_mamba)
    with pytest.raises(PackingError, match="out_proj"):
        check_lora_targets(peft_model)
    with pytest.raises(PackingError, match="without adapters"):
        safe_lora_targets(peft_model)


# ---- the table after the first step


@contextmanager
def stepped(config: LoraConfig) -> Iterator[nn.Module]:
    model = get_peft_model(tiny_model("llama"), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    one_step(model)
    optimizer.step()
    yield model
    optimizer.zero_grad()


@pytest.mark.parametrize("cleared", [False, True], ids=["gradients", "cleared"])
def test_table_counts_adapters_by_layer_kind(cleared: bool) -> None:
    with stepped(LoraConfig(r=2, target_modules=["q_proj", "down_proj"])) as model:
        if cleared:
            model.zero_grad()
        gradients = adapter_gradients(model)
        trainable, total = model.get_nb_trainable_parameters()
    assert [(row.kind, row.num_adapters, row.num_trained) for row in gradients.rows] == [
        ("LlamaAttention.q_proj", 2, 2),
        ("LlamaMLP.down_proj", 2, 2),
    ]
    assert sum(row.num_trainable for row in gradients.rows) == trainable
    assert sum(row.trainable_share for row in gradients.rows) == pytest.approx(trainable / total)
    gradients.raise_if_dead()
    assert all(len(line) <= 80 for line in gradients.to_text().splitlines())


@pytest.mark.parametrize("cleared", [False, True], ids=["gradients", "cleared"])
def test_one_dead_adapter_among_many_is_named(cleared: bool) -> None:
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    layer.forward = layer.base_layer.forward
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    one_step(model)
    optimizer.step()
    if cleared:
        optimizer.zero_grad()
    gradients = adapter_gradients(model)
    assert gradients.dead == ("model.layers.1.self_attn.q_proj",)
    assert [(row.num_adapters, row.num_trained) for row in gradients.rows] == [(2, 1)]


def _flags_of_rank(rank: int, file: str, results: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    judges = {"first": [nn.Parameter(torch.zeros(1))]}
    results[rank] = _on_any_rank([rank == 0, rank == 1, False], judges)
    torch.distributed.destroy_process_group()


def test_adapter_counts_that_trained_on_any_rank(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        processes = [
            context.Process(target=_flags_of_rank, args=(rank, str(tmp_path / "store"), results)) for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert dict(results) == {0: [True, True, False], 1: [True, True, False]}


def test_table_needs_adapters() -> None:
    with pytest.raises(PackingError, match="LlamaForCausalLM has no trainable adapters"):
        adapter_gradients(tiny_model("llama"))
