"""
Tiny random models, built from configs in code: one for every causal LM type that transformers can build.

A tiny config is the type's own default config with its sizes replaced: `SIZES` holds what any type may have,
`OVERRIDES` what one type needs beside that. Layer lists are written out, so that every kind of layer occurs in 2 to 4
layers.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 128

# Replaces an attribute wherever a config has it, sub-configs included.
SIZES: dict[str, Any] = {
    # vocabulary
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "decoder_vocab_size": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 3,
    "cls_token_id": 1,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
    # width
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "emb_dim": 64,
    "embedding_dim": 64,
    "embedding_size": 64,
    "input_embedding_size": 64,
    "output_embedding_size": 64,
    "word_embed_proj_dim": 64,
    "attention_hidden_size": 64,
    "hidden_size_global": 64,
    "hidden_size_per_layer_input": 16,
    "backbone_hidden_size": 64,
    "lru_width": 64,
    "dim_model_base": 64,
    # feed-forward
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "dense_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64,
    "ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dim_ff": 64,
    "dff": 64,
    "d_ff": 64,
    "d_inner": 64,
    "n_inner": 64,
    "feed_forward_size": 64,
    # depth
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_layers_per_stack": 1,
    "num_blocks": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "num_kv_shared_layers": 0,
    "max_window_layers": 1,
    # attention
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "num_global_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "swa_head_dim": 16,
    "d_head": 16,
    "dim_head": 16,
    "d_kv": 16,
    "kv_channels": 16,
    "attention_head_dim": 32,
    "query_pre_attn_scalar": 16,
    "rotary_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 64,
    "sliding_window": 5,
    "sliding_window_size": 5,
    "attention_window_size": 5,
    "attention_chunk_size": 5,
    "window_size": 5,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    "context_length": 256,
    "max_source_positions": 64,
    "max_target_positions": 256,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "router_hidden_size": 32,
    # recurrences and convolutions
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_dt_rank": 4,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    "n_mamba_heads": 2,
    "n_groups": 2,
    "ssm_state_size": 16,
    "state_size": 16,
    "time_step_rank": 4,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "laurel_rank": 8,
    "adapter_rank": 4,
}

SLIDING_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR_FULL = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
LINEAR_INDEXED = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
DENSE_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
DENSE_SPARSE3 = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
MLA = {"num_key_value_heads": 4}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DECODER = {"is_decoder": True}

# What a type needs beside `SIZES`: its layer kinds, and sizes that depend on one another.
OVERRIDES: dict[str, dict[str, Any]] = {
    "afmoe": SLIDING_FULL,
    "axk1": MLA,
    "axk2": MLA,
    "bailing_hybrid": LINEAR_FULL | DENSE_SPARSE3 | MLA,
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "beam": DENSE_SPARSE,
    "bert": DECODER,
    "bert-generation": DECODER,
    "big_bird": DECODER | {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "camembert": DECODER,
    "cohere2": SLIDING_FULL,
    "cohere2_moe": SLIDING_FULL,
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE | {"mrope_section": [3, 3, 2]}}},
    "data2vec-text": DECODER,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": MLA | {"num_experts_per_tok": 2},
    "deepseek_v3": MLA | {"first_k_dense_replace": 1},
    "deepseek_v32": MLA | DENSE_SPARSE,
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "dots3_note_text": MLA,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "electra": DECODER,
    "ernie": DECODER,
    "exaone4": SLIDING_FULL,
    "exaone_moe": SLIDING_FULL,
    "flint": SLIDING_FULL | {"mlp_only_layers": [0]},
    "gemma3": {"text_config": SLIDING_FULL},
    "gemma3_text": SLIDING_FULL,
    "gemma3n_text": SLIDING_FULL | {"activation_sparsity_pattern": [0.0, 0.0]},
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA | DENSE_SPARSE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": LINEAR_FULL,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"]},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"]},
    "inkling2_loop_text": {"layer_types": ["hybrid_sliding", "hybrid"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LINEAR_FULL | DENSE_SPARSE3 | MLA,
    "kolibri1": SLIDING_FULL,
    "lara_mini": {"layer_types": ["linear_attention", "sliding_attention", "full_attention"], "num_hidden_layers": 3},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3},
    "llama4": {"text_config": {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    "longcat_flash": MLA | {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "megatron-bert": DECODER,
    "minicpm3": MLA,
    "ministral": {"head_dim": 16},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"]},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen3_5": {"text_config": LINEAR_FULL},
    "qwen3_5_moe": {"text_config": LINEAR_FULL},
    "qwen3_5_moe_text": LINEAR_FULL,
    "qwen3_5_text": LINEAR_FULL,
    "qwen3_next": LINEAR_FULL,
    "qwen4_exp": {"text_config": LINEAR_INDEXED},
    "qwen4_exp_text": LINEAR_INDEXED,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": DECODER | {"axial_pos_embds": False},
    "olmo3": SLIDING_FULL,
    "olmo_hybrid": LINEAR_FULL,
    "rembert": DECODER,
    "roberta": DECODER,
    "roberta-prelayernorm": DECODER,
    "roc_bert": DECODER,
    "roformer": DECODER,
    "sarvam_mla": MLA,
    "smollm3": {"no_rope_layers": [1, 0]},
    "xlm": {"causal": True},
    "xlm-roberta": DECODER,
    "xlm-roberta-xl": DECODER,
    "xlnet": {"attn_type": "uni"},
    "xmod": DECODER | {"default_language": "en_XX"},
    "youtu": MLA,
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "attention_hidden_size": 128,
    },
    "zaya": {"num_experts_per_tok": 1},
}

# Types whose causal LM class takes another config than the one of their name.
CONFIG_OF = {"musicgen": "musicgen_decoder", "musicgen_melody": "musicgen_melody_decoder"}

# Two draft models that read another model's states, one that needs timm, one whose layers have configs of their own.
NOT_BUILDABLE = {"gemma4_assistant", "gemma4_unified_assistant", "gemma3n", "dots3_note"}

TINY_TYPES: list[str] = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_BUILDABLE)


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """
    Build the tiny config of a model type, without dropout or router noise.

    Args:
        model_type (`str`):
            A key of transformers' causal LM mapping.
        **overrides:
            Attributes of the (outer) config that replace the tiny ones.

    Returns:
        `PreTrainedConfig`: With a vocabulary of 128 and 2 to 4 layers.
    """
    config_class = CONFIG_MAPPING[CONFIG_OF.get(model_type, model_type)]
    return config_class(**_tiny_kwargs(config_class(), OVERRIDES.get(model_type, {}) | overrides))


def tiny_model(
    model_type: str,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    *,
    seed: int = 0,
    **config_overrides: Any,
) -> PreTrainedModel:
    """
    Build a tiny random model, the same one for the same arguments.

    Args:
        model_type (`str`):
            A key of transformers' causal LM mapping.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Of the parameters.
        attn_implementation (`str`, *optional*):
            Attention to use. The default is the type's own choice.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the weights. The global generator is left as it was.
        **config_overrides:
            Attributes of the config that replace the tiny ones.

    Returns:
        `PreTrainedModel`: In train mode, on the CPU.
    """
    config = tiny_config(model_type, **config_overrides)
    kwargs = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model_type in CONFIG_OF:
            model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])._from_config(
                config, dtype=dtype, **kwargs
            )
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)
    return model.train()


def _tiny_kwargs(config: PreTrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            kwargs[name] = {"model_type": value.model_type, **_tiny_kwargs(value, overrides.get(name, {}))}
        elif name in SIZES and value is not None:
            kwargs[name] = SIZES[name]
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            kwargs[name] = 0.0
    return kwargs | {name: value for name, value in overrides.items() if not isinstance(kwargs.get(name), dict)}
