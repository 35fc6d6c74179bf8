"""`row_shape: fixed`: one shape for all rows of a run, few bounds, and the numbers of exact rows."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from training import conversations, losses, model_of, packed_trainer, tokens_of

from trl_packing import Boundaries, PackedCollator, PackingError, register_ops
from trl_packing.collator import ROW_INFO, RowCollator

FIXED = {"packing": True, "token_budget": 320, "max_segments": 12}


def samples(lengths):
    return [
        {"input_ids": np.arange(3, 3 + length), "labels": np.arange(3, 3 + length), "fragment": index}
        for index, length in enumerate(lengths)
    ]


def test_every_row_has_one_shape_fillers_included():
    collate = RowCollator(PackedCollator(token_budget=64, max_segments=6, host_offsets=True))
    rows = [collate(samples(lengths)) for lengths in ([64], [1] * 6, [5, 30], [20, 20, 20], [])]
    shapes = {
        tuple((key, tuple(value.shape)) for key, value in row.items() if isinstance(value, torch.Tensor))
        for row in rows
    }
    assert len(shapes) == 1
    assert dict(shapes.pop())["cu_seq_lens_q"] == (8,)
    assert {len(row["cu_seqlens_cpu"]) for row in rows} == {8}
    assert [row[ROW_INFO].num_targets for row in rows] == [63, 0, 33, 57, 0]


def test_the_bound_takes_few_values_and_always_holds_the_longest_segment():
    """The alignment tail of a row counts as a segment, because kernels compute it."""
    collate = PackedCollator(token_budget=1000, max_segments=1000)
    bounds = set()
    for longest in range(1, 1001, 3):
        _, boundaries = collate.pack(samples([longest] * (1000 // longest)))
        assert boundaries.max_seqlen >= max(boundaries.lengths)
        bounds.add(boundaries.max_seqlen)
    assert bounds == {125, 250, 500, 1000}


def test_exact_rows_keep_their_exact_bound():
    row = PackedCollator(token_budget=64)(samples([5, 9]))
    assert row["max_length_q"] == 9


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_losses_are_those_of_exact_rows(model_type, tmp_path):
    runs = []
    for row_shape in ("exact", "fixed"):
        trainer = packed_trainer(
            tmp_path,
            conversations(),
            model=model_of(model_type=model_type),
            row_shape=row_shape,
            max_steps=3,
            gradient_accumulation_steps=2,
            router_aux_loss_coef=0.0,
            # Which micro-step a row is dealt to may depend on the room that its shape leaves.
            balance="none",
            **FIXED,
        )
        trainer.train()
        entries = trainer.state.log_history[:3]
        runs.append([[entry[key] for key in ("loss", "grad_norm", "entropy", "num_tokens")] for entry in entries])
        assert len(losses(trainer)) == 3
    np.testing.assert_allclose(runs[0], runs[1], rtol=2e-5)


# Two samples a row, of at most 30 and 25 tokens.
FLAT = {"packing": False, "row_shape": "fixed", "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_segments": 1, "token_budget": 64}, "Set `max_segments: 2`"),
        ({"max_segments": 2, "token_budget": 54}, "Set `token_budget: 55`"),
        ({"max_segments": 2, "token_budget": 64, "per_device_eval_batch_size": 3}, "Set `max_segments: 3`"),
    ],
    ids=["training samples", "training tokens", "evaluation"],
)
@pytest.mark.parametrize("is_stream", [False, True], ids=["", "stream"])
def test_batches_that_may_not_fit_into_the_shape_are_refused_before_training(overrides, message, is_stream, tmp_path):
    data, max_steps = tokens_of(30, 20, 25, 10), 2
    if is_stream:
        data, message = data.to_iterable_dataset(), message.replace("55", "60")
    with pytest.raises(PackingError, match=message):
        packed_trainer(tmp_path, data, eval_data=data, max_length=30, max_steps=max_steps, **{**FLAT, **overrides})


def test_an_evaluation_sample_that_is_longer_than_the_shape_is_refused_before_training(tmp_path):
    settings = {**FLAT, "eval_packing": True, "max_length": None, "max_segments": 2, "token_budget": 55}
    with pytest.raises(PackingError, match="a sample may need 56"):
        packed_trainer(tmp_path, tokens_of(30, 20), eval_data=tokens_of(56, 10), max_steps=1, **settings)


def test_batches_that_fit_into_the_shape_exactly_are_trained(tmp_path):
    data = tokens_of(30, 20, 25, 10)
    trainer = packed_trainer(
        tmp_path, data, eval_data=data, max_length=30, max_segments=2, token_budget=55, num_train_epochs=3, **FLAT
    )
    trainer.train()
    trainer.evaluate()
    assert len(losses(trainer)) == 6


@pytest.mark.parametrize("host_offsets", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "bamba", "kimi_linear", "lfm2"])
def test_repeated_tail_offsets_change_nothing(model_type, host_offsets):
    """Our operations and the segment attention: logits and gradients are those without the repeated offsets."""
    register_ops()
    model = tiny_model(model_type, attn_implementation="varlen").eval()
    register_ops(model)
    input_ids = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(0))
    results = []
    for num_offsets in (0, 9):
        boundaries = Boundaries((11, 6, 1, 6), num_offsets=num_offsets)
        model.zero_grad()
        kwargs = boundaries.to_model_kwargs(host_offsets=host_offsets)
        logits = model(input_ids, use_cache=False, **kwargs).logits
        logits.square().sum().backward()
        gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        results.append((logits.detach(), gradients))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(first, second) for first, second in zip(results[0][1], results[1][1], strict=True))
