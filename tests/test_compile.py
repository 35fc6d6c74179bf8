"""`torch.compile` on packed rows of one shape: no graph break by boundaries, few graphs, and the numbers of eager."""

import os

import pytest
import torch
from accelerate.state import AcceleratorState
from tiny_models import tiny_model
from torch._dynamo.utils import counters
from training import losses, model_of, packed_trainer

from trl_packing import PackedCollator, register_ops
from trl_packing.ops import masked_attention

# Without experts, which are slow to compile; the hybrid layers are the same.
DENSE = {"qwen3_next": {"mlp_only_layers": [0, 1, 2]}}
BUDGET = 96
LAYOUTS = [[90], [40, 41, 9], [20] * 4, [12] * 8, [5, 11, 2, 30, 1, 40], [3] * 30, [47, 48], [96], [11, 12, 23, 48, 2]]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    # What `torch_compile` leaves behind in the process.
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO")]:
        del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)


def rows(collate, layouts):
    generator = torch.Generator().manual_seed(0)
    for lengths in layouts:
        samples = [{"input_ids": torch.randint(3, 100, (length,), generator=generator)} for length in lengths]
        row = collate(samples)
        del row["labels"]
        yield row


def loss_and_gradients(model, parameters, row):
    for parameter in parameters:
        parameter.grad = None
    loss = model(use_cache=False, **row).logits.square().mean()
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in parameters]


def build(model_type):
    register_ops()
    model = tiny_model(model_type, attn_implementation="varlen", **DENSE.get(model_type, {})).train()
    register_ops(model)
    return model


def test_rows_of_many_blocks_compile_once_per_bound(monkeypatch):
    """Here the bound decides how many keys a block of queries reads."""
    monkeypatch.setattr(masked_attention, "_QUERY_BLOCK", 16)
    check_compiled_rows(build("llama"))


@pytest.mark.parametrize(
    "model_type",
    ["llama", "qwen3_next", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "bamba"))],
)
def test_ragged_rows_compile_once_per_bound_without_a_break(model_type):
    check_compiled_rows(build(model_type))


def test_a_mixture_of_experts_compiles_where_its_experts_are_multiplied_in_batches():
    """`grouped_mm`, the default, has no backward pass on a CPU under torch.compile; `eager` loops over data."""
    register_ops()
    model = tiny_model("qwen3_next", attn_implementation="varlen").train()
    register_ops(model)
    model.set_experts_implementation("batched_mm")
    check_compiled_rows(model)


def check_compiled_rows(model):
    compiled = torch.compile(model, backend="aot_eager")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bounds = set()
    for row in rows(PackedCollator(token_budget=BUDGET, max_segments=30), LAYOUTS):
        bounds.add(row["max_length_q"])
        fast, expected = (loss_and_gradients(called, parameters, row) for called in (compiled, model))
        torch.testing.assert_close(fast, expected, rtol=1e-4, atol=1e-6)
    assert len(bounds) == 4
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2 * len(bounds)


def test_host_offsets_in_a_compiled_row_would_compile_every_layout():
    """Why the trainer leaves them out, and that the count above can fail."""
    compiled = torch.compile(build("llama"), backend="eager")
    collate = PackedCollator(token_budget=BUDGET, max_segments=30, host_offsets=True)
    layouts = [[40, 41, 9], [42, 40], [41, 43, 2, 1]]
    for row in rows(collate, layouts):
        compiled(use_cache=False, **row)
    assert counters["stats"]["unique_graphs"] == len(layouts)


def test_exact_rows_would_compile_almost_every_row():
    """Why the trainer warns of them. PyTorch gives up after 8."""
    compiled = torch.compile(build("llama"), backend="eager")
    for row in rows(PackedCollator(), LAYOUTS[:6]):
        compiled(use_cache=False, **row)
    assert counters["stats"]["unique_graphs"] >= 5


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_a_compiled_epoch_logs_what_an_eager_one_does(model_type, tmp_path):
    from test_device_reads import dataset

    runs = []
    for compiled in (False, True):
        trainer = packed_trainer(
            tmp_path,
            dataset(40),
            model=model_of(model_type=model_type, **DENSE.get(model_type, {})),
            packing=True,
            row_shape="fixed",
            max_segments=24,
            max_length=24,
            token_budget=BUDGET,
            num_train_epochs=1,
            gradient_accumulation_steps=2,
            # Without an expert there is nothing to balance.
            router_aux_loss_coef=0.0,
            torch_compile=compiled,
            torch_compile_backend="aot_eager" if compiled else None,
        )
        trainer.train()
        runs.append(losses(trainer))
    assert len(runs[0]) >= 3
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    assert trainer.data_collator.host_offsets is False
    # TRL's fused head is not traceable; the rows' boundaries break nothing.
    assert all("out=" in reason for reason in counters["graph_break"])
    num_bounds = len({row["max_length_q"] for row in trainer.get_train_dataloader()})
    # The head's break leaves one graph before it, with all layers, and one after it.
    assert 1 <= counters["stats"]["unique_graphs"] <= 2 * 2 * num_bounds
