"""Each call of a hybrid layer's operation goes where its boundaries are honoured, and nothing stays behind."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from typing import Any

import pytest
import torch
from comparing import alone_logits, packed_logits, relative_difference, token_ids
from kernel_stand_ins import build
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model

from trl_packing import Boundaries, LeakError, MissingDependencyError, PackingError
from trl_packing.register.dispatch import (
    describe_layers,
    install_dispatchers,
    refuse_unsupported,
    remove_dispatchers,
)
from trl_packing.register.inventory import find_hooked_functions
from trl_packing.register.relay import relayed_boundaries

LENGTHS = (11, 6, 1, 9)
IDS = token_ids(LENGTHS)


def state_of_files() -> dict[tuple[str, str], Any]:
    """Every attribute of transformers' modeling files and of the classes in them."""
    state = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name and module is not None:
            for attribute, value in vars(module).items():
                state[name, attribute] = value
                if isinstance(value, type) and value.__module__ == name:
                    state |= {(f"{name}.{attribute}", key): inner for key, inner in vars(value).items()}
    return state


def is_same(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> bool:
    return before.keys() == after.keys() and all(after[key] is value for key, value in before.items())


# ---- in place and out again


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "mamba", "mamba2", "zamba", "jamba", "lfm2"])
def test_removal_restores_the_very_objects(model_type: str) -> None:
    model = tiny_model(model_type)
    before = state_of_files()
    for ops in ("auto", "torch", "auto"):
        assert install_dispatchers(model, ops)
    assert not is_same(before, state_of_files())
    packed_logits(model, IDS, LENGTHS)
    remove_dispatchers()
    assert is_same(before, state_of_files())


def test_names_that_someone_else_has_bound_since_are_left_alone() -> None:
    model = tiny_model("lfm2")
    file = sys.modules[type(model).__module__]
    original = file.causal_conv1d_fn
    install_dispatchers(model)
    theirs = file.causal_conv1d_fn = lambda *args, **kwargs: None
    remove_dispatchers()
    assert file.causal_conv1d_fn is theirs
    file.causal_conv1d_fn = original


def test_models_without_such_layers_change_nothing() -> None:
    model = tiny_model("llama")
    before = state_of_files()
    assert install_dispatchers(model) == []
    assert describe_layers(model) == []
    assert is_same(before, state_of_files())


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "kimi_linear", "mamba", "mamba2"])
def test_rows_without_boundaries_run_as_without_us(model_type: str) -> None:
    model = tiny_model(model_type)
    stock = model(input_ids=IDS, use_cache=False).logits
    install_dispatchers(model)
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, stock)


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba"])
def test_generation_runs_as_without_us(model_type: str) -> None:
    model = tiny_model(model_type).eval()
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    stock = model.generate(IDS, **options)
    install_dispatchers(model)
    assert torch.equal(model.generate(IDS, **options), stock)


def test_a_failing_layer_leaves_no_boundaries_behind() -> None:
    model = tiny_model("zamba")
    install_dispatchers(model)
    with pytest.raises(PackingError):
        packed_logits(model, token_ids((5, 6)), LENGTHS)
    assert relayed_boundaries() == {}


def test_reload_of_a_modeling_file_is_repaired_by_installing_again() -> None:
    model = tiny_model("lfm2")
    install_dispatchers(model)
    file = importlib.reload(sys.modules[type(model).__module__])
    model = file.Lfm2ForCausalLM(model.config)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        packed_logits(model, IDS, LENGTHS)
    install_dispatchers(model)
    assert relative_difference(packed_logits(model, IDS, LENGTHS), alone_logits(model, IDS, LENGTHS)) < 1e-5


def test_copies_adapters_saves_and_modes_keep_working(tmp_path) -> None:
    model = tiny_model("qwen3_next", attn_implementation="sdpa")
    install_dispatchers(model)
    wanted = packed_logits(model, IDS, LENGTHS)
    assert torch.equal(packed_logits(copy.deepcopy(model), IDS, LENGTHS), wanted)
    assert torch.equal(packed_logits(model.eval(), IDS, LENGTHS), wanted)
    model.save_pretrained(tmp_path)
    assert torch.equal(packed_logits(type(model).from_pretrained(tmp_path).train(), IDS, LENGTHS), wanted)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    fresh = tiny_model("qwen3_next", attn_implementation="sdpa", seed=1)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(packed_logits(fresh, IDS, LENGTHS), wanted)
    adapted = get_peft_model(model.train(), LoraConfig(target_modules=["q_proj", "out_proj"]))
    assert torch.equal(packed_logits(adapted, IDS, LENGTHS), wanted)
    assert torch.equal(packed_logits(adapted.merge_and_unload(), IDS, LENGTHS), wanted)


# ---- refusals


def test_unknown_choice_of_operations_is_refused() -> None:
    with pytest.raises(PackingError, match="`ops` is one of"):
        install_dispatchers(tiny_model("lfm2"), "fast")


def test_missing_kernels_are_named_all_at_once() -> None:
    with pytest.raises(MissingDependencyError, match="`causal_conv1d`, `mamba_ssm`"):
        install_dispatchers(tiny_model("bamba"), "kernels")


def test_a_cache_beside_boundaries_is_refused() -> None:
    model = tiny_model("qwen3_next", attn_implementation="sdpa").eval()
    install_dispatchers(model)
    with pytest.raises(PackingError):
        model(input_ids=IDS, use_cache=True, **Boundaries.from_lengths(LENGTHS).to_model_kwargs())


@pytest.mark.parametrize(
    ("model_type", "layer"),
    [
        ("minimax", "MiniMaxLightningAttention"),
        ("recurrent_gemma", "RecurrentGemmaRecurrentBlock"),
        ("rwkv", "RwkvSelfAttention"),
        ("xlstm", "xLSTMLayer"),
        ("zaya", "ZayaCCAProjection"),
        ("mpt", "MptAttention"),
        ("cpmant", "CpmAntModel"),
        ("deepseek_v4", "DeepseekV4CSACompressor"),
        ("blt", "BltPatcher"),
        ("reformer", "LSHSelfAttention"),
    ],
)
def test_layers_that_mix_segments_are_refused_by_name(model_type: str, layer: str) -> None:
    with pytest.raises(LeakError, match=layer):
        refuse_unsupported(tiny_model(model_type))


def test_functions_of_a_later_transformers_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback as decorate

    def torch_function(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    model = build(monkeypatch, "lfm2")
    file = sys.modules[type(model).__module__]
    file.causal_conv1d_fn = decorate("chunk_of_tomorrow", "package_of_tomorrow")(torch_function)
    with pytest.raises(LeakError, match="`chunk_of_tomorrow` is unknown"):
        refuse_unsupported(model)


def test_an_argument_of_a_later_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback as decorate

    def torch_function(hidden_states, weight, bias=None, activation=None, dilation=1, **kwargs):
        return hidden_states

    model = build(monkeypatch, "lfm2")
    file = sys.modules[type(model).__module__]
    file.causal_conv1d_fn = decorate("causal_conv1d_fn", "causal_conv1d")(torch_function)
    with pytest.raises(LeakError, match="`causal_conv1d_fn` is unknown"):
        refuse_unsupported(model)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "bamba", "mamba", "jamba"])
def test_layers_that_we_keep_apart_are_not_refused(model_type: str) -> None:
    refuse_unsupported(tiny_model(model_type))


# ---- reports, reads and graphs


def test_description_names_what_runs_and_why() -> None:
    choices = {choice.function: choice for choice in describe_layers(tiny_model("bamba"))}
    assert choices["mamba_chunk_scan_combined"].implementation == "torch"
    assert "cpu" in choices["mamba_chunk_scan_combined"].reason
    assert choices["mamba_split_conv1d_scan_combined"].implementation == "unfused"
    assert choices["causal_conv1d_fn"].layer == "BambaMixer"
    assert choices["causal_conv1d_fn"].count == 2


@pytest.mark.parametrize(("host_offsets", "reads"), [(True, 0), (False, 1)])
def test_boundaries_are_read_from_the_device_once_per_row(
    monkeypatch: pytest.MonkeyPatch, host_offsets: bool, reads: int
) -> None:
    model = tiny_model("qwen3_next", attn_implementation="sdpa")
    install_dispatchers(model)
    counted = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: counted.append(self.shape) or original(self))
    packed_logits(model, IDS, LENGTHS, host_offsets=host_offsets)
    assert len(counted) == reads


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "bamba", "lfm2", "mamba2"])
def test_one_graph_serves_all_layouts_of_equal_size(model_type: str) -> None:
    model = tiny_model(model_type)
    install_dispatchers(model)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    for lengths in (LENGTHS, (9, 1, 6, 11), (20, 2, 4, 1), (5, 5, 5, 12)):
        wanted = packed_logits(model, IDS, lengths)
        assert relative_difference(packed_logits(compiled, IDS, lengths), wanted) < 1e-5
    assert len(graphs) == 1
    torch.compiler.reset()


def test_every_wrapper_of_every_modeling_file_is_found() -> None:
    for model_type in ("qwen3_next", "bamba", "kimi_linear", "mamba", "zamba", "lfm2_moe", "inkling_text"):
        model = tiny_model(model_type)
        source = inspect.getsource(sys.modules[type(model).__module__])
        found = find_hooked_functions(model, {})
        assert len(found) == source.count("@use_kernel_func_from_hub_with_fallback(")
        assert all(function.upstream.role != "unknown" for function in found)
