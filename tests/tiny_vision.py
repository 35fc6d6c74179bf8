"""Tiny vision-language models and processors, built in code without torchvision, and conversations about noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3Processor,
    LlavaConfig,
    LlavaProcessor,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trl_packing.quickstart.tiny import byte_tokenizer

TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{ 'IMAGE' }}{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
"""
TEXT = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
    "bos_token_id": None,
    "eos_token_id": 258,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# Ids after the 259 of the tokenizer.
QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
QWEN_IDS = dict(
    zip(
        ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        range(259, 263),
        strict=True,
    )
)


class ImagesOnly(Qwen2_5_VLProcessor):
    """Without a video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


def tiny_processor(model_type: str) -> ProcessorMixin:
    tokenizer = byte_tokenizer()
    if model_type == "llava":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
        return LlavaProcessor(
            images,
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=TEMPLATE.replace("IMAGE", "<image>"),
        )
    if model_type == "idefics3":
        edge = {"longest_edge": 28}
        images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
        template = TEMPLATE.replace("IMAGE", "<image>")
        return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN_TOKENS)})
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=112 * 112, patch_size=14, merge_size=2)
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    return ImagesOnly(images, tokenizer, chat_template=template)


def tiny_vision_model(model_type: str, attn_implementation: str = "sdpa", seed: int = 0) -> Any:
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    if model_type == "llava":
        vision = CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        )
        text = {"model_type": "llama", **TEXT}
        config: Any = LlavaConfig(vision_config=vision, text_config=text, image_token_id=259)
    elif model_type == "idefics3":
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
        vision |= {"image_size": 28, "patch_size": 7}
        text = {"model_type": "llama", **TEXT}
        config = Idefics3Config(
            vision_config=vision, text_config=text, scale_factor=2, image_token_id=260, pad_token_id=256
        )
    elif model_type == "qwen2_5_vl":
        vision = {**tower, "depth": 2, "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]}
        text = {**TEXT, "rope_parameters": MROPE}
        config = Qwen2_5_VLConfig(vision_config=vision, text_config=text, **QWEN_IDS)
    elif model_type == "qwen3_5":
        config = _qwen3_5(tower)
    else:
        vision = {**tower, "depth": 2, "out_hidden_size": 64, "patch_size": 14, "num_position_embeddings": 64}
        vision["deepstack_visual_indexes"] = [0]
        text = {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
        config_class: Any = Qwen3VLConfig
        if model_type == "qwen3_vl_moe":
            config_class = Qwen3VLMoeConfig
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = config_class(vision_config=vision, text_config=text, **QWEN_IDS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=attn_implementation)
    return model.train()


def _qwen3_5(tower: dict[str, Any]) -> Any:
    vision = {**tower, "depth": 2, "out_hidden_size": 64, "patch_size": 14, "num_position_embeddings": 64}
    text = {
        **TEXT,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0, "mrope_interleaved": True},
    }
    return Qwen3_5Config(vision_config=vision, text_config=text, **QWEN_IDS)


def picture_talks(number: int = 8, seed: int = 0, completions: bool = False) -> Dataset:
    """Conversations about none, one or two images of different sizes."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(number):
        sizes = rng.choice([28, 56, 84], size=((1, 0, 2, 1)[index % 4], 2))
        images = [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
        question = {"role": "user", "content": "what is this " * int(rng.integers(1, 4))}
        answer = {"role": "assistant", "content": "noise " * int(rng.integers(1, 9))}
        if completions:
            rows.append({"images": images, "prompt": [question], "completion": [answer]})
        else:
            rows.append({"images": images, "messages": [question, answer]})
    return Dataset.from_list(rows)
