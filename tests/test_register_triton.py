"""The real Triton kernels of flash-linear-attention agree with our operations through the dispatcher, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from comparing import (
    alone_logits,
    gradients_of,
    largest_difference,
    packed_logits,
    relative_difference,
    summed_loss,
    token_ids,
)
from interpreting import interpreted
from tiny_models import tiny_model

from trl_packing.register import kernel_calls
from trl_packing.register.dispatch import describe_layers, install_dispatchers

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

LENGTHS = (30, 1, 66, 12)
IDS = token_ids(LENGTHS)


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    with interpreted("fla.modules.causal_conv1d", "fla.ops.gated_delta_rule", "fla.ops.kda"):
        yield


@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear"])
def test_real_kernels_agree_with_our_operations(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(model_type, attn_implementation="sdpa")
    install_dispatchers(model)

    def run() -> tuple[Any, dict[str, Any]]:
        logits = packed_logits(model, IDS, LENGTHS, host_offsets=True)
        return logits, gradients_of(model, lambda: summed_loss(logits, IDS, LENGTHS))

    ours, our_gradients = run()
    monkeypatch.setattr(kernel_calls, "KERNEL_DEVICES", ("cpu",))
    assert {choice.implementation for choice in describe_layers(model)} == {"kernel", "fla convolution"}
    theirs, their_gradients = run()
    assert relative_difference(theirs, ours) < 1e-5
    assert largest_difference(their_gradients, our_gradients) < 1e-5


def test_flash_linear_attention_installed_and_tensors_on_the_cpu() -> None:
    model = tiny_model("qwen3_next", attn_implementation="sdpa")
    install_dispatchers(model)
    packed = packed_logits(model, IDS, LENGTHS)
    assert relative_difference(packed, alone_logits(model, IDS, LENGTHS)) < 1e-5
    assert model.eval().generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, 111)
