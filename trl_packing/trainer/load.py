"""What the trainer is built from: its settings, its collator, and a model loaded with the attention that fits."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, PreTrainedModel, TrainingArguments, set_seed
from trl import SFTConfig
from trl.trainer.utils import create_model_from_path, get_config_model_id

from ..collator import PackedCollator
from ..config import PackedSFTConfig
from ..errors import PackingError
from ..lora.quantized import quantizes_with_bitsandbytes, refuse_idle_quantization
from ..memory.model import build_on_meta
from ..preflight import choose_attention
from ..register import register_ops


def packed_config(args: TrainingArguments | None, model: str | PreTrainedModel) -> PackedSFTConfig:
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return PackedSFTConfig(f"{name.split('/')[-1]}-SFT")
    if isinstance(args, SFTConfig):
        return PackedSFTConfig.from_sft(args)
    if isinstance(args, TrainingArguments):
        # `to_dict` hides the token.
        return PackedSFTConfig(**{**args.to_dict(), "hub_token": args.hub_token})
    raise PackingError(f"`args` must be a `PackedSFTConfig`, but it is a {type(args).__name__}.")


def packed_collator(args: PackedSFTConfig) -> PackedCollator:
    fixed = args.row_shape == "fixed"
    return PackedCollator(
        pad_to_multiple_of=args.pad_to_multiple_of,
        token_budget=args.row_budget if fixed else None,
        max_segments=args.max_segments if fixed else None,
        # Python integers are constants of a compiled graph: every row would be compiled anew.
        host_offsets=not args.torch_compile,
    )


def load_model(
    name: str, args: PackedSFTConfig, processing_class: Any, quantization_config: Any
) -> tuple[PreTrainedModel, Any]:
    """Load a model as TRL does, with the attention that `auto` stands for, and its processing class."""
    kwargs = dict(args.model_init_kwargs or {})
    if quantization_config is not None:
        if "quantization_config" in kwargs:
            raise PackingError(
                "`quantization_config` is set both as a trainer argument and in `model_init_kwargs`. Set one of them."
            )
        kwargs["quantization_config"] = quantization_config
    if args.distributed_state.distributed_type in ("MULTI_GPU", "MULTI_CPU", "DEEPSPEED"):
        kwargs["device_map"] = None
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    origin = {"revision": kwargs.get("revision"), "trust_remote_code": kwargs["trust_remote_code"]}
    if quantizes_with_bitsandbytes(kwargs.get("quantization_config")):
        # Before weights are loaded, which takes long for the models that gain nothing.
        config = AutoConfig.from_pretrained(name, **origin)
        refuse_idle_quantization(build_on_meta(config, torch.bfloat16, peft_config=None))
    if kwargs.get("attn_implementation") in (None, "auto"):
        register_ops()
        config = AutoConfig.from_pretrained(name, **origin)
        choice, reason = choose_attention(config, kwargs.get("dtype", "float32"), args.device)
        if args.distributed_state.is_main_process:
            print(f"Attention: {choice} ({reason}).")
        kwargs["attn_implementation"] = choice
    set_seed(args.seed)
    model = create_model_from_path(name, **kwargs)
    if processing_class is None:
        processing_class = AutoProcessor.from_pretrained(name, **origin)
    return model, processing_class
