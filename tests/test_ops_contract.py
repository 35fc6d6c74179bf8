"""What every packed operation promises, whatever it computes: exact against its definition, and no leak in any bit."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from trl_packing import Boundaries, PackingError
from trl_packing.ops.causal_conv1d import causal_conv1d, naive_causal_conv1d
from trl_packing.ops.gated_delta_rule import gated_delta_rule, naive_gated_delta_rule
from trl_packing.ops.kda import kimi_delta_attention, naive_kimi_delta_attention
from trl_packing.ops.mamba2_scan import mamba2_scan, naive_mamba2_scan
from trl_packing.ops.selective_scan import naive_selective_scan, selective_scan

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Op:
    """An operation under test: its row form, its definition, and inputs of order 1 for T tokens."""

    row: Callable[..., torch.Tensor]
    naive: Callable[..., torch.Tensor]
    make: Callable[[int], Tensors]
    # The inputs with a token axis, which is at -1 for the convolution and the Mamba-1 scan, at 1 for the others.
    per_token: tuple[str, ...]
    token_dim: int
    # The input that holds the logarithm of the decay, or grows it.
    decay: str | None

    def split(self, tensors: Tensors, lengths: tuple[int, ...]) -> list[Tensors]:
        pieces = {name: tensors[name].split(lengths, self.token_dim) for name in self.per_token}
        return [tensors | {name: piece[index] for name, piece in pieces.items()} for index in range(len(lengths))]

    def per_segment(self, tensors: Tensors, lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.cat([self.naive(**piece) for piece in self.split(tensors, lengths)], self.token_dim)


def _conv(tokens: int) -> Tensors:
    # Channel-last memory, as models hand it over.
    hidden_states = torch.randn(1, tokens, 6).transpose(1, 2)
    return {"hidden_states": hidden_states, "weight": torch.randn(6, 4), "bias": torch.randn(6)}


def _delta(tokens: int, channels: int | None = None) -> Tensors:
    heads = 4 if channels is None else 2
    g = -2 * torch.rand(1, tokens, heads) if channels is None else -2 * torch.rand(1, tokens, heads, channels)
    return {
        "query": torch.randn(1, tokens, 2, 8),
        "key": torch.randn(1, tokens, 2, 8),
        "value": torch.randn(1, tokens, heads, 6),
        "g": g,
        "beta": torch.rand(1, tokens, heads),
    }


def _mamba2(tokens: int) -> Tensors:
    return {
        "hidden_states": torch.randn(1, tokens, 4, 6),
        "dt": torch.randn(1, tokens, 4),
        "A": -torch.rand(4) - 0.1,
        "B": torch.randn(1, tokens, 2, 5) / 2,
        "C": torch.randn(1, tokens, 2, 5) / 2,
        "D": torch.randn(4),
        "z": torch.randn(1, tokens, 4, 6),
        "dt_bias": torch.randn(4),
    }


def _mamba1(tokens: int) -> Tensors:
    return {
        "hidden_states": torch.randn(1, 6, tokens),
        "dt": torch.randn(1, 6, tokens),
        "A": -torch.rand(6, 5) - 0.1,
        "B": torch.randn(1, 5, tokens) / 2,
        "C": torch.randn(1, 5, tokens) / 2,
        "D": torch.randn(6),
        "z": torch.randn(1, 6, tokens),
        "delta_bias": torch.randn(6),
    }


def _first(function: Callable[..., tuple[torch.Tensor, None]]) -> Callable[..., torch.Tensor]:
    return lambda **kwargs: function(**kwargs, use_qk_l2norm_in_kernel=True)[0]


def _normed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda **kwargs: function(**kwargs, use_qk_l2norm_in_kernel=True)


def _with(function: Callable[..., torch.Tensor], **fixed: object) -> Callable[..., torch.Tensor]:
    return lambda **kwargs: function(**kwargs, **fixed)


_DELTA = ("query", "key", "value", "g", "beta")
OPS = {
    "conv": Op(
        _with(causal_conv1d, activation="silu"), _with(naive_causal_conv1d, activation="silu"), _conv,
        ("hidden_states",), -1, None,
    ),
    "gdn": Op(_first(gated_delta_rule), _normed(naive_gated_delta_rule), _delta, _DELTA, 1, "g"),
    "kda": Op(
        _first(kimi_delta_attention), _normed(naive_kimi_delta_attention), lambda tokens: _delta(tokens, 8),
        _DELTA, 1, "g",
    ),
    "mamba2": Op(
        _with(mamba2_scan, dt_softplus=True), _with(naive_mamba2_scan, dt_softplus=True), _mamba2,
        ("hidden_states", "dt", "B", "C", "z"), 1, "dt",
    ),
    "mamba1": Op(
        _with(selective_scan, delta_softplus=True), _with(naive_selective_scan, delta_softplus=True), _mamba1,
        ("hidden_states", "dt", "B", "C", "z"), -1, "dt",
    ),
}  # fmt: skip


def _random_lengths(num_segments: int, tokens: int) -> tuple[int, ...]:
    cuts = np.random.default_rng(0).choice(np.arange(1, tokens), num_segments - 1, replace=False)
    return tuple(np.diff([0, *np.sort(cuts).tolist(), tokens]).tolist())


LAYOUTS = {
    "one-segment": (37,),
    "one-token": (1,),
    "all-length-1": (1, 1, 1, 1),
    "length-1-first-and-last": (1, 64, 1),
    "shorter-than-the-convolution": (2, 3, 1, 2),
    "odd-lengths": (11, 6, 1, 9),
    "one-above-the-chunk": (65,),
    "fills-the-chunk": (63, 1),
    "longer-than-the-chunk": (3, 130, 70, 5, 64),
    "alignment-tail": (10, 7, 15),
    "256-segments": _random_lengths(256, 900),
}
FORMS = {
    "lengths": lambda lengths: {"lengths": lengths},
    "seq_idx": lambda lengths: {"seq_idx": Boundaries.from_lengths(lengths).seq_idx},
}
each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
each_layout = pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS)


def _inputs(op: Op, lengths: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in op.make(sum(lengths)).items()}


def _with_gradients(function: Callable[[], torch.Tensor], tensors: Tensors, seed: int = 1) -> Tensors:
    output = function()
    torch.manual_seed(seed)
    weights = torch.randn(output.shape).to(output.dtype)
    gradients = torch.autograd.grad(output, list(tensors.values()), weights)
    return {"output": output.detach(), **dict(zip(tensors, gradients, strict=True))}


@each_op
@each_form
@each_layout
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(torch.float64, 1e-9, 1e-10), (torch.float32, 1e-4, 1e-5)], ids=["fp64", "fp32"]
)
def test_packed_row_equals_each_segment_alone(op, form, lengths, dtype, rtol, atol):
    tensors = _inputs(op, lengths, dtype)
    packed = _with_gradients(lambda: op.row(**tensors, **form(lengths)), tensors)
    alone = _with_gradients(lambda: op.per_segment(tensors, lengths), tensors)
    for name, expected in alone.items():
        torch.testing.assert_close(
            packed[name], expected, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@each_op
@each_form
@pytest.mark.parametrize("changed", [0, 1, 2, 4])
def test_changing_one_segment_moves_no_other_bit(op, form, changed):
    lengths = (5, 130, 1, 70, 9, 3)
    before = {name: tensor.detach() for name, tensor in _inputs(op, lengths, torch.float32).items()}
    other = op.split(op.make(sum(lengths)), lengths)
    after = dict(before)
    for name in op.per_token:
        pieces = list(before[name].split(lengths, op.token_dim))
        pieces[changed] = other[changed][name]
        after[name] = torch.cat(pieces, op.token_dim)

    def outputs(tensors: Tensors, kwargs: dict[str, object]) -> list[torch.Tensor]:
        return list(op.row(**tensors, **kwargs).split(lengths, op.token_dim))

    pairs = list(zip(outputs(before, form(lengths)), outputs(after, form(lengths)), strict=True))
    moved = [index for index, (old, new) in enumerate(pairs) if not torch.equal(old, new)]
    assert moved == [changed]

    # The same row as one segment must leak, or the check above proves nothing.
    row = form((sum(lengths),))
    pairs = list(zip(outputs(before, row), outputs(after, row), strict=True))
    assert changed + 1 in [index for index, (old, new) in enumerate(pairs) if not torch.equal(old, new)]


@each_op
@each_form
@pytest.mark.parametrize("read", [0, 1, 3, 5])
def test_gradient_stays_inside_its_segment(op, form, read):
    lengths = (5, 130, 1, 70, 9, 3)
    tensors = _inputs(op, lengths, torch.float32)
    output = op.row(**tensors, **form(lengths)).split(lengths, op.token_dim)[read]
    gradients = torch.autograd.grad(output.square().sum(), [tensors[name] for name in op.per_token])
    for gradient in gradients:
        reached = [bool(piece.any()) for piece in gradient.split(lengths, op.token_dim)]
        assert [index for index, hit in enumerate(reached) if hit] in ([read], [])
    assert any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.decay], ids=[name for name in OPS if OPS[name].decay])
@each_form
def test_strong_decay_gives_no_overflow_and_no_nan(op, form):
    lengths = (5, 130, 1, 70)
    sign = -1.0 if op.decay == "g" else 1.0
    torch.manual_seed(0)
    tensors = op.make(sum(lengths))
    tensors[op.decay] = sign * tensors[op.decay].abs() * 300
    tensors = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    expected = _with_gradients(lambda: op.per_segment(tensors, lengths), tensors)
    single = {name: tensor.detach().float().requires_grad_() for name, tensor in tensors.items()}
    for inputs, rtol in ((tensors, 1e-9), (single, 1e-3)):
        packed = _with_gradients(lambda inputs=inputs: op.row(**inputs, **form(lengths)), inputs)
        for name, value in packed.items():
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(value.double(), expected[name], rtol=rtol, atol=rtol * scale)


@each_op
@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_in_and_out_computes_in_float32(op, form, dtype):
    lengths = (11, 6, 1, 90, 3)
    tensors = _inputs(op, lengths, dtype)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    packed = _with_gradients(lambda: op.row(**tensors, **form(lengths)), tensors)
    expected = _with_gradients(lambda: op.per_segment(exact, lengths), exact)
    for name, value in packed.items():
        assert value.dtype == dtype
        error = (value.double() - expected[name]).square().mean().sqrt() / expected[name].square().mean().sqrt()
        assert error <= (0.005 if name == "output" else 0.01), f"{name}: {error:.4f}"


@each_op
@each_form
def test_autocast_does_not_lower_the_precision(op, form):
    lengths = (11, 70, 1, 9)
    tensors = _inputs(op, lengths, torch.float32)
    plain = op.row(**tensors, **form(lengths))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = op.row(**tensors, **form(lengths))
        alone = op.per_segment(tensors, lengths)
    assert torch.equal(plain, cast)
    torch.testing.assert_close(cast, alone, rtol=1e-4, atol=1e-5)


@each_op
def test_one_compiled_graph_serves_all_layouts_of_a_row(op):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda tensors, seq_idx: op.row(**tensors, seq_idx=seq_idx), backend=counter, fullgraph=True
    )
    for lengths in ((70,), (11, 6, 1, 52), (1,) * 70, (65, 5)):
        tensors = _inputs(op, lengths, torch.float64)
        seq_idx = Boundaries.from_lengths(lengths).seq_idx
        packed = _with_gradients(lambda tensors=tensors, seq_idx=seq_idx: compiled(tensors, seq_idx), tensors)
        alone = _with_gradients(lambda tensors=tensors, lengths=lengths: op.per_segment(tensors, lengths), tensors)
        for name, expected in alone.items():
            torch.testing.assert_close(packed[name], expected, rtol=1e-9, atol=1e-10)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("op", [OPS["conv"], OPS["gdn"]], ids=["conv", "gdn"])
def test_two_compiled_graphs_serve_rows_of_every_length(op):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda tensors, seq_idx: op.row(**tensors, seq_idx=seq_idx), backend=counter, fullgraph=True
    )
    for lengths in ((70,), (11, 6, 1, 112), (100, 99), (65, 64, 200)):
        tensors = _inputs(op, lengths, torch.float64)
        seq_idx = Boundaries.from_lengths(lengths).seq_idx
        packed = _with_gradients(lambda tensors=tensors, seq_idx=seq_idx: compiled(tensors, seq_idx), tensors)
        alone = _with_gradients(lambda tensors=tensors, lengths=lengths: op.per_segment(tensors, lengths), tensors)
        for name, expected in alone.items():
            torch.testing.assert_close(packed[name], expected, rtol=1e-9, atol=1e-10)
    assert counter.frame_count == 2


@each_op
def test_only_what_needs_a_gradient_gets_one(op):
    lengths = (11, 70, 1, 9)
    tensors = _inputs(op, lengths, torch.float64)
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in op.per_token)
    trained = {name: tensors[name] for name in op.per_token}
    packed = _with_gradients(lambda: op.row(**tensors, lengths=lengths), trained)
    alone = _with_gradients(lambda: op.per_segment(tensors, lengths), trained)
    for name, expected in alone.items():
        torch.testing.assert_close(packed[name], expected, rtol=1e-9, atol=1e-10)


@each_op
def test_a_row_seen_in_inference_mode_first_still_trains(op):
    lengths = (12, 70, 2, 8)
    tensors = _inputs(op, lengths, torch.float64)
    with torch.inference_mode():
        seen = op.row(**{name: tensor.detach() for name, tensor in tensors.items()}, lengths=lengths)
    trained = _with_gradients(lambda: op.row(**tensors, lengths=lengths), tensors)
    assert torch.equal(seen, trained["output"])


@each_op
@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ({}, "neither `lengths` nor `seq_idx`"),
        ({"lengths": (4, 5)}, "add up to 9"),
        ({"lengths": (4, 0, 6)}, r"`lengths\[1\]` is 0"),
        ({"seq_idx": torch.zeros(1, 9, dtype=torch.int32)}, r"shape is \[1, 9\]"),
        ({"seq_idx": torch.zeros(10, dtype=torch.int32)}, r"shape is \[10\]"),
    ],
    ids=["none", "other-sum", "empty-segment", "other-length", "no-batch-axis"],
)
def test_boundaries_that_do_not_fit_the_row_are_refused(op, boundaries, message):
    with pytest.raises(PackingError, match=message):
        op.row(**op.make(10), **boundaries)


@each_op
@each_form
def test_more_than_one_batch_row_is_refused(op, form):
    tensors = op.make(10)
    two = {name: torch.cat([tensor] * 2) if name in op.per_token else tensor for name, tensor in tensors.items()}
    with pytest.raises(PackingError, match="batch size is 2"):
        op.row(**two, **form((4, 6)))
