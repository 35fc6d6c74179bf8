"""
Checkpoints that know their place in the plan, and going on from there with any number of ranks.

The Trainer counts optimiser steps, whose size depends on ranks and accumulation. The plan's fragments do not, so a
checkpoint records the epoch and how many of its fragments are trained.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import PreTrainedModel
from transformers.optimization import GreedyLR

from ..errors import PackingError
from ..planning import plan_fingerprint
from ..resume import ResumeState, check_resume, last_whole_checkpoint
from ..sampler import RankedBatchSampler
from .loss import TokenLossTrainer
from .weights import check_adapter, holds_weights, load_weights


class ResumingTrainer(TokenLossTrainer):
    """What [`PackedSFTTrainer`] adds to saving and resuming."""

    _sampler: RankedBatchSampler | None
    _train_plan: Any
    # Steps of the schedule that lie behind, where that is not the number of the last optimiser step.
    _schedule_step: int | None = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. `resume_from_checkpoint=True` takes the last checkpoint that was written whole."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
        self._logged_at = time.perf_counter()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if model is None and self._load_whole(resume_from_checkpoint):
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_whole(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _load_whole(self, checkpoint: str) -> bool:
        """Load a whole model's checkpoint; only check adapters. FSDP and DeepSpeed read back the names they wrote."""
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return False
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if is_peft_model(model):
            check_adapter(model, checkpoint)
        elif isinstance(model, PreTrainedModel) and holds_weights(checkpoint):
            load_weights(model, checkpoint)
            return True
        return False

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        place: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._total_train_tokens = 0
        self._schedule_step = None
        if self._sampler is not None:
            self._sampler.skip(0, 0)
        if resume_from_checkpoint is None:
            return place
        state = check_resume(resume_from_checkpoint, self._fingerprint())
        self._total_train_tokens = state.num_tokens
        if self._sampler is None or state.epoch is None or state.num_fragments is None:
            return place
        epoch, num_micro_steps = place
        sampler, wanted = self._sampler, self.args.max_steps
        is_done = self.state.global_step >= wanted if wanted > 0 else state.epoch >= sampler.num_epochs
        if is_done:
            name, value = ("max_steps", wanted) if wanted > 0 else ("num_train_epochs", self.args.num_train_epochs)
            self.accelerator.print(
                f"Nothing is left to train: the checkpoint has {self.state.global_step:,} steps and {state.epoch} "
                f"epochs behind it, and `{name}` is {value:g}."
            )
            return max(state.epoch, sampler.num_epochs), 0
        if epoch == state.epoch and sampler.num_fragments_trained(epoch, num_micro_steps) == state.num_fragments:
            return place
        return self._go_on(state, sampler, max_steps, num_update_steps_per_epoch)

    def _go_on(
        self, state: ResumeState, sampler: RankedBatchSampler, max_steps: int, steps_per_epoch: int
    ) -> tuple[int, int]:
        """Start in the middle of an epoch whose steps have another size now, or are more or fewer."""
        accumulation = self.args.gradient_accumulation_steps
        changed = f"{state.num_ranks} ranks x {state.gradient_accumulation_steps} micro-steps and has now "
        changed += f"{sampler.num_ranks} x {accumulation}"
        has_new_size = state.num_ranks * state.gradient_accumulation_steps != sampler.num_ranks * accumulation
        if self.args.max_steps > 0 and has_new_size:
            raise PackingError(
                f"`max_steps` counts optimiser steps, but a step of the checkpoint had {changed}, so the epochs that "
                "are left would not add up to it. Resume with as many rows a step (ranks x "
                "`gradient_accumulation_steps`), or give `num_train_epochs` instead of `max_steps`."
            )
        if self.is_deepspeed_enabled and state.num_ranks != sampler.num_ranks:
            raise PackingError(
                f"DeepSpeed's checkpoints hold one part of the optimiser per rank, but a step had {changed}. Resume "
                f"on {state.num_ranks} ranks, or start a new run from the checkpoint's weights."
            )
        assert state.epoch is not None
        assert state.num_fragments is not None
        num_steps = 0
        if state.epoch < sampler.num_epochs:
            sampler.skip(state.epoch, state.num_fragments)
            # The sampler puts micro-steps without rows in place of what was trained. Whole steps of them are skipped.
            num_steps = sampler.num_fillers(state.epoch) // accumulation
        num_behind = state.epoch * steps_per_epoch + num_steps
        if self.args.max_steps > 0:
            num_left = max_steps - self.state.global_step
            num_planned = math.ceil(max_steps / steps_per_epoch) * steps_per_epoch - num_behind
            if num_planned < num_left:
                raise PackingError(
                    f"`max_steps` = {max_steps} plans {math.ceil(max_steps / steps_per_epoch)} epochs of "
                    f"{steps_per_epoch} steps, but an epoch of the checkpoint's run had another number of steps, and "
                    f"after its step {self.state.global_step} only {max(num_planned, 0)} of {num_left} are left in "
                    "those epochs. Give `num_train_epochs` instead of `max_steps`."
                )
            # Steps of the same size, counted from the first run's first one.
            self._schedule_step = self.state.global_step
        else:
            num_left = max_steps - num_behind
            self._schedule_step = num_behind
        # Steps are numbered on from the checkpoint, so that a later checkpoint has a higher number.
        self.state.max_steps = self.state.global_step + num_left
        reason = f"steps of another size: a step had {changed}" if has_new_size else "another number of rows per epoch"
        left = sampler.plan(state.epoch).num_fragments - state.num_fragments
        self.accelerator.print(
            f"Resuming with {reason}. Epoch {state.epoch} goes on with the {left:,} samples that are left of it; "
            f"{num_left:,} steps are left in all."
        )
        return state.epoch, num_steps * accumulation

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self._schedule_step is not None:
            _move_schedule(self.lr_scheduler, self._schedule_step)
        return prepared

    def _fingerprint(self) -> dict[str, Any]:
        return plan_fingerprint(self.args, self._train_plan)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        pending = torch.as_tensor(self._sums["train"].sums.get("tokens", 0.0), device=self.accelerator.device)
        num_tokens = self._total_train_tokens + int(self.accelerator.reduce(pending, reduction="sum"))
        if self.args.should_save:
            checkpoint = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            checkpoint.mkdir(parents=True, exist_ok=True)
            epoch, num_fragments = self._place_in_plan()
            ResumeState(
                fingerprint=self._fingerprint(),
                num_tokens=num_tokens,
                num_ranks=self.accelerator.num_processes,
                gradient_accumulation_steps=self.args.gradient_accumulation_steps,
                epoch=epoch,
                num_fragments=num_fragments,
            ).write(checkpoint)
        super()._save_checkpoint(model, trial)

    def _place_in_plan(self) -> tuple[int, int] | tuple[None, None]:
        """The epoch, and how many of its fragments are trained."""
        if self._sampler is None:
            return None, None
        epoch, num_micro_steps = divmod(round(self.state.epoch * len(self._sampler)), len(self._sampler))
        return epoch, self._sampler.num_fragments_trained(epoch, num_micro_steps)


def _move_schedule(scheduler: Any, step: int) -> None:
    """Go to a step of the schedule. It has as many as the whole run would have with steps of today's size."""
    if isinstance(scheduler, ReduceLROnPlateau | GreedyLR):
        # These look at the loss, not at the step.
        return
    if not isinstance(scheduler, LambdaLR):
        raise PackingError(
            f"The schedule of a {type(scheduler).__name__} cannot be moved to another number of steps. Resume "
            "with as many rows a step (ranks x `gradient_accumulation_steps`) as before, or set `lr_scheduler_type`."
        )
    scheduler.last_epoch = step
    rates = [base * function(step) for base, function in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
