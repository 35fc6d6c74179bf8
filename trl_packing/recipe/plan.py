"""Plan a run without its model's weights: its data, its tokenizer and TRL's own preparation are all it takes."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from torch import nn
from transformers import AutoConfig, BitsAndBytesConfig, GenerationConfig, PretrainedConfig
from trl import DatasetMixtureConfig, ModelConfig, get_quantization_config

from ..config import PackedSFTConfig
from ..cost import RowCost
from ..errors import PackingError
from ..lora.quantized import quantizes_with_bitsandbytes
from ..memory import MemoryEstimate, estimate_memory
from ..planning import TrainPlan, refuse_unfitting_rows
from ..quickstart import resolve_model
from ..report import PlanReport
from ..trainer import PackedSFTTrainer
from ..vision import IMAGE_COLUMNS
from .build import check_model_name, load_samples, load_tokenizer, lora_mapping, model_errors
from .config import RecipeArguments, build_lora


def plan_sft(
    script_args: RecipeArguments,
    training_args: PackedSFTConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
    *,
    num_ranks: int = 1,
) -> PlanReport:
    """
    Say what the plan of a run does to its data.

    Args:
        script_args ([`RecipeArguments`]):
            Data set settings.
        training_args ([`PackedSFTConfig`]):
            The run's settings.
        model_args ([`~trl.ModelConfig`]):
            Names the model, of which the configuration and the tokenizer are read.
        dataset_args ([`~trl.DatasetMixtureConfig`]):
            The mixture, if any.
        num_ranks (`int`, *optional*, defaults to `1`):
            Processes that will train.

    Returns:
        [`PlanReport`]: Of the first epoch, as the trainer prints it.

    Raises:
        [`PackingError`]: If a setting, the data or the model's name cannot be used, or the data is a stream.
    """
    if not model_args.model_name_or_path:
        raise PackingError("A plan needs a tokenizer, but `model_name_or_path` is not set. Give a hub id or a folder.")
    name = resolve_model(model_args.model_name_or_path)
    check_model_name(name)
    samples, _ = load_samples(script_args, dataset_args, training_args)
    if not isinstance(samples, Dataset):
        raise PackingError("A stream is planned while it is read. Set `dataset_streaming: false` to plan it here.")
    if IMAGE_COLUMNS & set(samples.column_names):
        raise PackingError(
            "How many tokens an image becomes is known only once its row is made, so there is nothing to plan before: "
            "a row holds `per_device_train_batch_size` samples."
        )
    revision = model_args.model_revision
    with model_errors(name):
        tokenizer = load_tokenizer(name, samples, training_args, revision)
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=training_args.trust_remote_code)
        prepared = _prepare(config, tokenizer, samples, training_args)
    plan = TrainPlan(prepared, training_args, RowCost.from_config(config.get_text_config()))
    refuse_unfitting_rows(training_args, plan.for_epoch(0), training=True, packed=training_args.packing)
    return plan.report(plan.sampler(num_ranks=num_ranks, rank=0))


def estimate_sft(
    script_args: RecipeArguments,
    training_args: PackedSFTConfig,
    model_args: ModelConfig,
    *,
    mixed_precision: bool,
    num_ranks: int = 1,
    segments_per_row: float = 1.0,
) -> MemoryEstimate | None:
    """
    Estimate the memory of a run on one GPU, by formula, from the model's configuration alone.

    Args:
        script_args ([`RecipeArguments`]):
            Adapter settings.
        training_args ([`PackedSFTConfig`]):
            The run's settings.
        model_args ([`~trl.ModelConfig`]):
            Model, dtype and adapter settings.
        mixed_precision (`bool`):
            Whether the run computes under autocast.
        num_ranks (`int`, *optional*, defaults to `1`):
            Processes that will train, each with a copy of the model.
        segments_per_row (`float`, *optional*, defaults to `1.0`):
            Mean of the plan.

    Returns:
        [`MemoryEstimate`] or `None`: `None` if rows have no token budget.

    Raises:
        [`PackingError`]: If the adapter settings cannot be used.
    """
    row_tokens = training_args.resolved_token_budget
    if row_tokens is None:
        return None
    name = resolve_model(str(model_args.model_name_or_path))
    with model_errors(name):
        config = AutoConfig.from_pretrained(
            name, revision=model_args.model_revision, trust_remote_code=training_args.trust_remote_code
        )
        return estimate_memory(
            config,
            row_tokens=row_tokens,
            peft_config=build_lora(model_args, lora_mapping(script_args.lora_config)),
            quantization_config=_quantization(model_args, training_args),
            dtype=model_args.dtype or "float32",
            mixed_precision=mixed_precision,
            gradient_checkpointing=training_args.gradient_checkpointing,
            gradient_accumulation_steps=training_args.gradient_accumulation_steps,
            num_ranks=num_ranks,
            segments_per_row=segments_per_row,
        )


def _quantization(model_args: ModelConfig, training_args: PackedSFTConfig) -> Any:
    """What the weights are quantised with, whichever way it is set."""
    given = (training_args.model_init_kwargs or {}).get("quantization_config")
    if isinstance(given, dict) and quantizes_with_bitsandbytes(given):
        given = BitsAndBytesConfig(**given)
    return get_quantization_config(model_args) if given is None else given


def _prepare(config: PretrainedConfig, tokenizer: Any, samples: Dataset, args: PackedSFTConfig) -> Dataset:
    if (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        return samples
    try:
        _Preparation(model=_Settings(config), args=args, train_dataset=samples, processing_class=tokenizer)
    except _PreparedError as prepared:
        return prepared.dataset
    raise PackingError("TRL prepares this data set while it trains, so there is nothing to plan before.")


class _PreparedError(Exception):
    """The way out of the trainer's constructor, before it wants a model with weights."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset


class _Preparation(PackedSFTTrainer):
    """TRL's handling of tokens, templates and labels lives in its trainer's constructor, so that is what runs."""

    def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
        # The training set comes first.
        raise _PreparedError(super()._prepare_dataset(*args, **kwargs))


class _Settings(nn.Module):
    """What the preparation reads and sets on a model: everything but weights."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.generation_config = GenerationConfig()
        self.vocab_size = config.get_text_config().vocab_size

    def can_generate(self) -> bool:
        return True

    def resize_token_embeddings(self, new_num_tokens: int, pad_to_multiple_of: int | None = None) -> None:
        """Take the size that the embeddings get when a chat template brings tokens of its own."""
        multiple = pad_to_multiple_of or 1
        self.vocab_size = -(-new_num_tokens // multiple) * multiple
