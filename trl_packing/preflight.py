"""
What can be known before the data is touched: settings that packing would break without a message, and the attention to
use.

Each setting is honoured or refused by name. The reasons are upstream's: see DESIGN in the comments beside each
refusal.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import is_flash_attn_2_available
from trl.data_utils import get_dataset_column_names

from . import _compat
from .config import PackedSFTConfig
from .errors import PackingError
from .isolation.reach import length_limits
from .isolation.row import unwrapped
from .lora import check_lora_targets, safe_lora_targets
from .lora.quantized import check_quantized_layers
from .register.attention import VARLEN, why_not_varlen
from .register.dispatch import refuse_unsupported
from .samples import validate_samples

_FLASH_DTYPES = (torch.float16, torch.bfloat16)


def refuse_settings(args: PackedSFTConfig, peft_config: Any, data_collator: Any) -> None:
    """
    Refuse settings that cannot be honoured in packed training. One that only makes it slow is warned of.

    Args:
        args ([`PackedSFTConfig`]):
            The run's settings.
        peft_config (`PeftConfig`, *optional*):
            The adapters to train.
        data_collator (*optional*):
            What the user passed.

    Raises:
        [`PackingError`]: Naming the setting and what to do instead.
    """
    from .collator import PackedCollator

    if data_collator is not None and not isinstance(data_collator, PackedCollator):
        raise PackingError(
            f"`PackedSFTTrainer` lays samples end to end itself, but `data_collator` is a "
            f"{type(data_collator).__name__}, which pads. Leave it out, or pass a `PackedCollator`."
        )
    if args.packing_strategy == "wrapped" and args.packing:
        raise PackingError(
            "`packing_strategy: wrapped` cuts samples wherever a row ends and lets them mix. Use `bfd`, or `overlong: "
            "split` to keep the tokens of long samples."
        )
    _refuse_trainer_settings(args)
    _refuse_prompt_learning(peft_config)
    if args.torch_compile and args.row_shape == "exact":
        warnings.warn(
            "`torch_compile: true` with `row_shape: exact` compiles again for almost every row, because each has its "
            "own shape, until PyTorch gives up and runs without. Set `row_shape: fixed` and `max_segments`.",
            stacklevel=3,
        )


def check_data(dataset: Any, args: Any, formatting_func: Any, name: str) -> Any:
    """
    Check that a data set has samples that TRL can prepare, before a model is loaded.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            As the user passed it.
        args ([`PackedSFTConfig`]):
            The run's settings.
        formatting_func (`Callable`, *optional*):
            The user's. It makes the text, of samples of any kind.
        name (`str`):
            Of the data set, for the message.

    Returns:
        `Dataset` or `IterableDataset`: The samples, as [`validate_samples`] gives them.

    Raises:
        [`PackingError`]: Saying what is missing, or which sample is malformed.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        raise PackingError(
            f"The {name} data must be a `datasets.Dataset` or `IterableDataset`, but it is a "
            f"{type(dataset).__name__}. Build one, for example with `Dataset.from_list`."
        )
    if args.row_shape == "fixed" and "seq_lengths" in (get_dataset_column_names(dataset) or ()):
        raise PackingError(
            f"The {name} data is packed already (`seq_lengths`), but `row_shape: fixed` counts the segments of a row. "
            "Pass the data unpacked, or set `row_shape: exact`."
        )
    if isinstance(dataset, IterableDataset) and name == "training" and args.max_steps <= 0:
        raise PackingError("A stream has no known length, so the run needs an end. Set `max_steps`.")
    if formatting_func is None:
        return validate_samples(dataset, args, name=name)
    if isinstance(dataset, Dataset) and not len(dataset):
        raise PackingError(f"The {name} set holds no samples.")
    return dataset


def check_end_token(dataset: Any, args: Any, formatting_func: Any, tokenizer: Any) -> None:
    """
    Check that the tokenizer has the token with which every text ends.

    Args:
        dataset (`Dataset` or `IterableDataset`), args ([`PackedSFTConfig`]), formatting_func (`Callable`, *optional*):
            As for [`check_data`].
        tokenizer (`PreTrainedTokenizerBase`):
            The run's.

    Raises:
        [`PackingError`]: If it is needed and missing.
    """
    columns = set(dataset.column_names or ())
    has_text = formatting_func is not None or (args.dataset_text_field in columns and not columns & {"messages"})
    if has_text and "input_ids" not in columns and tokenizer.eos_token is None:
        raise PackingError(
            "Every text ends with an end-of-sequence token, but the tokenizer has none. Set `eos_token`."
        )


def _refuse_trainer_settings(args: PackedSFTConfig) -> None:
    refusals = (
        # Rows are planned, so neither length grouping nor rebalancing has batches to work on.
        (
            args.train_sampling_strategy not in ("random", "sequential"),
            f"`train_sampling_strategy: {args.train_sampling_strategy}`",
            "Rows are planned and balanced by the sampler. Remove it.",
        ),
        (
            args.packing and args.train_sampling_strategy == "sequential",
            "`train_sampling_strategy: sequential`",
            "Packed rows have no data order. Set `packing: false`, or remove it.",
        ),
        (args.dataloader_drop_last, "`dataloader_drop_last`", "It would lose samples. Remove it."),
        (
            args.accelerator_config.split_batches,
            "`split_batches`",
            "A packed row cannot be split over ranks. Remove it.",
        ),
        (
            bool(args.accelerator_config.dispatch_batches),
            "`dispatch_batches`",
            "Every rank makes its own rows. Remove it.",
        ),
        # With `ignore_data_skip` a resumed run trains samples twice.
        (args.ignore_data_skip, "`ignore_data_skip`", "A resumed run would train samples twice. Remove it."),
        # A graph is compiled with the noise of its first row.
        (
            args.neftune_noise_alpha is not None and args.torch_compile,
            "`neftune_noise_alpha` with `torch_compile`",
            "Its noise depends on each row's samples. Remove one of the two.",
        ),
        (
            args.auto_find_batch_size,
            "`auto_find_batch_size`",
            "Rows are planned for one token budget. Lower `token_budget` instead.",
        ),
    )
    for is_set, name, way_out in refusals:
        if is_set:
            raise PackingError(f"{name} cannot be honoured in packed training. {way_out}")


def refuse_parallelism(parallelism_config: Any) -> None:
    """
    Refuse ways to split a sequence over ranks that drop its boundaries.

    Args:
        parallelism_config (`accelerate.ParallelismConfig`, *optional*):
            The accelerator's.

    Raises:
        [`PackingError`]: For context, sequence and tensor parallelism.
    """
    if parallelism_config is None:
        return
    for flag, name in (("cp_enabled", "Context"), ("sp_enabled", "Sequence"), ("tp_enabled", "Tensor")):
        if getattr(parallelism_config, flag, False):
            raise PackingError(
                f"{name} parallelism hands layers a part of the row without its boundaries, so packed samples would "
                "mix. Use data parallelism (DDP, FSDP2 or ZeRO), or TRL's `SFTTrainer` with padding."
            )


def _refuse_prompt_learning(peft_config: Any) -> None:
    if peft_config is None:
        return
    # Virtual tokens are added once per row, so only the first segment would see them.
    if getattr(peft_config, "is_prompt_learning", False):
        raise PackingError(
            f"{type(peft_config).__name__} adds virtual tokens once per row, and only the first packed sample would "
            "see them. Use LoRA."
        )
    # aLoRA switches adapters on from one position of the row to its end.
    if getattr(peft_config, "alora_invocation_tokens", None):
        raise PackingError(
            "`alora_invocation_tokens` switches adapters on at one position per row, not per packed sample. Use plain "
            "LoRA."
        )


def check_model(model: nn.Module, peft_config: Any) -> Any:
    """
    Check what the model itself says: layers that cannot keep segments apart, and adapters that would train nothing.

    Args:
        model (`nn.Module`):
            Loaded, with the operations registered.
        peft_config (`PeftConfig`, *optional*):
            The adapters to train.

    Returns:
        `PeftConfig` or `None`: The adapters, with `target_modules: auto` resolved. The argument is not modified.

    Raises:
        [`LeakError`]: Naming layers that are known to mix segments.
        [`PackingError`]: Naming adapters that would train nothing, quantised layers that save nothing or are misread,
            or why the model cannot run `varlen`.
    """
    refuse_unsupported(model)
    check_quantized_layers(model)
    if isinstance(model, PreTrainedModel) and model.base_model is model:
        raise PackingError(
            f"TRL's loss looks for the decoder of {type(model).__name__} under `{model.base_model_prefix}`, where "
            "there is none. Load the model yourself and set `model.base_model_prefix` to the name of its decoder."
        )
    # Read by every layer's cache logic, and a cache lets attention see the whole row.
    config = getattr(model, "config", None)
    if config is not None:
        config.get_text_config().use_cache = False
    if peft_config is None:
        return None
    if getattr(peft_config, "target_modules", None) in ("auto", {"auto"}):
        peft_config = copy.copy(peft_config)
        peft_config.target_modules = set(safe_lora_targets(model))
    check_lora_targets(model, peft_config)
    return peft_config


def refuse_lengths(
    model: nn.Module,
    args: PackedSFTConfig,
    *,
    packed: bool,
    samples_per_row: int,
    longest: int | None = None,
    position_ids_start: int = 0,
) -> None:
    """
    Refuse samples or rows that are longer than the model keeps apart: dynamic NTK, LongRoPE, temperature tuning.

    Args:
        model (`nn.Module`):
            To train.
        args ([`PackedSFTConfig`]):
            The run's settings.
        packed (`bool`):
            Whether rows are filled up to the token budget.
        samples_per_row (`int`):
            Of rows that are not.
        longest (`int`, *optional*):
            Tokens of the longest sample after cutting, where it is known.
        position_ids_start (`int`, *optional*, defaults to `0`):
            Position of each sample's first token.

    Raises:
        [`PackingError`]: Naming the limit and what to set.
    """
    is_fixed, budget = args.row_shape == "fixed", args.resolved_token_budget
    if not packed and samples_per_row == 1 and not is_fixed:
        # A sample that has a row for itself gives what it gives alone.
        return
    known = [length for length in (longest, args.max_length, budget if packed else None) if length is not None]
    segment = min(known, default=None)
    if is_fixed:
        # The alignment tail may be as long as the row.
        segment = row = budget
    else:
        row = budget if packed else None if segment is None else segment * samples_per_row
        segment = None if segment is None else max(segment, args.pad_to_multiple_of or 1)
    for limit in length_limits(model):
        longest_here = row if limit.is_of_row else segment
        most = limit.tokens if limit.is_of_row else limit.tokens - position_ids_start
        if longest_here is not None and longest_here <= most:
            continue
        what = "a row" if limit.is_of_row else "the alignment tail of a row" if is_fixed else "a sample"
        found = "be of any length" if longest_here is None else f"have {longest_here}"
        if is_fixed or (limit.is_of_row and packed):
            way_out = f"`token_budget: {most}`"
        else:
            way_out = f"`max_length: {most // samples_per_row if limit.is_of_row else most}`"
        alone = "`packing: false`, `row_shape: exact` and a batch size of 1"
        raise PackingError(
            f"{type(unwrapped(model)).__name__} keeps samples apart up to {most} tokens, but {what} may {found}: "
            f"above, {limit.reason}. Set {way_out}, or give every sample a row for itself: {alone}."
        )


def choose_attention(
    config: PretrainedConfig, dtype: torch.dtype | str | None, device: torch.device
) -> tuple[str, str]:
    """
    Pick the attention implementation that `attn_implementation: auto` stands for.

    Args:
        config ([`~transformers.PretrainedConfig`]):
            The model's.
        dtype (`torch.dtype` or `str`, *optional*):
            The weights' dtype.
        device (`torch.device`):
            Where the model will run.

    Returns:
        `tuple[str, str]`: The name and the reason: the flash-attn package, `kernels-community/flash-attn2`, `varlen`,
        or
            SDPA where the model takes no attention backend.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(
        type(config), None
    )
    if model_class is None:
        return VARLEN, "the default"
    masked = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    if not model_class._can_set_attn_implementation():
        return masked, f"{model_class.__name__} takes no other attention"
    if (needs_mask := why_not_varlen(config)) is not None:
        return masked, needs_mask
    reason = _why_not_flash(config.get_text_config(), model_class, dtype, device)
    if reason is not None:
        return VARLEN, reason
    if is_flash_attn_2_available():
        return "flash_attention_2", "the flash-attn package is installed"
    usable, why = _compat.kernels_usable()
    if usable:
        return "kernels-community/flash-attn2", "flash attention from the kernels hub"
    return VARLEN, f"flash-attn is not installed and kernels cannot serve it ({why})"


def _why_not_flash(
    config: Any, model_class: type[nn.Module], dtype: torch.dtype | str | None, device: torch.device
) -> str | None:
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None) if dtype != "auto" else config.dtype
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(config.num_attention_heads, 1)
    checks = (
        (device.type != "cuda", f"flash attention needs a CUDA device, and this is {device.type}"),
        (dtype not in _FLASH_DTYPES, f"flash attention needs half precision, and `dtype` is {dtype}"),
        (head_dim > 256, f"flash attention takes heads of up to 256, and these have {head_dim}"),
        (
            not getattr(model_class, "_supports_flash_attn", False),
            f"{model_class.__name__} does not support flash attention",
        ),
        (getattr(config, "model_type", "") in ("gpt_oss",), "attention sinks need a kernel that is not installed"),
    )
    return next((reason for applies, reason in checks if applies), None)
