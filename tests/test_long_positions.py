"""Models whose positions depend on the longest sample of the row: refused where a sample may be that long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from training import VOCAB_SIZE, packed_trainer, tokens_of

from trl_packing import Boundaries, LeakError, PackingError, check_isolation, pack_rows, register_ops
from trl_packing.isolation.reach import length_limits

_LIMIT = 100
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.2, 1.5, 2, 4, 8, 16, 32],
    "original_max_position_embeddings": _LIMIT,
}
_ROPES = {
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": _LIMIT,
    },
    "longrope": {"rope_parameters": _LONG, "max_position_embeddings": 8 * _LIMIT},
}


@pytest.fixture(params=list(_ROPES))
def model(request):
    return roped(request.param)


def roped(kind: str) -> Any:
    register_ops()
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return tiny_model(
        "llama", attn_implementation="varlen", vocab_size=VOCAB_SIZE, initializer_range=0.2, **sizes, **_ROPES[kind]
    )


def move_of_a_short_sample(model: Any, longest: int) -> float:
    """How far a sample of 20 tokens moves when it shares its row with one of `longest`."""
    boundaries = Boundaries.from_lengths([longest, 20])
    input_ids = torch.tensor([[token for row in tokens_of(longest, 20)["input_ids"] for token in row]])
    with torch.no_grad():
        packed = model(input_ids, use_cache=False, **boundaries.to_model_kwargs()).logits[:, longest:]
        alone = model(input_ids[:, longest:], use_cache=False).logits
    return float((packed - alone).norm() / alone.norm())


def test_the_limit_is_where_upstream_starts_to_mix(model):
    (limit,) = length_limits(model)
    assert (limit.tokens, limit.is_of_row) == (_LIMIT, False)
    assert move_of_a_short_sample(model, _LIMIT) < 1e-5
    assert move_of_a_short_sample(model, _LIMIT + 1) > 1e-3


@pytest.mark.parametrize(
    ("lengths", "overrides"),
    [
        ((101, 20), {}),
        ((101, 20), {"packing": False}),
        ((101, 20), {"max_length": None, "token_budget": 400}),
        ((30, 20), {"row_shape": "fixed", "max_segments": 8, "token_budget": 400}),
    ],
    ids=["packed", "flat", "no_max_length", "alignment_tail"],
)
def test_a_sample_above_the_limit_is_refused(lengths, overrides, model, tmp_path):
    with pytest.raises(PackingError, match=r"up to 100 tokens.*(max_length|token_budget): 100"):
        packed_trainer(tmp_path, tokens_of(*lengths), model=model, **{"packing": True, **overrides})


def test_an_evaluation_sample_above_the_limit_is_refused(model, tmp_path):
    with pytest.raises(PackingError, match="max_length: 100"):
        packed_trainer(tmp_path, tokens_of(30), model=model, eval_data=tokens_of(101, 20), packing=True)


def test_a_stream_is_refused_by_its_longest_possible_sample(model, tmp_path):
    stream = tokens_of(30, 20).to_iterable_dataset()
    with pytest.raises(PackingError, match="a sample may have 256"):
        packed_trainer(tmp_path, stream, model=model, packing=True, max_steps=1)
    packed_trainer(tmp_path, stream, model=model, packing=True, max_steps=1, max_length=_LIMIT)


@pytest.mark.parametrize(
    ("lengths", "overrides"),
    [
        ((100, 20), {}),
        ((130, 20), {"max_length": _LIMIT}),
        ((130, 20), {"packing": False, "per_device_train_batch_size": 1}),
    ],
    ids=["at_the_limit", "cut_to_it", "alone_in_its_row"],
)
def test_what_cannot_mix_is_trained(lengths, overrides, model, tmp_path):
    trainer = packed_trainer(
        tmp_path, tokens_of(*lengths), model=model, **{"packing": True, "max_steps": 1, **overrides}
    )
    trainer.train()
    assert "up to 100 tokens" in " ".join(trainer.isolation_report.notes)


def test_the_check_says_how_far_it_reaches_and_leaves_no_trace(model):
    report = check_isolation(model, lengths=(30, 1, 5, 40))
    assert report.ok
    assert "Proven for samples of up to 100 tokens only" in report.to_text()
    twin = roped(model.config.rope_parameters["rope_type"])
    check_isolation(model, lengths=(150, 1, 5, 70))
    long = torch.tensor([tokens_of(130)["input_ids"][0]])
    with torch.no_grad():
        assert torch.equal(model(long, use_cache=False).logits, twin(long, use_cache=False).logits)


def test_packed_rows_above_the_limit_are_refused(model):
    packed = pack_rows(input_ids=torch.randint(5, 250, (2, 130)), lengths=[130, 20])
    with pytest.raises(LeakError, match="up to 100 tokens, but this batch has 130"):
        packed.check(model)
    pack_rows(input_ids=torch.randint(5, 250, (2, 100)), lengths=[100, 20]).check(model)


def test_limits_are_found_in_nested_configs_and_per_layer_type():
    model = tiny_model("llama")
    assert length_limits(model) == []
    assert length_limits(tiny_model("gemma3_text")) == []
    text = SimpleNamespace(
        rope_parameters={"full_attention": {**_LONG, "original_max_position_embeddings": 50}, "sliding": None},
        max_position_embeddings=400,
    )
    model.config = SimpleNamespace(text_config=text)
    assert [limit.tokens for limit in length_limits(model)] == [50]
    model.config = SimpleNamespace(rope_scaling={"type": "dynamic"}, max_position_embeddings=70)
    assert [limit.tokens for limit in length_limits(model)] == [70]


def test_llama_4_counts_the_place_in_the_row(tmp_path):
    register_ops()
    model = tiny_model("llama4_text", attn_implementation="varlen", vocab_size=VOCAB_SIZE)
    attention = model.model.layers[0].self_attn
    attention.use_rope, attention.floor_scale = False, 64
    assert [(limit.tokens, limit.is_of_row) for limit in length_limits(model)] == [(63, True)]
    assert move_of_a_short_sample(model, 43) < 1e-5
    assert move_of_a_short_sample(model, 90) > 1e-5
    model.base_model_prefix = "model"
    with pytest.raises(PackingError, match=r"a row may have 256.*token_budget: 63"):
        packed_trainer(tmp_path, tokens_of(20, 20), model=model, packing=True, token_budget=256)
    with pytest.raises(PackingError, match=r"a row may have 80.*max_length: 15"):
        packed_trainer(tmp_path, tokens_of(20, 20), model=model)
