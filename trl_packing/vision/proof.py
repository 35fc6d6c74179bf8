"""The proof for samples with images: on real ones, each gives in a packed row what it gives alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import nn

from ..boundaries import Boundaries
from ..collator import ROW_INFO
from ..errors import LeakError
from ..isolation.row import token_effects, unwrapped
from ..isolation.state import kept_state, mode
from .rows import ImageRowCollator, base_model

# What a proof looks at: few samples, or it would cost the memory of a step.
_MOST_SAMPLES_SEARCHED = 64
# TRL's padded batch differs from single samples by rounding too; the maximum over a row is a few times that.
_NOISE_MARGIN = 4
# Of what everything moves without boundaries, the share that rounding in half precision may move.
_HALF_PRECISION_SHARE = 10


def samples_to_prove(dataset: Dataset) -> list[dict[str, Any]]:
    """Give the first two samples with an image, and the first without, of the beginning of a data set."""
    with_image: list[dict[str, Any]] = []
    without: list[dict[str, Any]] = []
    for index in range(min(len(dataset), _MOST_SAMPLES_SEARCHED)):
        sample = dataset[index]
        has_image = bool(sample.get("images") or sample.get("image"))
        (with_image if has_image else without).append(sample)
        if len(with_image) >= 2 and without:
            break
    return [*with_image[:1], *without[:1], *with_image[1:2]]


def check_images(model: nn.Module, collator: ImageRowCollator, samples: list[dict[str, Any]]) -> str:
    """
    Check on real samples that each gives in a packed row what it gives alone.

    Args:
        model (`nn.Module`):
            As it is trained. It is left as it was.
        collator ([`ImageRowCollator`]):
            The trainer's.
        samples (`list[dict[str, Any]]`):
            Two or three of them.

    Returns:
        `str`: What was found, in one line.

    Raises:
        [`LeakError`]: If a sample's logits in the row are not those of the sample alone, or the check cannot tell.
    """
    model = unwrapped(model)
    samples = [{**sample, "fragment": index} for index, sample in enumerate(samples)]
    owners = [module for module in model.modules() if hasattr(module, "rope_deltas")]
    deltas = [module.rope_deltas for module in owners]
    with kept_state(model), mode(model), torch.no_grad(), _Precision(model) as precision:
        row = collator(samples)
        packed = _logits(model, row)[0]
        # One segment from end to end: what the row would be without boundaries.
        whole = Boundaries.from_lengths([packed.shape[0]]).to_model_kwargs(host_offsets=collator.host_offsets)
        whole["position_ids"] = _with_text_positions(row["position_ids"], whole["position_ids"])
        mixed = _logits(model, {**row, **whole})[0]
        padded = _padded_logits(model, collator, samples)
        alone = torch.cat([_padded_logits(model, collator, [sample]) for sample in samples])
    for module, delta in zip(owners, deltas, strict=True):
        module.rope_deltas = delta
    effect, noise, control = (float(token_effects(alone, other).max()) for other in (packed, padded, mixed))
    is_half = torch.finfo(precision.lowest).bits < 32
    # Depth amplifies the rounding of half precision. What it hides here, the proof on text tokens sees: it is exact.
    depth = control / _HALF_PRECISION_SHARE if is_half else 0.0
    allowed = max(packed.shape[0] * torch.finfo(torch.float32).eps, _NOISE_MARGIN * noise, depth)
    if effect > allowed:
        raise LeakError(
            f"Samples with images give other logits in a packed row than alone on {type(base_model(model)).__name__}: "
            f"they differ by {effect:.1e}, and rounding explains {allowed:.1e}. Use TRL's `SFTTrainer`, which pads."
        )
    if len(samples) > 1 and control <= allowed:
        raise LeakError(
            f"Even without boundaries samples with images differ by no more than {control:.1e}, so the check sees "
            "nothing on this model. Use TRL's `SFTTrainer`, which pads."
        )
    return f"Images: {len(samples)} samples give in a packed row what they give alone (they differ by {effect:.1g})."


class _Precision:
    """The lowest precision among the weights and what the model's own autocast, entered inside its call, chooses."""

    def __init__(self, model: nn.Module) -> None:
        self._embedding = model.get_input_embeddings()  # type: ignore[operator]
        dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point() and weight.itemsize > 1}
        self.lowest: torch.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

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
