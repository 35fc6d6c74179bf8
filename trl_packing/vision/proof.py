"""
The proof for samples with images, on real ones: the pixels of one move no other in the row, and each gives in the row
what it gives alone.

The first is exact in any precision, because both runs have one layout. The second compares layouts, which round
otherwise, but sees what the first does not: an image in the wrong place of its own sample, or wrong positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch import nn

from ..boundaries import Boundaries
from ..collator import ROW_INFO
from ..errors import LeakError
from ..isolation.layers import kind_of
from ..isolation.row import token_effects, unwrapped
from ..isolation.state import kept_state, mode
from .rows import IMAGE_COLUMNS, ImageRowCollator, base_model

# TRL's padded batch differs from single samples by rounding too; the maximum over a row is a few times that.
_NOISE_MARGIN = 4
# Of what everything moves without boundaries, the share that half precision may hide, and the most that may count as
# noise: more is no rounding, the padded batch mixes samples too.
_HALF_PRECISION_SHARE = 0.1
_MOST_NOISE, _MOST_HALF_PRECISION_NOISE = 0.01, 0.5
_PIXELS = "pixel_values"


def samples_to_prove(dataset: Dataset) -> list[dict[str, Any]]:
    """
    Give the first two samples with an image, and the first without, wherever they are in a data set.

    Args:
        dataset ([`~datasets.Dataset`]):
            With a column of images. Only whether there is one is read of it; no image is decoded to find out.

    Returns:
        `list[dict[str, Any]]`: Two or three. A sample that has nothing beside it comes twice.
    """
    has_image = _has_image(dataset)
    with_image, without = (np.flatnonzero(mask).tolist() for mask in (has_image, ~has_image))
    numbers = [*with_image[:1], *without[:1], *with_image[1:2]]
    return [dataset[number] for number in (numbers if len(numbers) > 1 else numbers * 2)]


def _has_image(dataset: Dataset) -> np.ndarray[Any, np.dtype[np.bool_]]:
    found = np.zeros(len(dataset.data), dtype=bool)
    for name in IMAGE_COLUMNS & set(dataset.column_names):
        column = dataset.data.column(name)
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        given = pc.greater(pc.fill_null(pc.list_value_length(column), 0), 0) if is_list else pc.is_valid(column)
        found |= given.to_numpy()
    indices = dataset._indices
    return found if indices is None else found[indices.column(0).to_numpy()]


def check_images(model: nn.Module, collator: ImageRowCollator, samples: list[dict[str, Any]]) -> str:
    """
    Check on real samples that no image reaches another one, and that each gives in a packed row what it gives alone.

    Args:
        model (`nn.Module`):
            As it is trained. It is left as it was.
        collator ([`ImageRowCollator`]):
            The trainer's.
        samples (`list[dict[str, Any]]`):
            Two or three of them, the first with an image if any has one.

    Returns:
        `str`: What was found, in one line.

    Raises:
        [`LeakError`]: If the pixels of one sample move another's logits, if a sample's logits in the row are not those
            of the sample alone, or if the check cannot tell.
    """
    model = unwrapped(model)
    samples = [{**sample, "fragment": index} for index, sample in enumerate(samples)]
    row = collator(samples)
    if _PIXELS not in row:
        return "Images: no sample of the data set has one, so nothing is proven about them."
    owners = [module for module in model.modules() if hasattr(module, "rope_deltas")]
    deltas = [module.rope_deltas for module in owners]
    with kept_state(model), mode(model), torch.no_grad(), _Precision(model) as precision, _Decoder(model) as decoder:
        packed, again = (decoder.around(_logits(model, row)[0]) for _ in range(2))
        # One segment from end to end: what the row would be without boundaries.
        whole = Boundaries.from_lengths([len(packed[0])]).to_model_kwargs(host_offsets=collator.host_offsets)
        whole["position_ids"] = _with_text_positions(row["position_ids"], whole["position_ids"])
        mixed = _logits(model, {**row, **whole})[0]
        padded = _padded_logits(model, collator, samples)
        alone = torch.cat([_padded_logits(model, collator, [sample]) for sample in samples])
        moves = [
            (*decoder.around(_logits(model, {**row, _PIXELS: pixels})[0]), changed)
            for pixels, changed in _other_pixels(collator, row, samples)
        ]
    for module, delta in zip(owners, deltas, strict=True):
        module.rope_deltas = delta
    name, rounding = type(base_model(model)).__name__, len(alone) * torch.finfo(torch.float32).eps
    effect, noise, control = (_largest(alone, other) for other in (packed[0], padded, mixed))
    most_noise = _MOST_HALF_PRECISION_NOISE if precision.is_half else _MOST_NOISE
    # Depth amplifies the rounding of half precision.
    depth = control * _HALF_PRECISION_SHARE if precision.is_half else 0.0
    allowed = max(rounding, min(_NOISE_MARGIN * noise, control * most_noise), depth)
    # At the logits, and before them where the decoder begins: its experts round more than a leak of a tower may be.
    for number, modules in enumerate((model.modules(), decoder.modules_before())):
        still = _rounding_of_one_layout(modules, rounding, precision, allowed)
        still = max(still, _NOISE_MARGIN * _largest(packed[number], again[number]))
        moved = max(_largest(packed[number][~move[2]], move[number][~move[2]]) for move in moves)
        if moved > still:
            raise LeakError(
                f"The pixels of one sample move another in the same row on {name}, by {moved:.1e}, and rounding "
                f"explains {still:.1e}: images mix. Use TRL's `SFTTrainer` with `per_device_train_batch_size: 1`."
            )
    if effect > allowed:
        raise LeakError(
            f"Samples with images give other logits in a packed row than alone on {name}: "
            f"they differ by {effect:.1e}, and rounding explains {allowed:.1e}. Use TRL's `SFTTrainer`, which pads."
        )
    for what, seen, limit in (
        ("without boundaries samples with images", control, allowed),
        ("with other pixels the sample that has them", min(_largest(packed[1], move[1]) for move in moves), still),
    ):
        if seen <= limit:
            raise LeakError(
                f"Even {what} moves by no more than {seen:.1e}, so the check sees nothing on this model. Use TRL's "
                "`SFTTrainer`, which pads."
            )
    limit = f"; in half precision up to {allowed:.1g} would pass" if precision.is_half else ""
    return (
        f"Images: {len(samples)} samples give in a packed row what they give alone (they differ by {effect:.1g}"
        f"{limit}), and the pixels of one move the others by {moved:.1g} where the decoder begins."
    )


def _other_pixels(
    collator: ImageRowCollator, row: Mapping[str, Any], samples: list[dict[str, Any]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The row's pixels negated for the first sample, and for the others; each with the tokens that may move, `[T]`."""
    alone = [collator.padded([sample])[0] for sample in samples]
    pixels, own = row[_PIXELS], alone[0][_PIXELS]
    # Images are in row order, along the first axis that has more than one entry.
    axis = 1 if pixels.ndim > 4 and pixels.shape[0] == 1 else 0
    is_first = torch.arange(pixels.shape[axis]) < own.shape[axis]
    owner = torch.repeat_interleave(torch.tensor(row[ROW_INFO].boundaries.lengths))
    has_image = torch.tensor([_PIXELS in batch for batch in alone])
    changes = [(is_first, owner == 0), (~is_first, (owner > 0) & has_image[owner])]
    shape = [-1 if number == axis else 1 for number in range(pixels.ndim)]
    return [
        (torch.where(which.view(shape), -pixels, pixels), tokens) for which, tokens in changes if bool(tokens.any())
    ]


def _rounding_of_one_layout(
    modules: Iterable[nn.Module], rounding: float, precision: _Precision, allowed: float
) -> float:
    """How far a sample may move because another in the same layout has other content."""
    modules = list(modules)
    kinds = {kind_of(module) for module in modules}
    # A dense tower of a family of experts has names like theirs.
    if any(hasattr(module, "experts") for module in modules):
        # Experts regroup their tokens, and the layers behind amplify that.
        return allowed
    # A recurrence may carry a sum along the row.
    is_rounded = precision.is_half and "recurrence" in kinds
    return rounding + (2 * torch.finfo(precision.lowest).eps if is_rounded else 0.0)


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(token_effects(one, other).max())


class _Decoder:
    """What the decoder gets: the row's embeddings with images merged in, and those for its deeper layers."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._decoder = model, base_model(model).get_decoder()

    def __enter__(self) -> _Decoder:
        self._handle = self._decoder.register_forward_pre_hook(self._look, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _look(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._kwargs = kwargs

    def around(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of the last run, of one row, and beside them what went in: one vector per token, `[T, ...]`."""
        embeddings = self._kwargs.get("inputs_embeds")
        if embeddings is None:
            return logits, logits
        parts = [embeddings[0]]
        for deep in self._kwargs.get("deepstack_visual_embeds") or ():
            placed = torch.zeros_like(parts[0])
            placed[self._kwargs["visual_pos_masks"][0]] = deep.to(placed)
            parts.append(placed)
        return logits, torch.cat(parts, dim=-1).float().cpu()

    def modules_before(self) -> list[nn.Module]:
        """The vision tower, and what merges images and text."""
        inside = {id(module) for module in self._decoder.modules()}
        return [module for module in self._model.modules() if id(module) not in inside]


class _Precision:
    """The lowest precision among the weights and what the model's own autocast, entered inside its call, chooses."""

    def __init__(self, model: nn.Module) -> None:
        self._embedding = model.get_input_embeddings()  # type: ignore[operator]
        dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point() and weight.itemsize > 1}
        self.lowest: torch.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def is_half(self) -> bool:
        return torch.finfo(self.lowest).bits < 32

    def __enter__(self) -> _Precision:
        self._handle = self._embedding.register_forward_hook(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _look(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if torch.is_autocast_enabled(output.device.type):
            autocast = torch.get_autocast_dtype(output.device.type)
            self.lowest = max(self.lowest, autocast, key=lambda dtype: torch.finfo(dtype).eps)


def _with_text_positions(position_ids: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return text if position_ids.ndim == 2 else torch.cat([text[None], position_ids[1:]])


def _padded_logits(model: nn.Module, collator: ImageRowCollator, samples: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    batch, _ = collator.padded(samples)
    return _logits(model, batch)[batch["attention_mask"].bool()]


def _logits(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    device = next(model.parameters()).device
    inputs = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name not in (ROW_INFO, "labels")
    }
    logits: torch.Tensor = model(**inputs, use_cache=False).logits.float()
    return logits.cpu()
