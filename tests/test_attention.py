"""The segment attention against its definition, and `varlen` on models against their samples run alone."""

import pytest
import torch
from tiny_models import tiny_model

from trl_packing import Boundaries, PackingError, register_ops, unregister_ops
from trl_packing.memory import measured_peak
from trl_packing.ops import attention
from trl_packing.ops.attention import naive_attention, segment_attention, split_into_chunks
from trl_packing.ops.masked_attention import masked_attention

LAYOUTS = [[7], [1, 1, 1, 1], [1, 64, 1], [11, 6, 1, 9], [300, 1, 700]]
OPTIONS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "scale": {"scale": 0.3},
    "window": {"window": 5},
    "window_bidirectional": {"window": 5, "causal": False},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "softcap_window_sinks": {"softcap": 2.0, "window": 5, "sinks": True},
}


def heads(total, dtype, num_heads=4, num_kv=2, width=8):
    generator = torch.Generator().manual_seed(total)
    shapes = ((1, num_heads, total, width), (1, num_kv, total, width), (1, num_kv, total, width))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def options_of(name, dtype):
    options = dict(OPTIONS[name])
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 1, 4, dtype=dtype)
    return options


def per_segment(query, key, value, lengths, **options):
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([naive_attention(q, k, v, **options) for q, k, v in parts], dim=2)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("lengths", LAYOUTS, ids=lambda lengths: "seg" + "-".join(map(str, lengths)))
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(torch.float64, 1e-9, 1e-10), (torch.float32, 1e-4, 1e-5)], ids=["fp64", "fp32"]
)
def test_segment_attention_equals_the_definition_per_segment(lengths, option, dtype, rtol, atol):
    options = options_of(option, dtype)
    inputs = heads(sum(lengths), dtype)
    weights = torch.randn(1, 4, sum(lengths), 8, dtype=dtype, generator=torch.Generator().manual_seed(0))
    fast = segment_attention(*inputs, lengths, **options)
    expected = per_segment(*inputs, lengths, **options)
    torch.testing.assert_close(fast, expected, rtol=rtol, atol=atol)
    gradients = torch.autograd.grad((fast * weights).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=rtol, atol=atol)


@pytest.mark.parametrize("option", OPTIONS)
def test_another_segment_moves_nothing_not_by_a_bit(option):
    lengths = [11, 6, 1, 9]
    options = options_of(option, torch.float32)
    inputs = [tensor.detach() for tensor in heads(27, torch.float32)]
    moved = [tensor.clone() for tensor in inputs]
    for tensor in moved:
        tensor[:, :, 11:17] += 1.0
    before, after = (segment_attention(*tensors, lengths, **options) for tensors in (inputs, moved))
    assert torch.equal(before[:, :, :11], after[:, :, :11])
    assert torch.equal(before[:, :, 17:], after[:, :, 17:])
    assert not torch.equal(before[:, :, 11:17], after[:, :, 11:17])


def test_a_window_sees_exactly_its_tokens():
    query, key, value = (tensor.detach() for tensor in heads(6, torch.float64, num_heads=1, num_kv=1))
    out = segment_attention(query, key, value, [6], window=2)
    last_two = naive_attention(query[:, :, 5:], key[:, :, 4:], value[:, :, 4:], query_start=1)
    torch.testing.assert_close(out[:, :, 5:], last_two)


def test_half_precision_keeps_its_dtype():
    for option in ("causal", "window", "softcap"):
        inputs = [tensor.detach() for tensor in heads(27, torch.bfloat16)]
        out = segment_attention(*inputs, [20, 7], **options_of(option, torch.bfloat16))
        assert out.dtype == torch.bfloat16


def test_chunks_are_cut_inside_segments():
    assert split_into_chunks([5, 4, 1, 9], 4) == [4, 1, 4, 1, 4, 4, 1]


def test_wrong_rows_are_refused():
    query, key, value = heads(8, torch.float32)
    with pytest.raises(PackingError, match="add up to 7, but the row has 8 tokens"):
        segment_attention(query, key, value, [3, 4])
    with pytest.raises(PackingError, match="batch has 2 rows"):
        segment_attention(*(torch.cat([tensor, tensor]) for tensor in (query, key, value)), [8])
    with pytest.raises(PackingError, match="cache"):
        segment_attention(query[:, :, 4:], key, value, [8])


@pytest.mark.parametrize(
    "lengths", [[11, 6, 1, 9], [1], [1, 1, 1, 1], [1, 64, 1], [63, 1]], ids=lambda x: "seg" + "-".join(map(str, x))
)
@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 5}),
        ("qwen3", {}),
        ("gemma2", {"sliding_window": 5}),
        ("gemma3_text", {"sliding_window": 5}),
        ("gpt_oss", {"sliding_window": 5}),
        ("olmo2", {}),
        ("phi3", {}),
        ("cohere2", {"sliding_window": 5}),
        ("granite", {}),
        ("deepseek_v3", {}),
        ("llama4_text", {"attention_chunk_size": 4}),
        ("gpt_neox", {}),
        ("gpt2", {}),
        ("afmoe", {"sliding_window": 5}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_varlen_packed_equals_eager_alone(model_type, overrides, lengths, varlen):
    model = tiny_model(model_type, **overrides).eval()
    input_ids = torch.randint(3, 128, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        alone = torch.cat([model(part, use_cache=False).logits for part in input_ids.split(lengths, dim=1)], dim=1)
        model.set_attn_implementation(varlen)
        kwargs = Boundaries.from_lengths(lengths).to_model_kwargs(host_offsets=True)
        packed = model(input_ids, use_cache=False, **kwargs).logits
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_evaluation_under_varlen_equals_eager(model_type, side, varlen):
    model = tiny_model(model_type, sliding_window=5).eval()
    mask = torch.ones(3, 12, dtype=torch.long)
    for row, pads in enumerate((0, 4, 7)):
        if pads:
            mask[row, slice(None, pads) if side == "left" else slice(-pads, None)] = 0
    input_ids = torch.randint(3, 128, mask.shape, generator=torch.Generator().manual_seed(1))
    logits = []
    for implementation in ("eager", varlen):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits.append(model(input_ids, attention_mask=mask, use_cache=False).logits[mask.bool()])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5 * float(logits[0].abs().max()))


def test_unpadded_batches_and_generation_work_under_varlen(varlen):
    model = tiny_model("mistral", sliding_window=5).eval()
    input_ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    outputs = []
    for implementation in ("eager", varlen):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits = model(input_ids, use_cache=False).logits
            generated = model.generate(input_ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        outputs.append((logits, generated))
    torch.testing.assert_close(outputs[0][0], outputs[1][0], rtol=1e-4, atol=1e-5)
    assert torch.equal(outputs[0][1], outputs[1][1])


def test_unpacked_rows_keep_their_chunks_under_varlen(varlen):
    model = tiny_model("llama4_text", attention_chunk_size=4).eval()
    input_ids = torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(1))
    logits = []
    for implementation in ("eager", varlen):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits.append(model(input_ids, use_cache=False).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


def test_missing_boundaries_stop_the_forward(varlen):
    model = tiny_model("llama", attn_implementation=varlen)
    boundaries = Boundaries.from_lengths([4, 4])
    with pytest.raises(PackingError, match="got no boundaries"):
        model(torch.ones(1, 8, dtype=torch.long), position_ids=boundaries.position_ids(), use_cache=False)


def test_a_mask_beside_boundaries_stops_the_forward_or_masks_nothing(varlen):
    model = tiny_model("llama", attn_implementation=varlen)
    kwargs = Boundaries.from_lengths([4, 4]).to_model_kwargs()
    input_ids = torch.arange(3, 11)[None]
    alone = model(input_ids, use_cache=False, **kwargs).logits
    ones = model(input_ids, attention_mask=torch.ones(1, 8, dtype=torch.long), use_cache=False, **kwargs).logits
    assert torch.equal(alone, ones)
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(PackingError, match="attention mask beside segment boundaries"):
        model(input_ids, attention_mask=mask, use_cache=False, **kwargs)


def test_registration_is_undone_exactly():
    from transformers import AttentionInterface, AttentionMaskInterface

    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    register_ops()
    register_ops()
    assert "varlen" in AttentionInterface._global_mapping
    unregister_ops()
    assert (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)) == before


@pytest.mark.parametrize("lengths", [[64] * 32, [2048]], ids=["seg64", "seg2048"])
def test_no_tensor_of_a_row_grows_with_its_square(varlen, lengths):
    model = tiny_model("llama", attn_implementation=varlen)
    total = sum(lengths)
    kwargs = Boundaries.from_lengths(lengths).to_model_kwargs(host_offsets=True)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            nonlocal largest
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Largest():
        model(torch.ones(1, total, dtype=torch.long), use_cache=False, **kwargs).logits.sum().backward()
    assert 0 < largest < total * total / 4


@pytest.mark.parametrize("option", ["causal", "window", "softcap", "sinks", "softcap_window_sinks"])
@pytest.mark.parametrize("form", ["segments", "one segment", "offsets"])
def test_peak_memory_of_forward_and_backward_grows_with_the_row(form, option):
    """Every allocation counts. Twice the row takes twice the memory, with a half more for what blocks share."""

    def peak(total):
        options = options_of(option, torch.float32)
        lengths = [total] if form == "one segment" else [128] * (total // 128)

        def run():
            inputs = heads(total, torch.float32)
            if form == "offsets":
                out = masked_attention(*inputs, Boundaries.from_lengths(lengths).cu_seqlens, 128, **options)
            else:
                out = segment_attention(*inputs, lengths, **options)
            out.sum().backward()

        return measured_peak(run)

    assert peak(2048) < 2.5 * peak(1024)


@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_scores_computed_again_give_the_gradients_of_scores_kept(varlen, monkeypatch, use_reentrant):
    """Blocks of a long segment, and gradient checkpointing around them."""
    kwargs = Boundaries.from_lengths([40, 3, 21]).to_model_kwargs(host_offsets=True)
    input_ids = torch.randint(3, 128, (1, 64), generator=torch.Generator().manual_seed(0))
    gradients = []
    for block in (512, 8):
        monkeypatch.setattr(attention, "_QUERY_BLOCK", block)
        model = tiny_model("gemma2", attn_implementation=varlen, sliding_window=64).double().train()
        if use_reentrant is not None and block == 8:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        model(input_ids, use_cache=False, **kwargs).logits.square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)
