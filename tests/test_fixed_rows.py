"""`row_shape: fixed`: one shape for all rows of a run, few bounds, and the numbers of exact rows."""

import re

import numpy as np
import pytest
import torch
from datasets import Dataset
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


FLAT = {
    "packing": False,
    "row_shape": "fixed",
    "max_length": 30,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 2,
}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_segments": 1, "token_budget": 64}, "Set that, or lower `per_device_train_batch_size`"),
        ({"max_segments": 1, "token_budget": 54}, "may need `max_segments: 2` and `token_budget: 55`"),
        ({"max_segments": 2, "token_budget": 48, "pad_to_multiple_of": 8}, "may need `token_budget: 56`"),
        (
            {"max_segments": 2, "per_device_eval_batch_size": 3},
            "`per_device_eval_batch_size: 3`. may need `max_segments: 3`",
        ),
    ],
    ids=["samples", "tokens too", "multiple", "evaluation"],
)
def test_batches_that_may_not_fit_into_the_shape_are_refused_before_training(overrides, message, tmp_path):
    data = tokens_of(30, 20, 25, 10)
    with pytest.raises(PackingError, match=message):
        packed_trainer(tmp_path, data, eval_data=data, **{**FLAT, **overrides})


def test_every_sample_of_a_stream_may_be_as_long_as_max_length(tmp_path):
    data = tokens_of(30, 20, 25, 10).to_iterable_dataset()
    with pytest.raises(PackingError, match="may need `token_budget: 60`"):
        packed_trainer(tmp_path, data, **{**FLAT, "max_segments": 2, "token_budget": 55})
    trainer = packed_trainer(tmp_path, data, **{**FLAT, "max_segments": 2, "token_budget": 60})
    trainer.train()


def test_what_the_refusal_names_is_enough(tmp_path):
    data = tokens_of(30, 20, 25, 10)
    small = {**FLAT, "max_segments": 1, "token_budget": 8, "pad_to_multiple_of": 8}
    with pytest.raises(PackingError, match="Rows have the shape of") as refusal:
        packed_trainer(tmp_path, data, eval_data=data, **small)
    needed = re.findall(r"`(\w+): (\d+)`", str(refusal.value).partition("may need")[2])
    assert [name for name, _ in needed] == ["max_segments", "token_budget"]
    trainer = packed_trainer(
        tmp_path, data, eval_data=data, **{**small, **{name: int(value) for name, value in needed}}
    )
    trainer.train()
    trainer.evaluate()


def test_rows_in_data_order_are_refused_only_where_they_do_not_fit(tmp_path):
    """Long and short samples in turns: the two longest never meet."""
    data, shape = tokens_of(29, 2, 28, 3), {"max_segments": 2, "token_budget": 31}
    with pytest.raises(PackingError, match="token_budget: 57"):
        packed_trainer(tmp_path, data, **{**FLAT, **shape})
    trainer = packed_trainer(
        tmp_path, data, eval_data=data, **{**FLAT, **shape, "train_sampling_strategy": "sequential"}
    )
    trainer.train()
    trainer.evaluate()


def test_an_evaluation_set_that_does_not_fit_is_named(tmp_path):
    settings = {**FLAT, "eval_packing": True, "max_length": None, "max_segments": 2, "token_budget": 55}
    sets = {"short": tokens_of(30, 20), "long": tokens_of(56, 10)}
    with pytest.raises(PackingError, match=r"Evaluation set `long`: .* a sample may need `token_budget: 56`"):
        packed_trainer(tmp_path, tokens_of(30, 20), eval_data=sets, **settings)


@pytest.mark.parametrize(
    "overrides", [{}, {"row_shape": "exact", "eval_packing": True}], ids=["fixed", "packed evaluation"]
)
def test_a_stream_without_a_longest_sample_is_refused_where_rows_have_a_limit(overrides, tmp_path):
    data = tokens_of(30, 20).to_iterable_dataset()
    settings = {**FLAT, "max_length": None, "max_segments": 8, "token_budget": 90, **overrides}
    with pytest.raises(PackingError, match="Set `max_length`"):
        packed_trainer(tmp_path, data, eval_data=data, **settings)


def test_a_multiple_that_leaves_no_room_for_a_sample_is_refused(tmp_path):
    settings = {"packing": True, "row_shape": "fixed", "max_segments": 4, "max_length": 300, "pad_to_multiple_of": 64}
    with pytest.raises(PackingError, match="Set `token_budget: 320`"):
        packed_trainer(tmp_path, tokens_of(300, 20), token_budget=310, **settings)
    trainer = packed_trainer(tmp_path, tokens_of(300, 20), token_budget=330, max_steps=1, **settings)
    # The largest multiple within the budget.
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape == (1, 320)


@pytest.mark.parametrize("packing", [True, False])
def test_data_that_came_packed_is_refused(packing, tmp_path):
    data = Dataset.from_list([{"input_ids": [5] * 20, "seq_lengths": [10, 10]}] * 4)
    with pytest.raises(PackingError, match="packed already"):
        packed_trainer(tmp_path, data, **{**FLAT, "packing": packing, "max_segments": 4})


def test_batches_that_fit_into_the_shape_exactly_are_trained(tmp_path):
    data = tokens_of(30, 20, 25, 10)
    trainer = packed_trainer(
        tmp_path, data, eval_data=data, **{**FLAT, "max_segments": 2, "token_budget": 55, "max_steps": 6}
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
