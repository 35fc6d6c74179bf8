"""What a row costs: the pairs a layer looks at, the matrices a token passes, and known models."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3NextConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trl_packing.cost import PairWork, RowCost, linear_work
from trl_packing.layers import layer_kinds


def visible_pairs(length: int, reach: str, width: float) -> int:
    """Count by definition the pairs of a token and an earlier one, or itself, that a layer looks at."""
    rows, columns = np.indices((length, length))
    visible = columns <= rows
    if reach == "sliding":
        visible &= rows - columns < width
    if reach == "chunked":
        visible &= rows // width == columns // width
    return int(visible.sum())


@pytest.mark.parametrize("length", [1, 4, 5, 17, 64, 65])
@pytest.mark.parametrize(("reach", "width"), [("full", np.inf), ("sliding", 5), ("sliding", 64), ("chunked", 16)])
def test_pairs_are_counted_by_what_a_layer_sees(length, reach, width):
    pairs = PairWork(reach, width, 1.0).pairs(np.array([length], dtype=np.float64))[0]
    # The smooth form counts half of each token's pair with itself.
    assert abs(visible_pairs(length, reach, width) - pairs) <= length / 2


def test_known_models_cost_what_was_measured():
    llama = LlamaConfig(intermediate_size=14_336, num_key_value_heads=8, vocab_size=128_256)
    assert RowCost.from_config(llama).quadratic == pytest.approx(2.04e-5, rel=0.01)
    assert RowCost.from_config(Qwen3NextConfig()).quadratic == pytest.approx(1.57e-5, rel=0.01)


def test_a_frozen_base_makes_attention_weigh_more():
    config = tiny_config("llama")
    trained, frozen = RowCost.from_config(config), RowCost.from_config(config, frozen_base=True)
    assert frozen.quadratic == pytest.approx(1.5 * trained.quadratic)


def test_only_full_layers_are_quadratic():
    config = tiny_config("qwen3_next")
    assert sorted(set(layer_kinds(config))) == ["full_attention", "linear_attention"]
    plain = RowCost.from_config(tiny_config("llama"))
    hybrid = RowCost.from_config(config)
    assert 0 < hybrid.quadratic < plain.quadratic


def test_a_sliding_layer_costs_the_same_per_token_beyond_its_window():
    cost = RowCost.from_config(tiny_config("mistral", sliding_window=8))
    assert [work.reach for work in cost.pair_works] == ["sliding"]
    growth = np.diff(cost.per_segment([8, 1_008, 2_008]))
    assert growth[0] == pytest.approx(growth[1])
    assert RowCost.from_config(tiny_config("mistral", sliding_window=None)).pair_works[0].reach == "full"


def test_each_reach_of_a_mixed_model_is_counted_apart():
    cost = RowCost.from_config(tiny_config("gemma2", sliding_window=8))
    assert {(work.reach, work.width) for work in cost.pair_works} == {("full", np.inf), ("sliding", 8.0)}
    chunked = RowCost.from_config(tiny_config("llama4_text", attention_chunk_size=8))
    assert ("chunked", 8.0) in {(work.reach, work.width) for work in chunked.pair_works}


def test_without_attention_a_row_costs_its_tokens():
    cost = RowCost.from_config(tiny_config("mamba2"))
    assert cost([3, 500]) == 503.0
    assert RowCost()([3, 500]) == 503.0


@pytest.mark.parametrize("indices", [[1], []], ids=str)
def test_attention_layers_named_by_index_are_found(indices):
    config = tiny_config("bamba")
    bare = type("Bare", (), dict(config.to_dict(), layer_types=None, attn_layer_indices=indices, model_type="bamba"))
    assert layer_kinds(bare).count("full_attention") == len(indices)


def test_many_rows_at_once_cost_what_each_costs():
    cost = RowCost.from_config(tiny_config("gemma2"))
    rows = [[5, 100], [1], [17, 3, 900]]
    lengths, offsets = [length for row in rows for length in row], [0, 2, 3, 6]
    assert cost.per_row(lengths, offsets).tolist() == pytest.approx([cost(row) for row in rows])


def matrix_entries(config) -> float:
    """Entries of the matrices that a token passes through in the real model, its chosen experts only."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    total = float(config.vocab_size * config.hidden_size)
    for name, weight in model.named_parameters():
        if id(weight) in embeddings or name.startswith("lm_head") or "conv1d" in name or ".conv.conv." in name:
            continue
        if weight.ndim == 3:
            total += weight.numel() * chosen / num_experts
        elif weight.ndim == 2:
            total += weight.numel()
    return total


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gemma2", "gpt2", "gpt_neox", "mistral", "mixtral", "qwen3_moe", "deepseek_v3", "lfm2", "llama4_text"],
)
def test_linear_work_counts_the_models_matrices(model_type):
    config = tiny_config(model_type)
    assert linear_work(config) == pytest.approx(matrix_entries(config), rel=0.03)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "bamba", "falcon_h1", "nemotron_h", "jamba"])
def test_linear_work_counts_the_matrices_of_hybrids_and_their_scans(model_type):
    config = tiny_config(model_type)
    matrices = matrix_entries(config)
    # Scans are a few percent of a real model and far more of a tiny one.
    assert matrices <= 1.03 * linear_work(config)
    assert linear_work(config) < 4 * matrices


# These have no text configuration of their own.
# The tiny config of dots3_note is not valid.
WITHOUT_TEXT = {"dots3_note", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}


@pytest.mark.parametrize("model_type", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - WITHOUT_TEXT))
def test_every_causal_language_model_has_a_cost(model_type):
    cost = RowCost.from_config(tiny_config(model_type).get_text_config())
    values = cost.per_segment([1, 100, 2_000])
    assert np.isfinite(values).all()
    assert (values >= [1, 100, 2_000]).all()
