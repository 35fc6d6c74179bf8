"""
Samples with images: what TRL's own collator makes of them, laid end to end before the decoder sees it.

TRL's collator runs the processor and pads. Its padded rows become one packed row, while pixels stay as they are:
images are in row order in both layouts, so the model merges the same image into the same tokens. Only then does the
decoder run, on the packed row and with its boundaries.

```text
padded batch   a0 [img img] a1  .        packed row     a0 [img img] a1 | b0 b1 b2 | c0 [img img] c1 c2
               b0 b1 b2  .  .  .    ->   position_ids    0   1   2   3  |  0  1  2 |  0   1   2   3  4
               c0 [img img] c1 c2        pixel_values   those of a, then those of c
```

How many tokens an image becomes is known only once the processor has run, so rows are not planned by tokens: a row
holds `per_device_train_batch_size` samples.

Shapes: B samples, L padded length, T tokens of the row.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel

from ..boundaries import IGNORE_INDEX
from ..collator import ROW_INFO, RowInfo, target_positions, with_padded_info
from ..config import PackedSFTConfig
from ..dataset import SampleTable, texts_digest
from ..errors import PackingError
from ..isolation.row import unwrapped
from ..packing import PackPlan, plan_batches
from ..padded import PackedRows, pack_rows
from ..planning import TrainPlan
from ..register.towers import install_tower_hooks

IMAGE_COLUMNS = frozenset({"image", "images"})
# Beside ids, mask and labels, what a processor gives per token.
_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")


def refuse_images(args: PackedSFTConfig, dataset: Any, model: nn.Module) -> None:
    """
    Refuse what cannot be honoured, or cannot be exact, where samples have images.

    Args:
        args ([`PackedSFTConfig`]):
            The run's settings.
        dataset (`Dataset` or `IterableDataset`):
            The training set.
        model (`nn.Module`):
            The model to train.

    Raises:
        [`PackingError`]: Naming the setting or the model, and the way out.
    """
    needs_lengths = "How many tokens an image becomes is known only once its row is made."
    refusals = (
        (args.packing, "`packing: true`", f"{needs_lengths} Set `packing: false`: samples are laid end to end."),
        (bool(args.eval_packing), "`eval_packing: true`", f"{needs_lengths} Remove it."),
        (args.row_shape == "fixed", "`row_shape: fixed`", f"{needs_lengths} Remove it."),
        (args.max_segments is not None, "`max_segments`", "A row holds `per_device_train_batch_size` samples."),
        (args.pad_to_multiple_of is not None, "`pad_to_multiple_of`", "Remove it."),
        (
            args.resolved_overlong in ("split", "drop"),
            f"`overlong: {args.resolved_overlong}`",
            f"{needs_lengths} Write `truncate` or `error`.",
        ),
        (
            args.truncation_mode == "keep_end",
            "`truncation_mode: keep_end`",
            "It would cut the images off. Write `keep_start`.",
        ),
        (not isinstance(dataset, Dataset), "A streamed data set", "Load it without `dataset_streaming`."),
    )
    for applies, name, way_out in refusals:
        if applies:
            raise PackingError(f"{name} cannot be honoured where samples have images. {way_out}")
    reason = _why_not_exact(model)
    if reason is not None:
        name = type(base_model(model)).__name__
        raise PackingError(
            f"{name} cannot be trained on packed samples with images: {reason}. Use TRL's `SFTTrainer`, which pads."
        )


def _why_not_exact(model: nn.Module) -> str | None:
    model = base_model(model)
    config = model.config
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        return "the tokens of an image see one another in both directions, by a mask that boundaries cannot express"
    if getattr(config.get_text_config(), "use_bidirectional_attention", None):
        return "its text config has `use_bidirectional_attention`, which boundaries cannot express"
    if "cross_attention_mask" in inspect.signature(model.forward).parameters:
        return "its decoder reads images by cross-attention, which has no boundaries"
    return None


def base_model(model: nn.Module) -> Any:
    """Give the transformers model inside adapters and wrappers."""
    model = unwrapped(model)
    getter = getattr(model, "get_base_model", None)
    return model if getter is None else getter()


def keep_towers_apart(model: nn.Module) -> None:
    """
    Keep the text's boundaries out of the models that read images.

    Args:
        model (`nn.Module`):
            The model to train. Its own decoder is left alone.
    """
    model = base_model(model)
    decoder = model.get_decoder()
    around = {id(module) for module in model.modules() if any(part is decoder for part in module.modules())}
    inside = {id(module) for module in decoder.modules()}
    install_tower_hooks(
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and id(module) not in around | inside
    )


class RopeIndex:
    """
    3-D positions (M-RoPE), by the model's own `get_rope_index` on the padded batch.

    Args:
        model (`nn.Module`):
            The model to train.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owner = next((module for module in model.modules() if hasattr(module, "get_rope_index")), None)
        self._recipe = None if self._owner is None else (type(self._owner), self._owner.config)

    def __bool__(self) -> bool:
        return self._recipe is not None

    def __getstate__(self) -> dict[str, Any]:
        # A worker process needs the method and the config, not the weights.
        return {**self.__dict__, "_owner": None}

    def __call__(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """
        Compute the positions of a padded batch.

        Args:
            batch (`Mapping[str, Any]`):
                From TRL's collator.

        Returns:
            `torch.Tensor` or `None`: int64 `[3, B, L]`; `None` where no sample has an image, and text positions are
                right.

        Raises:
            [`PackingError`]: If the processor does not say which tokens belong to an image.
        """
        assert self._recipe is not None
        if not any(name.endswith("grid_thw") for name in batch):
            return None
        if self._owner is None:
            model_class, config = self._recipe
            with torch.device("meta"):
                self._owner = model_class(config)
        parameters = inspect.signature(self._owner.get_rope_index).parameters
        missing = {"mm_token_type_ids"} & set(parameters) - set(batch)
        if missing:
            raise PackingError(
                "The model counts positions by what each token is, but the processor gives no `mm_token_type_ids`. "
                "Update the processor."
            )
        positions, _ = self._owner.get_rope_index(**{name: batch[name] for name in parameters if name in batch})
        return positions  # type: ignore[no-any-return]


@dataclass
class ImageRowCollator:
    """
    Samples with images in, one packed row with its [`RowInfo`] out.

    Args:
        collator (`trl.trainer.sft_trainer.DataCollatorForVisionLanguageModeling`):
            TRL's, which runs the processor and pads.
        filler (`Mapping[str, Any]`):
            A sample. Its row, without loss, is for a rank that has no samples left.
        rope_index ([`RopeIndex`], *optional*):
            Of a model with 3-D positions.
        overlong (`str`, *optional*, defaults to `"truncate"`):
            `"truncate"` cuts samples to the collator's `max_length` and counts the tokens; `"error"` stops.
        host_offsets (`bool`, *optional*, defaults to `False`):
            As for [`PackedCollator`].

    Raises:
        [`PackingError`]: If a sample is too long and `overlong` is `"error"`, or a part of an image would be cut off.
    """

    collator: Any
    filler: Mapping[str, Any]
    rope_index: RopeIndex | None = None
    overlong: str = "truncate"
    host_offsets: bool = False

    def __post_init__(self) -> None:
        self.max_length = self.collator.max_length
        # The tokens that are cut are counted here, and not there.
        self.collator = dataclasses.replace(self.collator, max_length=None)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch, num_cut_tokens = self.padded(samples or [self.filler])
        positions = self.rope_index(batch) if self.rope_index else None
        extra = {name: batch.pop(name) for name in _PER_TOKEN if name in batch}
        if positions is not None:
            extra["positions"] = positions.permute(1, 2, 0)
        mask, labels, input_ids = (batch.pop(name) for name in ("attention_mask", "labels", "input_ids"))
        packed = pack_rows(input_ids=input_ids, attention_mask=mask, labels=labels, extra=extra)
        row = {**_pixels_of_one_row(batch), **_row_of(packed, self.host_offsets)}
        if not samples:
            row["labels"] = torch.full_like(row["labels"], IGNORE_INDEX)
        targets = target_positions(row["labels"][:, 1:])
        info = RowInfo(
            boundaries=packed.boundaries,
            fragments=tuple(sample["fragment"] for sample in samples),
            num_targets=targets.size,
            num_tokens=packed.boundaries.total_tokens if samples else 0,
            num_segments=packed.boundaries.num_segments if samples else 0,
            target_positions=targets,
            num_cut_tokens=num_cut_tokens if samples else 0,
        )
        return {**row, ROW_INFO: info}

    def padded(self, samples: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], int]:
        """Give TRL's padded batch, cut to `max_length`, and the number of tokens that were cut."""
        # TRL's collator changes the samples it is given.
        batch = dict(self.collator([{k: v for k, v in sample.items() if k != "fragment"} for sample in samples]))
        length = batch["input_ids"].shape[1]
        if self.max_length is None or length <= self.max_length:
            return batch, 0
        cut = batch["attention_mask"][:, self.max_length :]
        if self.overlong == "error":
            longest = int(batch["attention_mask"].sum(1).max())
            raise PackingError(
                f"A sample has {longest} tokens, more than `max_length` = {self.max_length}, and `overlong` is "
                "`error`. Raise `max_length`, or drop the sample."
            )
        image_token = getattr(self.collator.processor, "image_token_id", None)
        if image_token is not None and bool((batch["input_ids"][:, self.max_length :] == image_token).any()):
            raise PackingError(
                f"`max_length` = {self.max_length} cuts through an image of a sample with "
                f"{int(batch['attention_mask'].sum(1).max())} tokens. Raise it, or make the images smaller."
            )
        per_token = ("input_ids", "attention_mask", "labels", *_PER_TOKEN)
        kept = {name: batch[name][:, : self.max_length] for name in per_token if name in batch}
        return {**batch, **kept}, int(cut.sum())


@dataclass
class PaddedImageCollator:
    """
    TRL's padded batch of samples with images, with its [`RowInfo`], for evaluation with `eval_packing: false`.

    Args:
        rows ([`ImageRowCollator`]):
            The trainer's, which cuts and counts.
    """

    rows: ImageRowCollator

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch, num_cut_tokens = self.rows.padded(samples or [self.rows.filler])
        if not samples:
            batch["labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
        return with_padded_info(batch, samples, num_cut_tokens=num_cut_tokens)


def _pixels_of_one_row(batch: dict[str, Any]) -> dict[str, Any]:
    """Lay all images in one row, where a processor gives each sample a row of its own, `[B, images]`."""
    if "pixel_attention_mask" not in batch or batch["pixel_values"].ndim != 5:
        return batch
    names = ("pixel_values", "pixel_attention_mask")
    # Rows are filled up with images of zeros, which the models that have this layout drop.
    return {**batch, **{name: batch[name].flatten(0, 1)[None] for name in names}}


def _row_of(packed: PackedRows, host_offsets: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"input_ids": packed.input_ids, "labels": packed.labels}
    row |= packed.boundaries.to_model_kwargs(host_offsets=host_offsets)
    row |= {name: tensor for name, tensor in packed.extra.items() if name != "positions"}
    if "positions" in packed.extra:
        # The layout that transformers has for packed rows: text positions first, then time, height and width.
        axes = packed.extra["positions"].permute(2, 0, 1)
        row["position_ids"] = torch.cat([row["position_ids"][None], axes])
    return row


# ---- which samples make a row


@dataclass
class ImagePlan(TrainPlan):
    """[`TrainPlan`] of samples whose lengths nobody knows yet: every sample counts as one token."""

    @cached_property
    def samples(self) -> SampleTable:
        """As many samples as the data set has, all trainable."""
        number = len(self.dataset)
        return SampleTable(np.ones(number, dtype=np.int64), np.zeros(number, dtype=bool))

    @cached_property
    def content(self) -> str:
        """Hash of the texts and image sizes of a few dozen samples."""
        names = ["messages", "prompt", "completion", self.args.dataset_text_field, *sorted(IMAGE_COLUMNS)]
        return texts_digest(self.dataset, names)

    def fragments(self) -> RawSamples:  # type: ignore[override]
        """The samples that the sampler's numbers refer to."""
        return RawSamples(self.dataset, self.for_epoch(0).fragments)


def plan_image_evaluation(dataset: Dataset, args: PackedSFTConfig) -> PackPlan:
    """Plan the rows of an evaluation: `per_device_eval_batch_size` samples each, in data order."""
    number = len(dataset)
    return plan_batches(np.ones(number, dtype=np.int64), args.per_device_eval_batch_size, order=np.arange(number))


class RawSamples(torch.utils.data.Dataset[dict[str, Any]]):
    """
    Samples as the user passed them, images decoded one by one.

    Args:
        dataset ([`~datasets.Dataset`]):
            With images.
        fragments (`np.ndarray`):
            int64 `[F, 3]`, of which the first column is the sample's number.
    """

    def __init__(self, dataset: Dataset, fragments: np.ndarray[Any, Any]) -> None:
        self.dataset, self.fragments = dataset, fragments

    def __len__(self) -> int:
        return len(self.fragments)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one sample, with its number under `fragment`."""
        return {**self.dataset[int(self.fragments[index, 0])], "fragment": index}
