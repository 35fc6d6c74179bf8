"""
`PackedSFTTrainer`: TRL's `SFTTrainer` on packed rows whose boundaries are computed once, on the host.

TRL prepares the data, builds adapters and runs the loop. Ours are the plan, the rows, the loss over token sums, and the proof
before step 1. `compute_loss` is the one deliberate reimplementation; its numbers are tested against TRL's.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.logging import get_logger
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoProcessor, PreTrainedModel, TrainingArguments, set_seed
from transformers.trainer_utils import EvalLoopOutput, seed_worker
from trl import SFTConfig, SFTTrainer
from trl.data_utils import get_dataset_column_names
from trl.trainer.utils import create_model_from_path, get_config_model_id

from .collator import ROW_INFO, PackedCollator, PaddedCollator, RowCollator, RowInfo
from .config import PackedSFTConfig
from .cost import RowCost
from .dataset import FragmentDataset, drop_masked_tokens
from .errors import PackingError
from .evaluation import FragmentLoss, TokenSums, fragment_losses, sample_losses, token_metrics, write_jsonl
from .planning import TrainPlan, plan_evaluation, plan_fingerprint
from .preflight import check_model, choose_attention, refuse_parallelism, refuse_settings
from .proof import isolation_line, prove_isolation
from .register import register_ops
from .report import PlanReport
from .resume import check_resume, last_whole_checkpoint, write_resume_state
from .sampler import RankedBatchSampler
from .streaming import RowStream

logger = get_logger(__name__)


class PackedSFTTrainer(SFTTrainer):  # type: ignore[misc]
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
        [`LeakError`]: By `train`, before step 1, if segments influence one another on this model.
    """

    _tag_names = ["trl", "sft", "trl_packing"]

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
        args = _packed_config(args, model)
        columns = None if train_dataset is None else get_dataset_column_names(train_dataset)
        refuse_settings(args, columns, peft_config, data_collator)
        if isinstance(model, str):
            model, processing_class = _load(model, args, processing_class, quantization_config)
            quantization_config = None
        register_ops(model, ops=args.ops)
        check_model(model, peft_config)
        self._settings = args
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
        self._padded_collator = self.data_collator
        self.data_collator = data_collator or _packed_collator(self.args)
        self.padding_free = True
        # Token sums are normalised by us, whatever the model's own loss accepts.
        self.model_accepts_loss_kwargs = True
        device = self.accelerator.device
        self._sums = {"train": TokenSums(device), "eval": TokenSums(device)}
        self._fragment_losses: list[FragmentLoss] | None = None
        self._logged_at = time.perf_counter()
        self._train_plan: TrainPlan | None = None
        self._sampler: RankedBatchSampler | None = None
        self.isolation_report: Any = None
        if isinstance(self.train_dataset, Dataset):
            self._plan_training()

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
        whole = copy.copy(args)
        if is_train or self._eval_mode() != "padded":
            # Overlong samples must reach the plan whole, to be counted.
            whole.max_length = None
        dataset = super()._prepare_dataset(dataset, processing_class, whole, False, formatting_func, dataset_name)
        if "attention_mask" in get_dataset_column_names(dataset):
            dataset = drop_masked_tokens(dataset)
        return dataset

    def _plan_training(self) -> RankedBatchSampler:
        """Plan the training set, or give the plan that was made for it."""
        if self._train_plan is None or self._train_plan.dataset is not self.train_dataset:
            row_cost = RowCost.from_config(self.model.config.get_text_config())
            self._train_plan = TrainPlan(self.train_dataset, self.args, row_cost)
            self._sampler = self._train_plan.sampler(
                num_ranks=self.accelerator.num_processes, rank=self.accelerator.process_index
            )
            self._report_plan()
        assert self._sampler is not None
        return self._sampler

    def _report_plan(self) -> None:
        assert self._train_plan is not None
        assert self._sampler is not None
        self.plan_report = PlanReport.from_plan(
            self._sampler.plan(0),
            batch_size=self.args.per_device_train_batch_size,
            rows_per_step=self.accelerator.num_processes * self.args.gradient_accumulation_steps,
        )
        if self.accelerator.is_main_process:
            print(self.plan_report.to_text())
            if self.args.packing_report is not None:
                self.plan_report.save(self.args.packing_report)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Give this rank's packed rows, already divided among the ranks."""
        collate = RowCollator(self.data_collator)
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
        mode = self._eval_mode()
        collate = PaddedCollator(self._padded_collator) if mode == "padded" else RowCollator(self.data_collator)
        if not isinstance(dataset, Dataset):
            stream = self._stream(dataset, mode == "packed", self.args.per_device_eval_batch_size, 1)
            return self._loader(stream, None, collate)
        plan = plan_evaluation(dataset, self.args, packed=mode == "packed")
        sampler = RankedBatchSampler(
            lambda _: plan,
            num_epochs=1,
            num_ranks=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            balance="none",
        )
        return self._loader(FragmentDataset(dataset, plan.fragments), sampler, collate)

    get_test_dataloader = get_eval_dataloader

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

    def _eval_mode(self) -> str:
        """`packed` to the budget, `flat` (the batch's samples end to end), or `padded`."""
        if self._settings.eval_packing is None:
            return "packed" if self._settings.packing else "flat"
        return "packed" if self._settings.eval_packing else "padded"

    def _loader(
        self,
        dataset: FragmentDataset | RowStream,
        sampler: RankedBatchSampler | None,
        collate: Any,
        training: bool = False,
    ) -> DataLoader[Any]:
        args = self.args
        loader: DataLoader[Any] = DataLoader(
            dataset,
            # A stream gives whole rows.
            **({"batch_size": None} if sampler is None else {"batch_sampler": sampler}),
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and self.accelerator.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers and training,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=partial(
                seed_worker, num_workers=args.dataloader_num_workers, rank=self.accelerator.process_index
            ),
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

    # ---- loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not batch_samples or ROW_INFO not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        num_targets = torch.tensor(sum(batch[ROW_INFO].num_targets for batch in batch_samples), device=device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            num_targets = self.accelerator.gather(num_targets).sum()
        return num_targets

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """
        Compute a micro-batch's share of the step's token-weighted loss, and add up its metrics on the device.

        Args:
            model (`nn.Module`):
                The wrapped model.
            inputs (`dict[str, Any]`):
                From the collator: model inputs, `labels` and the row's info.
            return_outputs (`bool`, *optional*, defaults to `False`):
                Whether to return the model's outputs too, with logits.
            num_items_in_batch (`torch.Tensor`, *optional*):
                Predicted tokens of the whole optimiser step on all ranks. Without it the loss is the micro-batch's mean.

        Returns:
            `torch.Tensor`, or a tuple of it and the outputs: a scalar whose sum over micro-batches, averaged over ranks, is
                the step's mean loss per predicted token.
        """
        mode = "train" if self.model.training else "eval"
        info: RowInfo | None = inputs.get(ROW_INFO)
        inputs = {key: value for key, value in inputs.items() if key != ROW_INFO}
        # A cache makes attention layers see the whole row, and hybrids fail.
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        logits_inputs = {key: value for key, value in inputs.items() if key != "labels"}
        outputs, loss_sum, loss = self._loss_sum(model, inputs, logits_inputs, num_items_in_batch)
        num_targets = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
        if loss is None:
            # Clamped: a batch without a predicted token has loss 0, not 0 / 0.
            loss = loss_sum / num_targets.clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            # DDP averages gradients over ranks, and the divisor counted the tokens of all ranks.
            loss = loss * self.accelerator.num_processes
        if self.aux_loss_enabled and loss_sum is not None:
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        self._add_metrics(mode, outputs, info, loss_sum)
        if return_outputs:
            with torch.no_grad():
                outputs = model(**logits_inputs)
            return loss, outputs
        return loss

    def _loss_sum(
        self, model: nn.Module, inputs: dict[str, Any], logits_inputs: dict[str, Any], num_items: torch.Tensor | None
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
        """TRL's three ways to a loss: its fused head's sum, or a finished loss from full logits."""
        if self.compute_loss_func is None and (self.label_smoother is None or self.args.loss_type != "nll"):
            outputs = model(**inputs, fused_lm_head=True)
            per_token = -outputs.log_probs
            if self.args.loss_type == "dft":
                per_token = per_token * outputs.log_probs.exp().detach()
            return outputs, per_token.sum(), None
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(model(**logits_inputs), inputs["labels"], num_items_in_batch=num_items)
        else:
            loss = self.label_smoother(
                model(**logits_inputs), inputs["labels"], shift_labels=True, num_items_in_batch=num_items
            )
        with torch.no_grad():
            return model(**inputs, fused_lm_head=True), None, loss

    def _add_metrics(self, mode: str, outputs: Any, info: RowInfo | None, loss_sum: torch.Tensor | None) -> None:
        self._sums[mode].add(
            nll=-outputs.log_probs.sum() if loss_sum is None or self.args.loss_type != "nll" else loss_sum,
            entropy=outputs.entropy.sum(),
            correct=outputs.is_top1.sum(),
            targets=outputs.label_mask.sum() if info is None else info.num_targets,
            aux=outputs.aux_loss if self.aux_loss_enabled else 0.0,
            tokens=0 if info is None else info.num_tokens,
            segments=0 if info is None else info.num_segments,
            rows=0 if info is None else bool(info.num_segments),
            micro_steps=1,
        )
        if mode == "eval" and self._fragment_losses is not None and info is not None:
            self._fragment_losses += fragment_losses(-outputs.log_probs, outputs.label_mask, info)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Read the interval's sums from the device, once, and log them with everything else."""
        mode = "train" if self.model.training else "eval"
        if self._sums[mode].sums:
            totals = self._sums[mode].reduce(self.accelerator)
            metrics = token_metrics(totals)
            if mode == "train":
                self._total_train_tokens += int(totals["tokens"])
                metrics |= self._row_metrics(totals)
            metrics["num_tokens"] = self._total_train_tokens
            self._metrics[mode].update({name: [value] for name, value in metrics.items()})
        super().log(logs, start_time)

    def _row_metrics(self, totals: dict[str, float]) -> dict[str, float]:
        now, rows = time.perf_counter(), max(totals["rows"], 1.0)
        metrics = {
            "tokens_per_second": totals["tokens"] / max(now - self._logged_at, 1e-9),
            "segments_per_row": totals["segments"] / rows,
        }
        if self.args.packing:
            metrics["fill_rate"] = totals["tokens"] / (rows * self.args.resolved_token_budget)
        self._logged_at = now
        return metrics

    # ---- training

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. `resume_from_checkpoint=True` takes the last checkpoint that was written whole."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
        self._logged_at = time.perf_counter()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        result: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        checkpoint = kwargs.get("resume_from_checkpoint", args[3] if len(args) > 3 else None)
        self._total_train_tokens = 0
        if checkpoint is not None:
            self._total_train_tokens = check_resume(checkpoint, self._fingerprint())
        return result

    def _fingerprint(self) -> dict[str, Any]:
        samples = None if self._train_plan is None else self._train_plan.samples
        return plan_fingerprint(self.args, samples)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # `evaluate` before `train` marks the bare model as prepared, and DDP would never wrap it.
        if self.model_wrapped is self.model and getattr(self.model, "_is_accelerate_prepared", False):
            self.model._is_accelerate_prepared = False
            self.accelerator._models.clear()
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._prove_isolation()
        return prepared

    def _prove_isolation(self) -> None:
        if self.args.isolation_check == "off":
            self.accelerator.print("Isolation check: off (`isolation_check: off`). Nothing proves that samples stay apart.")
            return
        self.isolation_report = prove_isolation(self.model, self.accelerator)
        self.accelerator.print(isolation_line(self.isolation_report))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # The Trainer's own `set_epoch` does not reach a sampler that a resumed run has wrapped.
        if self._sampler is not None:
            self._sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        pending = torch.as_tensor(self._sums["train"].sums["tokens"], device=self.accelerator.device)
        num_tokens = self._total_train_tokens + int(self.accelerator.reduce(pending, reduction="sum"))
        if self.args.should_save:
            checkpoint = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            checkpoint.mkdir(parents=True, exist_ok=True)
            write_resume_state(checkpoint, self._fingerprint(), num_tokens)
        super()._save_checkpoint(model, trial)

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
        if self._fragment_losses is not None:
            fragments = getattr(dataloader.dataset, "fragments", None)
            entries = sample_losses(self._fragment_losses, None if fragments is None else fragments[:, 0])
            if self.accelerator.is_main_process:
                name = metric_key_prefix.removeprefix("eval").strip("_")
                write_jsonl(_named(per_sample, name), entries)
        self._fragment_losses = None
        return output


def _packed_config(args: TrainingArguments | None, model: str | PreTrainedModel) -> PackedSFTConfig:
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return PackedSFTConfig(f"{name.split('/')[-1]}-SFT")
    if isinstance(args, SFTConfig):
        return PackedSFTConfig.from_sft(args)
    if isinstance(args, TrainingArguments):
        # `to_dict` hides the token.
        return PackedSFTConfig(**{**args.to_dict(), "hub_token": args.hub_token})
    raise PackingError(f"`args` must be a `PackedSFTConfig`, but it is a {type(args).__name__}.")


def _packed_collator(args: PackedSFTConfig) -> PackedCollator:
    fixed = args.row_shape == "fixed"
    return PackedCollator(
        pad_to_multiple_of=args.pad_to_multiple_of,
        token_budget=args.resolved_token_budget if fixed else None,
        max_segments=args.max_segments if fixed else None,
        host_offsets=True,
    )


def _load(
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


def _named(path: str | None, name: str) -> Path:
    """The path of one of several evaluation sets: `losses.jsonl` becomes `losses-name.jsonl`."""
    assert path is not None
    return Path(path).with_stem(f"{Path(path).stem}-{name}") if name else Path(path)
