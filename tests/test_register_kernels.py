"""Where a package's kernel takes the boundaries it is called with them, as it wants them, and nowhere else."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from comparing import alone_logits, gradients_of, packed_logits, relative_difference, summed_loss, token_ids
from kernel_stand_ins import Kernels, build
from peft import LoraConfig, get_peft_model
from torch import nn

from trl_packing import PackingError
from trl_packing.register.dispatch import describe_layers, install_dispatchers, remove_dispatchers
from trl_packing.register.inventory import _wrapper_of

LENGTHS = (11, 6, 1, 9)
IDS = token_ids(LENGTHS)


def alone_logits_without_kernels(model: nn.Module) -> torch.Tensor:
    """The samples alone in transformers' PyTorch functions, whatever packages the model's file found."""
    install_dispatchers(model)
    wanted = alone_logits(model, IDS, LENGTHS)
    remove_dispatchers()
    return wanted


def test_kernels_get_boundaries_as_they_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch, "fla", "causal_conv1d")
    model = kernels.model("qwen3_next")
    kernels.say_cpu_is_a_gpu()
    install_dispatchers(model)
    packed_logits(model, IDS, LENGTHS, host_offsets=True)
    assert kernels.names() == ["causal_conv1d_fn", "chunk_gated_delta_rule"] * 2
    for arguments in kernels.of("causal_conv1d_fn"):
        assert arguments["channels_last"]
        assert arguments["seq_idx"].dtype == torch.int32
        assert arguments["seq_idx"].is_contiguous()
    first, second = kernels.of("chunk_gated_delta_rule")
    assert first["rest"] == {}
    assert first["cu_seqlens_cpu"].dtype == torch.int64
    assert first["cu_seqlens_cpu"].tolist() == first["cu_seqlens"].tolist() == [0, 11, 17, 18, 27]
    # The kernel caches by identity, so each layer must get the same objects.
    assert first["cu_seqlens"] is second["cu_seqlens"]
    assert first["cu_seqlens_cpu"] is second["cu_seqlens_cpu"]


def test_rows_that_lie_channels_first_are_turned_for_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch, "causal_conv1d")
    model = kernels.model("zamba")
    kernels.say_cpu_is_a_gpu()
    install_dispatchers(model)
    packed_logits(model, IDS, LENGTHS)
    assert [call["channels_last"] for call in kernels.of("causal_conv1d_fn")] == [True] * 4


def test_offsets_that_transformers_forgets_to_rename_reach_kimi(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch, "fla", "causal_conv1d")
    model = kernels.model("kimi_linear")
    kernels.say_cpu_is_a_gpu()
    install_dispatchers(model)
    packed_logits(model, IDS, LENGTHS)
    assert [arguments["cu_seqlens"].tolist() for arguments in kernels.of("chunk_kda")] == [[0, 11, 17, 18, 27]] * 2


def test_convolution_of_flash_linear_attention_serves_where_the_package_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = Kernels(monkeypatch, "fla")
    model = kernels.model("qwen3_next")
    wanted = alone_logits_without_kernels(model)
    kernels.say_cpu_is_a_gpu()
    install_dispatchers(model, "kernels")
    found = packed_logits(model, IDS, LENGTHS, host_offsets=True)
    assert kernels.names() == ["fla convolution", "chunk_gated_delta_rule"] * 2
    assert relative_difference(found, wanted) < 1e-5
    offsets = [call["cu_seqlens_cpu"] for _, call in kernels.calls]
    assert all(offset is offsets[0] for offset in offsets)


def test_kernel_that_the_kernels_package_has_put_in_place_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch)
    model = build(monkeypatch, "lfm2")
    file = sys.modules[type(model).__module__]
    wrapper = _wrapper_of(file.causal_conv1d_fn)

    class Func(nn.Module):
        kernel_layer_name = "causal_conv1d_fn"

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return wrapper(*args, **kwargs)

    file.causal_conv1d_fn = Func()
    # What `kernelize` does.
    file.causal_conv1d_fn.forward = kernels.causal_conv1d_fn
    kernels.say_cpu_is_a_gpu()
    install_dispatchers(model)
    packed_logits(model, IDS, LENGTHS)
    assert kernels.names() == ["causal_conv1d_fn"] * 2


def test_kernel_without_the_keyword_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch, "fla", "causal_conv1d")
    sys.modules["causal_conv1d"].causal_conv1d_fn = lambda x, weight, bias=None, activation=None: 1 / 0
    sys.modules["fla"].chunk_gated_delta_rule = lambda q, k, v, g, beta, **kwargs: 1 / 0
    monkeypatch.delitem(sys.modules, "fla.modules.causal_conv1d")
    model = kernels.model("qwen3_next")
    wanted = alone_logits_without_kernels(model)
    kernels.say_cpu_is_a_gpu()
    install_dispatchers(model)
    assert relative_difference(packed_logits(model, IDS, LENGTHS), wanted) < 1e-5


def test_convolution_that_the_kernel_cannot_take_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch, "causal_conv1d")
    model = kernels.model("lfm2", conv_L_cache=6)
    wanted = alone_logits_without_kernels(model)
    kernels.say_cpu_is_a_gpu()
    install_dispatchers(model)
    assert relative_difference(packed_logits(model, IDS, LENGTHS), wanted) < 1e-5
    assert kernels.calls == []


def test_packages_installed_and_tensors_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for model_type in ("qwen3_next", "bamba"):
        kernels = Kernels(monkeypatch, "fla", "causal_conv1d", "mamba_ssm")
        model = kernels.model(model_type)
        with pytest.raises(RuntimeError, match="active drivers"):
            model(input_ids=IDS, use_cache=False)
        install_dispatchers(model)
        packed = packed_logits(model, IDS, LENGTHS)
        assert relative_difference(packed, alone_logits(model, IDS, LENGTHS)) < 1e-5
        assert model.eval().generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, 30)
        assert kernels.calls == []


def test_torch_is_run_on_a_gpu_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch, "fla", "causal_conv1d")
    model = kernels.model("qwen3_next")
    kernels.say_cpu_is_a_gpu()
    install_dispatchers(model, "torch")
    packed_logits(model, IDS, LENGTHS)
    assert kernels.calls == []


# ---- the fused Mamba path


def test_fused_path_runs_where_nothing_can_sit_on_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch, "mamba_ssm", "causal_conv1d")
    # Versions differ in how the norm treats more than one group.
    model = kernels.model("bamba", mamba_n_groups=1)
    wanted = alone_logits_without_kernels(model)
    kernels.say_cpu_is_a_gpu()
    install_dispatchers(model)
    assert relative_difference(packed_logits(model, IDS, LENGTHS), wanted) < 1e-5
    assert kernels.names() == ["mamba_split_conv1d_scan_combined"] * 2
    assert kernels.of("mamba_split_conv1d_scan_combined")[0]["seq_idx"].dtype == torch.int32


def test_adapters_on_the_output_projection_train(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch, "mamba_ssm", "causal_conv1d")
    model = get_peft_model(kernels.model("bamba"), LoraConfig(target_modules=["out_proj", "in_proj"]))
    kernels.say_cpu_is_a_gpu()
    install_dispatchers(model)
    gradients = gradients_of(model, lambda: summed_loss(packed_logits(model, IDS, LENGTHS), IDS, LENGTHS))
    assert kernels.names() == ["causal_conv1d_fn", "mamba_chunk_scan_combined"] * 2
    moved = [name for name, gradient in gradients.items() if "lora_B" in name and gradient.abs().max() > 0]
    assert sum("out_proj" in name for name in moved) == sum("in_proj" in name for name in moved) == 2


def test_insisting_on_kernels_off_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Kernels(monkeypatch, "causal_conv1d").model("lfm2")
    install_dispatchers(model, "kernels")
    with pytest.raises(PackingError, match=r'Set ops="auto"'):
        packed_logits(model, IDS, LENGTHS)


def test_description_follows_device_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch, "fla")
    model = kernels.model("qwen3_next")
    kernels.say_cpu_is_a_gpu()
    choices = {choice.function: choice.implementation for choice in describe_layers(model)}
    assert choices == {"causal_conv1d_fn": "fla convolution", "chunk_gated_delta_rule": "kernel"}
