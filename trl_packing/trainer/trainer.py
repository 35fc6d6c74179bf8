"""
`PackedSFTTrainer`: TRL's `SFTTrainer` on packed rows whose boundaries are computed once, on the host.

TRL prepares the data, builds adapters and runs the loop. Ours are the plan, the rows, the loss over token sums, and
the proof before step 1. `compute_loss` is the one deliberate reimplementation; its numbers are tested against TRL's.
"""

from __future__ import annotations

import copy
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType, is_peft_model
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, seed_worker
from trl import SFTConfig
from trl.data_utils import get_dataset_column_names

from ..collator import PackedCollator, PaddedCollator, RowCollator
from ..cost import RowCost
from ..dataset import FragmentDataset, check_prepared, drop_masked_tokens
from ..errors import PackingError
from ..evaluation import FragmentLoss, TokenSums, sample_losses, token_metrics, write_jsonl
from ..lora.quantized import refuse_undivided_weights
from ..packing import PackPlan
from ..planning import TrainPlan, plan_evaluation
from ..preflight import (
    check_data,
    check_end_token,
    check_model,
    refuse_parallelism,
    refuse_settings,
)
from ..proof import AdapterProof
from ..register import register_ops
from ..register.router import has_routers
from ..report import fates_text, simulated_steps
from ..sampler import RankedBatchSampler
from ..samples import check_content_parts
from ..streaming import RowStream
from ..vision import (
    IMAGE_COLUMNS,
    ImagePlan,
    ImageRowCollator,
    PaddedImageCollator,
    RawSamples,
    RopeIndex,
    keep_towers_apart,
    plan_image_evaluation,
    refuse_images,
)
from .load import load_model, packed_collator, packed_config
from .proving import ProvingTrainer


class PackedSFTTrainer(ProvingTrainer):
    """
    Train on packed rows, without padding and without leaks. The signature is that of [`~trl.SFTTrainer`].

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            As in TRL. Loaded from a name, it gets the attention that `attn_implementation: auto` stands for.
        args ([`PackedSFTConfig`] or [`~trl.SFTConfig`], *optional*):
            The run's settings. They are not modified.
        data_collator ([`PackedCollator`], *optional*):
            Another collator is refused: it would pad.
        train_dataset, eval_dataset, processing_class, compute_metrics, callbacks, peft_config, formatting_func, ...:
            As in TRL.

    Raises:
        [`PackingError`]: If a setting cannot be honoured in packed training, before the data is touched.
        [`LeakError`]: By `train`, before step 1, and by `evaluate` and `predict`, before the first row, if segments
            influence one another on this model.
    """

    data_collator: Any
    _tag_names: ClassVar[list[str]] = ["trl", "sft", "trl_packing"]

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: TrainingArguments | None = None,
        data_collator: PackedCollator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Any = None,
    ) -> None:
        args = packed_config(args, model)
        refuse_settings(args, peft_config, data_collator)
        train_dataset = check_data(train_dataset, args, formatting_func, "training")
        if isinstance(eval_dataset, dict):
            eval_dataset = {
                name: check_data(dataset, args, formatting_func, f"evaluation ({name})")
                for name, dataset in eval_dataset.items()
            }
        elif eval_dataset is not None:
            eval_dataset = check_data(eval_dataset, args, formatting_func, "evaluation")
        has_images = bool(IMAGE_COLUMNS & set(get_dataset_column_names(train_dataset) or ()))
        if isinstance(model, str):
            model, processing_class = load_model(model, args, processing_class, quantization_config)
            quantization_config = None
        if has_images:
            refuse_images(args, train_dataset, model)
        register_ops(model, ops=args.ops)
        peft_config = check_model(model, peft_config)
        # Its vocabulary grows if a cloned chat template adds tokens.
        self._text_config = model.config.get_text_config()
        self._settings = args
        self._may_mask_labels = True
        self._is_preparing_train = True
        # TRL's own packing, padding-free collator and model loading stay off. The user's `args` are not touched.
        stock = copy.copy(args)
        stock.packing = stock.padding_free = False
        stock.eval_packing = stock.model_init_kwargs = None
        super().__init__(
            model=model,
            args=stock,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            peft_config=peft_config,
            formatting_func=formatting_func,
        )
        for name in ("packing", "padding_free", "eval_packing", "model_init_kwargs"):
            setattr(self.args, name, getattr(args, name))
        refuse_parallelism(self.accelerator.parallelism_config)
        if self.accelerator.distributed_type == DistributedType.FSDP:
            refuse_undivided_weights(self.model)
        self._padded_collator = self.data_collator
        self.data_collator = data_collator or packed_collator(self.args)
        self._image_collator = self._make_image_collator() if self._is_vision_dataset else None
        self.padding_free = True
        # The Trainer's filter reads the device twice per micro-step; `training_step` does the same without.
        self._replaces_nan_losses = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = False
        if self.aux_loss_enabled and not has_routers(self.model):
            # Upstream's balancing loss fails on a dense model of a family of experts.
            self.aux_loss_enabled = self._text_config.output_router_logits = False
        # Upstream's hook would scale the noise by the row's length; `compute_loss` adds it by sample.
        self.neftune_noise_alpha = None
        # Token sums are normalised by us, whatever the model's own loss accepts.
        self.model_accepts_loss_kwargs = True
        device = self.accelerator.device
        self._sums = {"train": TokenSums(device), "eval": TokenSums(device)}
        self._fragment_losses: list[FragmentLoss] | None = None
        self._logged_at = time.perf_counter()
        self._rank_idle: float | None = None
        self._train_plan: TrainPlan | None = None
        self._sampler: RankedBatchSampler | None = None
        self._planned_sets: weakref.WeakSet[Dataset] = weakref.WeakSet()
        self.isolation_report: Any = None
        self.add_callback(AdapterProof(self.accelerator))
        if isinstance(self.train_dataset, Dataset):
            self._plan_training()
        else:
            self._refuse_lengths(training=True)
        # What an evaluation set loses, or that it cannot be evaluated, is known before step 1.
        sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        for name, dataset in sets.items():
            if isinstance(dataset, Dataset):
                self._plan_evaluation(dataset, name)
            elif dataset is not None:
                self._refuse_lengths(training=False)

    # ---- data

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: SFTConfig,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        is_train, self._is_preparing_train = self._is_preparing_train, False
        check_end_token(dataset, args, formatting_func, self._tokenizer)
        if formatting_func is None and processing_class is self._tokenizer:
            check_content_parts(dataset, processing_class, self.chat_template)
        if is_train:
            given = {"labels", "assistant_masks"} & set(get_dataset_column_names(dataset))
            self._may_mask_labels = bool(given or args.assistant_only_loss or self.completion_only_loss)
        whole = copy.copy(args)
        # Overlong samples must reach the plan whole, to be counted.
        whole.max_length = None
        if isinstance(dataset, Dataset) and "input_ids" in dataset.column_names:
            check_prepared(dataset, getattr(self._text_config, "vocab_size", None))
        dataset = super()._prepare_dataset(dataset, processing_class, whole, False, formatting_func, dataset_name)
        if "attention_mask" in get_dataset_column_names(dataset):
            dataset = drop_masked_tokens(dataset)
        return dataset

    def _plan_training(self) -> RankedBatchSampler:
        """Plan the training set, or give the plan that was made for it."""
        if self._train_plan is None or self._train_plan.dataset is not self.train_dataset:
            row_cost = RowCost.from_config(self.model.config.get_text_config(), frozen_base=is_peft_model(self.model))
            plan_class = TrainPlan if self._image_collator is None else ImagePlan
            self._train_plan = plan_class(self.train_dataset, self.args, row_cost, self._may_mask_labels)
            self._sampler = self._train_plan.sampler(
                num_ranks=self.accelerator.num_processes, rank=self.accelerator.process_index
            )
            self._refuse_lengths(self._train_plan.for_epoch(0), training=True)
            if self._image_collator is None:
                self._report_plan()
        assert self._sampler is not None
        return self._sampler

    def _make_image_collator(self) -> ImageRowCollator:
        # A stream may not have named its columns before.
        refuse_images(self.args, self.train_dataset, self.model)
        keep_towers_apart(self.model)
        return ImageRowCollator(
            self._padded_collator,
            filler=self.train_dataset[0],
            rope_index=RopeIndex(self.model),
            overlong=self.args.resolved_overlong,
            host_offsets=not self.args.torch_compile,
        )

    def _report_plan(self) -> None:
        assert self._train_plan is not None
        assert self._sampler is not None
        self.plan_report = self._train_plan.report(self._sampler)
        if self.accelerator.is_main_process:
            print(self.plan_report.to_text())
            if self.args.packing_report is not None:
                self.plan_report.save(self.args.packing_report)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Give this rank's packed rows, already divided among the ranks."""
        collate = self._image_collator or RowCollator(self.data_collator)
        if not isinstance(self.train_dataset, Dataset):
            args = self.args
            self._sampler = None
            stream = self._stream(
                self.train_dataset, args.packing, args.per_device_train_batch_size, args.gradient_accumulation_steps
            )
            return self._loader(stream, None, collate, training=True)
        sampler = self._plan_training()
        assert self._train_plan is not None
        return self._loader(self._train_plan.fragments(), sampler, collate, training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Give this rank's rows of an evaluation set."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise PackingError("Evaluation needs a data set. Pass `eval_dataset`.")
        mode, images = self._eval_mode(), self._image_collator
        collate: Any = images or RowCollator(self.data_collator)
        if mode == "padded":
            collate = PaddedCollator(self._padded_collator) if images is None else PaddedImageCollator(images)
        if not isinstance(dataset, Dataset):
            self._refuse_lengths(training=False)
            stream = self._stream(dataset, mode == "packed", self.args.per_device_eval_batch_size, 1)
            # Several workers would each number the samples of their own shards, and not in data order.
            in_order = self.args.eval_per_sample is not None
            return self._loader(stream, None, collate, most_workers=1 if in_order else None)
        plan = self._plan_evaluation(dataset)
        sampler = RankedBatchSampler(
            lambda _: plan,
            num_epochs=1,
            num_ranks=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            balance="none",
        )
        samples = FragmentDataset if images is None else RawSamples
        return self._loader(samples(dataset, plan.fragments), sampler, collate)

    def _plan_evaluation(self, dataset: Dataset, name: str = "") -> PackPlan:
        """Plan an evaluation set, and say once what is lost of it."""
        if self._image_collator is not None:
            self._refuse_lengths(training=False)
            return plan_image_evaluation(dataset, self.args)
        what = f"Evaluation set{f' `{name}`' if name else ''}"
        try:
            plan = plan_evaluation(dataset, self.args, packed=self._eval_mode() == "packed")
            self._refuse_lengths(plan, training=False)
        except PackingError as error:
            raise PackingError(f"{what}: {error}") from error
        fates = fates_text(plan)
        if fates and dataset not in self._planned_sets:
            self.accelerator.print(f"{what}: {fates}.")
        self._planned_sets.add(dataset)
        return plan

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Give this rank's rows of a set to predict, which may be raw."""
        if self._image_collator is None and "input_ids" not in get_dataset_column_names(test_dataset):
            test_dataset = self._prepare_dataset(
                test_dataset, self.processing_class, self.args, False, self._formatting_func, "test"
            )
        return self.get_eval_dataloader(test_dataset)

    def _stream(self, dataset: Any, packed: bool, samples_per_row: int, rows_per_step: int) -> RowStream:
        return RowStream(
            dataset,
            self.args,
            packed=packed,
            samples_per_row=samples_per_row,
            num_ranks=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            rows_per_step=rows_per_step,
        )

    def _loader(
        self,
        dataset: FragmentDataset | RawSamples | RowStream,
        sampler: RankedBatchSampler | None,
        collate: Any,
        training: bool = False,
        most_workers: int | None = None,
    ) -> DataLoader[Any]:
        args = self.args
        num_workers = args.dataloader_num_workers
        if most_workers is not None:
            num_workers = min(num_workers, most_workers)
        loader: DataLoader[Any] = DataLoader(
            dataset,
            # A stream gives whole rows.
            **({"batch_size": None} if sampler is None else {"batch_sampler": sampler}),
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=args.dataloader_pin_memory and self.accelerator.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers and training,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=partial(seed_worker, num_workers=num_workers, rank=self.accelerator.process_index),
        )
        # The sampler deals rows to ranks itself. `accelerator.prepare` would divide them a second time.
        return prepare_data_loader(
            loader,
            self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            rng_types=None,
            dispatch_batches=False,
        )

    # ---- training

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # The Trainer's own `set_epoch` does not reach a sampler that a resumed run has wrapped.
        if self._sampler is not None:
            self._sampler.set_epoch(kwargs["epoch"])
            self._rank_idle = None
            if (num_ranks := self.accelerator.num_processes) > 1:
                num_steps = simulated_steps(num_ranks * self.args.gradient_accumulation_steps)
                self._rank_idle = self._sampler.idle(kwargs["epoch"], num_steps)[1]
        super()._run_epoch(*args, **kwargs)

    # ---- evaluation

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate as TRL does, with a loss that is the set's sum over its predicted tokens."""
        self._sums["eval"].sums.clear()
        per_sample = self.args.eval_per_sample
        self._fragment_losses = None if per_sample is None else []
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        totals = self._sums["eval"].reduce(self.accelerator)
        output.metrics[f"{metric_key_prefix}_loss"] = totals["nll"] / max(totals["targets"], 1.0)
        self._metrics["eval"].update({name: [value] for name, value in token_metrics(totals).items()})
        self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]
        if totals["cut"]:
            self._metrics["eval"]["num_cut_tokens"] = [totals["cut"]]
        if self._fragment_losses is not None:
            fragments = getattr(dataloader.dataset, "fragments", None)
            entries = sample_losses(self._fragment_losses, None if fragments is None else fragments[:, 0])
            if self.accelerator.is_main_process:
                name = metric_key_prefix.removeprefix("eval").strip("_")
                write_jsonl(_named(per_sample, name), entries)
        self._fragment_losses = None
        return output


def _named(path: str | None, name: str) -> Path:
    """The path of one of several evaluation sets: `losses.jsonl` becomes `losses-name.jsonl`."""
    assert path is not None
    return Path(path).with_stem(f"{Path(path).stem}-{name}") if name else Path(path)
