"""
A counter of device-to-host reads, by file and line, and the three trainers it is held against.

A read is what makes the host wait on a GPU: `item`, `bool`, `int` and `float` of a tensor, `nonzero`, a boolean mask
as an index, `tolist`, `numpy`, `cpu`. The CPU runs the same operations, so they can be counted here.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    masking_utils,
)
from transformers import modeling_flash_attention_utils as flash
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.boundaries import Boundaries
from trl_packing.ops.attention import segment_attention
from trl_packing.quickstart.tiny import byte_tokenizer

_ATEN = torch.ops.aten
_READS = {
    _ATEN._local_scalar_dense.default,
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    # One operation here, whose first line selects by mask.
    _ATEN.masked_scatter_backward.default,
    _ATEN.equal.default,
    _ATEN.repeat_interleave.Tensor,
}
_INDEXING = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}
_METHODS = ("tolist", "numpy", "cpu")
_TORCH = str(Path(torch.__file__).parent)


class DeviceReads(TorchDispatchMode):
    """Counts reads while it is entered, forward and backward. `places` has one entry `file:line` per read."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS or (func in _INDEXING and any(_is_mask(index) for index in args[1])):
            self._add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> DeviceReads:
        self._methods = {name: getattr(torch.Tensor, name) for name in _METHODS}
        for name, method in self._methods.items():
            setattr(torch.Tensor, name, self._counted(name, method))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for name, method in self._methods.items():
            setattr(torch.Tensor, name, method)

    def _counted(self, name: str, method: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._add(name)
            return method(tensor, *args, **kwargs)

        return call

    def _add(self, what: str) -> None:
        frame: Any = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        self.places.append(f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} {what}")


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


class MicroSteps(TrainerCallback):
    """Keeps the reads of whole micro-steps: from the end of one to the end of the next, without an optimiser step."""

    def __init__(self, reads: DeviceReads) -> None:
        self.reads, self.start = reads, -1
        self.steps: list[Counter[str]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = -1

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        if self.start >= 0:
            self.steps.append(Counter(self.reads.places[self.start :]))
        self.start = len(self.reads.places)


def micro_steps(trainer: Trainer) -> list[Counter[str]]:
    """Train, and give the reads of each micro-step by place."""
    reads = DeviceReads()
    callback = MicroSteps(reads)
    trainer.add_callback(callback)
    with reads:
        trainer.train()
    return callback.steps


# Its name must not say flash: transformers would look for the package.
FLASH = "positions_stand_in"


def register_flash_stand_in() -> None:
    """Flash attention as transformers calls it, its kernel replaced by segment attention, which reads uncounted."""
    AttentionInterface.register(FLASH, _flash_stand_in)
    AttentionMaskInterface.register(FLASH, masking_utils.flash_attention_mask)


def remove_flash_stand_in() -> None:
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(FLASH, None)


def _flash_stand_in(
    module: Any, query: Any, key: Any, value: Any, mask: Any, position_ids: Any = None, scaling: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    assert mask is None
    assert flash._is_packed_sequence(position_ids, query.shape[0])
    heads_last = (tensor.transpose(1, 2) for tensor in (query, key, value))
    *_, (longest_query, longest_key) = flash._prepare_from_posids(*heads_last, position_ids)
    # The kernel's signature takes integers.
    int(longest_query), int(longest_key)
    lengths = Boundaries.from_lengths(_uncounted_lengths(position_ids)).lengths
    return segment_attention(query, key, value, lengths, scale=scaling).transpose(1, 2), None


def _uncounted_lengths(position_ids: torch.Tensor) -> list[int]:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        starts = [index for index, position in enumerate(memoryview(_bytes(position_ids)).cast("q")) if position == 0]
    return [stop - start for start, stop in zip(starts, [*starts[1:], position_ids.shape[1]], strict=True)]


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().untyped_storage())


def side(name: str, model: Any, dataset: Any, settings: dict[str, Any]) -> Trainer:
    """`transformers` (positions only), `TRL` or `ours`, on the same samples."""
    if name == "transformers":
        names = TrainingArguments.__dataclass_fields__
        args = TrainingArguments(**{key: value for key, value in settings.items() if key in names})
        return Trainer(model=model, args=args, train_dataset=dataset, data_collator=DataCollatorWithFlattening())
    if name == "TRL":
        args = SFTConfig(**settings, packing=True)
        return SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=byte_tokenizer())
    args = PackedSFTConfig(**settings, packing=True)
    return PackedSFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=byte_tokenizer())
