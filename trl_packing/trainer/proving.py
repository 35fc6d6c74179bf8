"""The proofs of a run, and the lengths up to which they hold."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from ..config import PackedSFTConfig
from ..isolation import IsolationReport
from ..packing import PackPlan
from ..planning import refuse_unfitting_rows
from ..preflight import refuse_lengths
from ..proof import agreed, isolation_line, prove_isolation
from ..vision import ImageRowCollator, check_images, samples_to_prove
from .resuming import ResumingTrainer


class ProvingTrainer(ResumingTrainer):
    """What [`PackedSFTTrainer`] refuses by length, and proves before step 1 and before the first evaluation."""

    isolation_report: IsolationReport | None
    _settings: PackedSFTConfig
    _image_collator: ImageRowCollator | None
    _is_evaluation_proven: bool = False

    def _eval_mode(self) -> str:
        """`packed` to the budget, `flat` (the batch's samples end to end), or `padded`."""
        if self._settings.eval_packing is None:
            return "packed" if self._settings.packing else "flat"
        return "packed" if self._settings.eval_packing else "padded"

    def _refuse_lengths(self, plan: PackPlan | None = None, *, training: bool) -> None:
        args, mode = self.args, self._eval_mode()
        if not training and mode == "padded":
            return
        packed = args.packing if training else mode == "packed"
        if self._image_collator is None:
            refuse_unfitting_rows(args, plan, training=training, packed=packed)
        else:
            # Nobody knows yet how many tokens an image has.
            plan = None
        refuse_lengths(
            self.model,
            args,
            packed=packed,
            samples_per_row=args.per_device_train_batch_size if training else args.per_device_eval_batch_size,
            longest=int(plan.lengths.max()) if plan is not None and plan.num_fragments else None,
            position_ids_start=getattr(self.data_collator, "position_ids_start", 0),
        )

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # `evaluate` before `train` marks the bare model as prepared, and DDP would never wrap it.
        if self.model_wrapped is self.model and getattr(self.model, "_is_accelerate_prepared", False):
            self.model._is_accelerate_prepared = False
            self.accelerator._models.clear()
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._prove_isolation()
        return prepared

    def _prove_isolation(self) -> None:
        if self._is_unproven_by_choice():
            return
        self.isolation_report = prove_isolation(self.model, self.accelerator, **self._row_options())
        # With the first log, and so into every tracker.
        self._metrics["train"]["isolation_max_leak"].append(self.isolation_report.max_leak)
        self.accelerator.print(isolation_line(self.isolation_report))
        self._prove_images()

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as TRL does, after a proof in eval mode before the first packed row."""
        # Not earlier, because here the model is prepared and cast, also without `train`.
        if not self._is_evaluation_proven:
            self._prove_evaluation()
            self._is_evaluation_proven = True
        return super().prediction_step(*args, **kwargs)

    def _prove_evaluation(self) -> None:
        args, mode = self.args, self._eval_mode()
        # A sample that has a row for itself gives what it gives alone.
        may_mix = mode == "packed" or args.per_device_eval_batch_size > 1 or args.row_shape == "fixed"
        if mode == "padded" or not may_mix or self._is_unproven_by_choice():
            return
        # A graph for eval mode and this row would be compiled for nothing else.
        with torch.compiler.set_stance("force_eager") if args.torch_compile else nullcontext():
            report = prove_isolation(self.model, self.accelerator, training=False, **self._row_options())
        self.accelerator.print(f"{isolation_line(report)} In eval mode.")
        if self.isolation_report is None:
            self.isolation_report = report
            self._prove_images()

    def _row_options(self) -> dict[str, Any]:
        """What the rows of the proof have in common with those that are trained."""
        if self._image_collator is not None:
            return {"host_offsets": self._image_collator.host_offsets}
        collator = self.data_collator
        return {
            "position_ids_start": collator.position_ids_start,
            "host_offsets": collator.host_offsets,
            "repeats_offsets": collator.max_segments is not None,
        }

    def _is_unproven_by_choice(self) -> bool:
        if self.args.isolation_check == "off":
            self.accelerator.print(
                "Isolation check: off (`isolation_check: off`). Nothing proves that samples stay apart."
            )
        return bool(self.args.isolation_check == "off")

    def _prove_images(self) -> None:
        if self._image_collator is not None:
            samples = samples_to_prove(self.train_dataset)
            # What is wrong with a sample is no leak.
            self._image_collator.padded(samples)
            check = partial(check_images, self.model, self._image_collator, samples)
            self.accelerator.print(agreed(check, self.accelerator))
