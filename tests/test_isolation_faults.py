"""Every planted fault is caught and named; rounding that looks like one is not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from trl_packing import LeakError, check_isolation
from trl_packing.isolation import IsolationReport
from trl_packing.isolation.row import default_lengths

HYBRID = {"attn_implementation": "eager"}


def has_other_segments_only(report: IsolationReport) -> bool:
    return all(leak.source != leak.target for leak in report.layers)


# ---- faults of the call: the keywords do not arrive, or arrive wrong


def drop_boundaries(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in ("input_ids", "use_cache")}


def drop_offsets_and_restarts(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    positions = torch.arange(kwargs["input_ids"].shape[1])[None]
    return {"input_ids": kwargs["input_ids"], "use_cache": False, "position_ids": positions}


def shift_offsets(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    if "cu_seq_lens_q" not in kwargs:
        return kwargs
    shifted = kwargs["cu_seq_lens_q"].clone()
    shifted[1:-1] += 1
    return {**kwargs, "cu_seq_lens_q": shifted, "cu_seq_lens_k": shifted}


def shift_positions(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "position_ids": kwargs["position_ids"].roll(1, dims=1)} if "position_ids" in kwargs else kwargs


def add_mask_of_ones(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])}


def use_cache(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "use_cache": True}


def plant(model: nn.Module, fault: Callable[..., dict[str, Any]]) -> nn.Module:
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, fault(args, kwargs)), with_kwargs=True)
    return model


@pytest.mark.parametrize(
    ("fault", "attention"),
    [
        (drop_boundaries, "sdpa"),
        (drop_boundaries, "eager"),
        (drop_offsets_and_restarts, "varlen"),
        (shift_offsets, "varlen"),
        (shift_positions, "sdpa"),
        (add_mask_of_ones, "sdpa"),
        (add_mask_of_ones, "eager"),
        (use_cache, "sdpa"),
        (use_cache, "eager"),
    ],
)
def test_fault_of_the_call_is_caught_in_the_first_attention_layer(fault, attention, varlen):
    report = check_isolation(plant(tiny_model("llama", attn_implementation=attention), fault))
    assert not report.ok
    assert report.max_leak > 0.01
    assert [leak.name for leak in report.layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert {leak.class_name for leak in report.layers} == {"LlamaAttention"}
    assert {leak.kind for leak in report.layers} <= {"attention", "mask"}
    assert has_other_segments_only(report)
    with pytest.raises(LeakError, match=r"model\.layers\.0\.self_attn.*LlamaAttention"):
        report.raise_if_leaking()


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_rows_of_two_do_not_pass(attention, varlen):
    def fold(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "input_ids": kwargs["input_ids"].reshape(2, -1)}

    report = check_isolation(plant(tiny_model("llama", attn_implementation=attention), fold))
    assert not report.ok
    assert {probe.status for probe in report.probes} == {"could not run"}


def test_mask_that_shows_other_segments_is_named_as_such():
    report = check_isolation(tiny_model("gpt_oss", attn_implementation="eager"))
    assert report.layers[0].kind == "mask"


# ---- faults of one operation


def per_segment(original: Callable[..., Any], dim: int, *, offsets_of: Callable[[dict[str, Any]], list[int] | None]):
    """Make an operation exact by calling it once per segment."""

    def run(*tensors: torch.Tensor, **kwargs: Any) -> Any:
        offsets = offsets_of(kwargs)
        options = {name: kwargs.pop(name) for name in ("activation", "use_qk_l2norm_in_kernel") if name in kwargs}
        inputs = [*tensors, *(kwargs[name] for name in ("g", "beta") if name in kwargs)]
        per_token = [tensor for tensor in inputs if tensor is not None and tensor.ndim > 2]
        rest = [tensor for tensor in inputs if tensor is None or tensor.ndim <= 2]
        offsets = offsets or [0, per_token[0].shape[dim]]
        outputs = []
        for start, end in pairwise(offsets):
            pieces = [tensor.narrow(dim, start, end - start) for tensor in per_token]
            outputs.append(original(*pieces, *rest, **options))
        if isinstance(outputs[0], tuple):
            return torch.cat([output for output, _ in outputs], dim=dim), None
        return torch.cat(outputs, dim=dim)

    return run


def offsets_from_seq_idx(kwargs: dict[str, Any]) -> list[int] | None:
    if kwargs.get("seq_idx") is None:
        return None
    counts = kwargs["seq_idx"][0].bincount().tolist()
    return [sum(counts[:index]) for index in range(len(counts) + 1)]


def offsets_from_cu_seqlens(kwargs: dict[str, Any]) -> list[int] | None:
    return None if kwargs.get("cu_seqlens") is None else kwargs["cu_seqlens"].tolist()


def offsets_off_by_one(kwargs: dict[str, Any]) -> list[int] | None:
    offsets = offsets_from_seq_idx(kwargs) or offsets_from_cu_seqlens(kwargs)
    return offsets and [offsets[0], *(offset + 1 for offset in offsets[1:-1]), offsets[-1]]


def ignored(kwargs: dict[str, Any]) -> list[int] | None:
    return None


@pytest.fixture
def hybrid(monkeypatch):
    """Build a tiny Qwen3-Next whose convolution and scan read their boundaries in the given way."""
    torch_functions = {
        name: getattr(qwen3_next, name) for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
    }

    def build(convolution: Callable[..., Any], scan: Callable[..., Any]) -> nn.Module:
        model = tiny_model("qwen3_next", **HYBRID)
        for name, dim, offsets in (("causal_conv1d_fn", -1, convolution), ("torch_chunk_gated_delta_rule", 1, scan)):
            monkeypatch.setattr(qwen3_next, name, per_segment(torch_functions[name], dim, offsets_of=offsets))
        return model

    return build


def test_exact_hybrid_passes(hybrid):
    report = check_isolation(hybrid(offsets_from_seq_idx, offsets_from_cu_seqlens))
    assert report.ok
    assert (report.max_leak, report.layers) == (0.0, ())


@pytest.mark.parametrize(
    ("convolution", "scan", "kind"),
    [
        (ignored, offsets_from_cu_seqlens, "convolution"),
        (offsets_off_by_one, offsets_from_cu_seqlens, "convolution"),
        (offsets_from_seq_idx, ignored, "recurrence"),
        (ignored, ignored, "convolution"),
    ],
    ids=["conv_ignores_seq_idx", "seq_idx_off_by_one", "scan_ignores_cu_seqlens", "both_ignore"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fault_of_a_hybrids_operation_is_caught_and_told_apart(hybrid, convolution, scan, kind, dtype):
    report = check_isolation(hybrid(convolution, scan).to(dtype))
    assert not report.ok
    names = [leak.name for leak in report.layers]
    assert names == ["model.layers.0.linear_attn", "model.layers.2.linear_attn"]
    assert [leak.kind for leak in report.layers] == [kind, kind]
    with pytest.raises(LeakError, match="register_ops"):
        report.raise_if_leaking()


def test_scan_with_shifted_offsets_is_caught(hybrid):
    report = check_isolation(hybrid(offsets_from_seq_idx, offsets_off_by_one))
    assert not report.ok
    assert report.layers[0].name == "model.layers.0.linear_attn"


# ---- small faults: one layer of many, a few epsilons


def deep_model(dtype: torch.dtype) -> nn.Module:
    return tiny_model("llama", dtype=dtype, num_hidden_layers=8)


def starts(model: nn.Module) -> list[int]:
    lengths = default_lengths(model)
    return [sum(lengths[:index]) for index in range(len(lengths))]


def leak_by(strength: float, *, detached: bool, model: nn.Module) -> Callable[..., Any]:
    """Add the first segment's mean direction to the last one's outputs, `strength` times as long as each."""
    first, last = starts(model)[1], starts(model)[-1]

    def hook(module: nn.Module, args: Any, kwargs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        hidden = output[0].float()
        direction = nn.functional.normalize(hidden[:, :first].mean(dim=1, keepdim=True), dim=-1)
        direction = direction.detach() if detached else direction
        leaked = hidden + strength * hidden.norm(dim=-1, keepdim=True) * direction
        changed = torch.where(torch.arange(hidden.shape[1])[None, :, None] < last, hidden, leaked)
        return changed.to(output[0].dtype), *output[1:]

    return hook


@pytest.mark.parametrize("detached", [False, True], ids=["with_gradient", "forward_only"])
@pytest.mark.parametrize("layer", [0, 6])
@pytest.mark.parametrize(
    ("dtype", "strength"),
    [(torch.float32, 1e-3), (torch.bfloat16, 4 * torch.finfo(torch.bfloat16).eps)],
    ids=["fp32_1e-3", "bf16_4eps"],
)
def test_small_leak_in_one_layer_of_many_is_caught_and_located(dtype, strength, layer, detached):
    model = deep_model(dtype)
    attention = model.model.layers[layer].self_attn
    attention.register_forward_hook(leak_by(strength, detached=detached, model=model), with_kwargs=True)
    report = check_isolation(model)
    assert not report.ok
    assert [leak.name for leak in report.layers] == [f"model.layers.{layer}.self_attn"]
    assert (report.layers[0].source, report.layers[0].target) == (0, 3)


class _LeakBackFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, source: slice, target: slice) -> torch.Tensor:
        ctx.slices = source, target
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        source, target = ctx.slices
        gradient = gradient.clone()
        gradient[:, source] += 1e-2 * gradient[:, target].mean(dim=1, keepdim=True)
        return gradient, None, None


@pytest.mark.parametrize("lengths", [(67, 1, 5, 70), (5, 1, 67)], ids=["seg4", "seg3"])
def test_leak_of_the_backward_pass_from_any_segment_to_an_earlier_one_is_caught(lengths):
    model = tiny_model("llama")
    offsets = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    for source, target in combinations(range(len(lengths)), 2):
        slices = [slice(offsets[segment], offsets[segment + 1]) for segment in (source, target)]

        def hook(module: nn.Module, args: Any, output: Any, slices: list[slice] = slices) -> Any:
            is_packed = output[0].shape[1] == sum(lengths)
            return (_LeakBackFrom.apply(output[0], *slices) if is_packed else output[0]), *output[1:]

        handle = model.model.layers[1].self_attn.register_forward_hook(hook)
        report = check_isolation(model, lengths=lengths)
        handle.remove()
        assert report.probe("perturbation").status == "passed"
        leaks = [(leak.name, leak.source, leak.target) for leak in report.layers]
        assert leaks == [("model.layers.1.self_attn", source, target)]


class _LeakyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 1e-2 * gradient.roll(-1, dims=1)


def test_leak_of_the_backward_pass_alone_is_caught_and_located():
    model = tiny_model("llama", num_hidden_layers=6)
    projection = model.model.layers[3].self_attn.v_proj
    projection.register_forward_pre_hook(lambda module, args: (_LeakyBackward.apply(*args),))
    report = check_isolation(model)
    assert report.probe("perturbation").status == "passed"
    assert report.probe("gradient").status == "failed"
    assert [leak.name for leak in report.layers] == ["model.layers.3.self_attn"]


def noise_of_other_tokens(epsilons: float) -> Callable[..., torch.Tensor]:
    """Scale an expert layer's output by up to some epsilons, which way depends on the row's other tokens."""

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        signs = torch.sign(output.detach().float().sum(dim=1, keepdim=True))
        factor = 1 + epsilons * torch.finfo(output.dtype).eps * signs
        return (output.float() * factor).to(output.dtype)

    return hook


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(3))
def test_regrouped_experts_are_rounding_not_a_leak(dtype, seed):
    model = tiny_model("qwen3_moe", dtype=dtype, num_hidden_layers=8, seed=seed)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(noise_of_other_tokens(0.5))
    report = check_isolation(model, seed=seed)
    assert report.rounding > 0
    assert report.ok, report.to_text()
    assert (report.max_leak, report.layers) == (0.0, ())


def test_noise_of_experts_does_not_hide_a_leak_behind_them():
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=8)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(noise_of_other_tokens(0.5))
    strength = 4 * torch.finfo(torch.bfloat16).eps
    hook = leak_by(strength, detached=True, model=model)
    model.model.layers[6].self_attn.register_forward_hook(hook, with_kwargs=True)
    report = check_isolation(model)
    assert [leak.name for leak in report.layers] == ["model.layers.6.self_attn"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rounding_of_another_row_length_is_no_difference_from_alone(dtype):
    model = tiny_model("llama", dtype=dtype, num_hidden_layers=12)
    # Up to here, sums in float32 and one rounding to half precision on either side explain a layer's difference.
    allowed = 143 * torch.finfo(torch.float32).eps + (2 * torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0)
    signs = torch.randn(64, generator=torch.Generator().manual_seed(0)).sign()

    def round_by_length(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return (output.float() * (1 + 0.6 * allowed * signs * (output.shape[1] == 70))).to(dtype)

    for layer in model.model.layers:
        layer.register_forward_hook(round_by_length)
    report = check_isolation(model)
    assert report.ok, report.to_text()
    # The logits differ by more than one layer may. Only because each layer was judged by itself is this no difference.
    assert "rounding of each layer only" in report.probe("alone").detail
    assert 0.3 * allowed < report.probe("alone").effect <= report.probe("alone").allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_positions_that_go_on_through_the_row_differ_from_alone(dtype):
    model = tiny_model("gpt2", dtype=dtype)
    positions = torch.arange(256)
    model.transformer.wpe.register_forward_pre_hook(lambda module, args: (positions[None, : args[0].shape[-1]],))
    report = check_isolation(model)
    assert report.probe("perturbation").status == report.probe("gradient").status == "passed"
    assert report.probe("alone").status == "failed"
    with pytest.raises(LeakError, match="Positions"):
        report.raise_if_leaking()


def test_experts_that_read_the_row_are_a_leak():
    model = tiny_model("qwen3_moe")

    def capacity(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        keep = output.norm(dim=-1, keepdim=True) >= output.norm(dim=-1).median()
        return output * keep

    model.model.layers[1].mlp.register_forward_hook(capacity)
    report = check_isolation(model)
    assert [(leak.name, leak.kind) for leak in report.layers] == [("model.layers.1.mlp", "router")]
