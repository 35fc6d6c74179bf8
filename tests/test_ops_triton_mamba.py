"""The Mamba-2 scan agrees with mamba-ssm's real Triton kernel on packed rows, run by Triton's interpreter on a CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comparing import relative_difference
from interpreting import interpreted

from trl_packing.ops.mamba2_scan import mamba2_scan

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

KERNEL_CHUNK = 32
# Boundaries inside chunks, a single token, a segment over three chunks; then every boundary at the edge of a chunk.
ROWS = {"seg30-1-66-12": (30, 1, 66, 12), "seg32-32-32-13": (32, 32, 32, 13)}
LENGTHS = ROWS["seg30-1-66-12"]
HEADS, GROUPS, WIDTH, STATE = 4, 2, 16, 16

Tensors = dict[str, torch.Tensor]
Options = dict[str, Any]
Scan = Callable[..., torch.Tensor]

# Always softplus: the kernel assumes a step of at least 0. A tuple is the shape of a tensor.
OPTIONS: dict[str, Options] = {
    "softplus": {"dt_softplus": True},
    "limit-and-skip-per-head": {"dt_softplus": True, "dt_limit": (0.2, 0.9), "D": (HEADS,), "dt_bias": (HEADS,)},
    "skip-per-channel-and-gate": {
        "dt_softplus": True,
        "D": (HEADS, WIDTH),
        "dt_bias": (HEADS,),
        "z": (1, sum(LENGTHS), HEADS, WIDTH),
    },
}


@pytest.fixture(scope="module")
def kernel() -> Iterator[Scan]:
    """mamba-ssm's kernel, imported without the package's `__init__`, which wants its CUDA extension."""
    spec = importlib.util.find_spec("mamba_ssm")
    assert spec is not None
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, "mamba_ssm", importlib.util.module_from_spec(spec))
        monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        properties = SimpleNamespace(multi_processor_count=1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        module = "mamba_ssm.ops.triton.ssd_combined"
        with interpreted(module):
            yield sys.modules[module].mamba_chunk_scan_combined
        for name in [name for name in sys.modules if name.startswith("mamba_ssm.")]:
            del sys.modules[name]


def tensors_for(options: Options) -> tuple[Tensors, Options]:
    """Random float32 inputs with gradients, and the options that are no tensors."""
    torch.manual_seed(0)
    row = (1, sum(LENGTHS))
    tensors = {
        "x": torch.randn(*row, HEADS, WIDTH),
        "dt": torch.randn(*row, HEADS),
        "A": -torch.rand(HEADS) - 0.1,
        "B": torch.randn(*row, GROUPS, STATE) / 2,
        "C": torch.randn(*row, GROUPS, STATE) / 2,
    }
    shapes = {name: value for name, value in options.items() if name in ("D", "z", "dt_bias")}
    tensors |= {name: torch.randn(shape) for name, shape in shapes.items()}
    rest = {name: value for name, value in options.items() if name not in shapes}
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}, rest


def numbers_of(segments: tuple[int, ...]) -> torch.Tensor:
    """`seq_idx` of shape `[1, T]`."""
    return torch.arange(len(segments), dtype=torch.int32).repeat_interleave(torch.tensor(segments))[None]


def with_gradients(output: torch.Tensor, tensors: Tensors) -> Tensors:
    """The output and the gradients of a weighted sum of it."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(output, list(tensors.values()), weights)
    return {"output": output, **dict(zip(tensors, gradients, strict=True))}


def both(kernel: Scan, tensors: Tensors, options: Options, lengths: tuple[int, ...]) -> tuple[Scan, dict[str, Scan]]:
    """Calls of the kernel, and of our operation with the boundaries on the host and with those on the device."""
    numbers = numbers_of(lengths)
    named = {"hidden_states" if name == "x" else name: tensor for name, tensor in tensors.items()}
    return partial(kernel, **tensors, **options, chunk_size=KERNEL_CHUNK, seq_idx=numbers), {
        "lengths": partial(mamba2_scan, **named, **options, lengths=lengths),
        "seq_idx": partial(mamba2_scan, **named, **options, seq_idx=numbers),
    }


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_outputs_and_all_gradients_are_those_of_the_real_kernel(
    kernel: Scan, options: Options, lengths: tuple[int, ...]
) -> None:
    tensors, rest = tensors_for(options)
    theirs, ours = both(kernel, tensors, rest, lengths)
    expected = with_gradients(theirs(), tensors)
    for boundaries, scan in ours.items():
        found = with_gradients(scan(), tensors)
        differences = {name: relative_difference(found[name], expected[name]) for name in expected}
        assert max(differences.values()) < 1e-5, (boundaries, differences)


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_a_token_reads_its_own_segment_up_to_itself_in_both(kernel: Scan, lengths: tuple[int, ...]) -> None:
    tensors, rest = tensors_for(OPTIONS["skip-per-channel-and-gate"])
    theirs, ours = both(kernel, tensors, rest, lengths)
    for scan in (theirs, *ours.values()):
        output = scan()
        for start, length in zip(accumulate((0, *lengths[:-1])), lengths, strict=True):
            token = start + length // 2
            gradients = torch.autograd.grad(
                output[:, token].sum(), [tensors[name] for name in "xB"], retain_graph=True
            )
            for gradient in gradients:
                reached = gradient[0].flatten(1).ne(0).any(1).nonzero().flatten().tolist()
                assert reached == list(range(start, token + 1))


def test_agreement_depends_on_the_boundaries(kernel: Scan) -> None:
    tensors, rest = tensors_for(OPTIONS["softplus"])
    leaking = kernel(**tensors, **rest, chunk_size=KERNEL_CHUNK)
    _, apart = both(kernel, tensors, rest, LENGTHS)
    _, together = both(kernel, tensors, rest, (sum(LENGTHS),))
    for boundaries in apart:
        assert relative_difference(together[boundaries](), leaking) < 1e-5
        assert relative_difference(apart[boundaries](), leaking) > 1e-1
