"""
The loss of a micro-batch as a share of its optimiser step, and metrics weighted by predicted tokens.

Upstream reads the device for its metrics in every micro-step. Here sums stay on the device until they are logged.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from trl import SFTTrainer

from ..collator import ROW_INFO, RowInfo
from ..evaluation import FragmentLoss, TokenSums, fragment_losses, token_metrics
from ..register.head import head_positions
from ..register.router import balancing_tokens
from .noise import embedding_noise


class TokenLossTrainer(SFTTrainer):  # type: ignore[misc]
    """What [`PackedSFTTrainer`] does in place of TRL's `compute_loss` and `log`. Contract: the same numbers."""

    _sums: dict[str, TokenSums]
    _fragment_losses: list[FragmentLoss] | None
    _logged_at: float
    _rank_idle: float | None
    _replaces_nan_losses: bool
    _text_config: Any
    aux_loss_enabled: bool

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a micro-step. For the log, a loss that is not finite becomes the interval's mean so far."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        if not self._replaces_nan_losses:
            return loss
        mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        return torch.where(torch.isfinite(loss), loss, mean)

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
                Predicted tokens of the whole optimiser step on all ranks. Without it the loss is the micro-batch's
                mean.

        Returns:
            `torch.Tensor`, or a tuple of it and the outputs: a scalar whose sum over micro-batches, averaged over
                ranks, is the step's mean loss per predicted token.
        """
        mode = "train" if self.model.training else "eval"
        info: RowInfo | None = inputs.get(ROW_INFO)
        inputs = {key: value for key, value in inputs.items() if key != ROW_INFO}
        # A cache makes attention layers see the whole row, and hybrids fail.
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        logits_inputs = {key: value for key, value in inputs.items() if key != "labels"}
        positions = None if info is None or self.args.torch_compile else info.target_positions
        boundaries, is_filler = (None, False) if info is None else (info.boundaries, not info.num_tokens)
        balancing = balancing_tokens(self._text_config, boundaries, is_filler=is_filler)
        noise = embedding_noise(self.model, self.args.neftune_noise_alpha, boundaries)
        with head_positions(positions), balancing if self.aux_loss_enabled else nullcontext(), noise:
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
            cut=0 if info is None else info.num_cut_tokens,
            # A filler has no tokens to balance experts over.
            micro_steps=1 if info is None else bool(info.num_tokens),
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
        if totals["cut"]:
            metrics["num_cut_tokens"] = totals["cut"]
        if self._rank_idle is not None:
            metrics["rank_idle"] = self._rank_idle
        self._logged_at = now
        return metrics
