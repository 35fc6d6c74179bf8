"""The proofs of a run: samples stay apart before step 1, and after step 1 every adapter has received a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import PeftModel
from torch import nn
from transformers import TrainerCallback

from .errors import LeakError
from .isolation import IsolationReport, check_isolation
from .isolation.report import OFF
from .lora import AdapterGradients, adapter_gradients

_Result = TypeVar("_Result")


def prove_isolation(
    model: nn.Module, accelerator: Accelerator, *, training: bool = True, **row_options: Any
) -> IsolationReport:
    """
    Check that segments do not influence one another, and stop all ranks otherwise.

    Args:
        model (`nn.Module`):
            The model to train, with adapters, before or after it is wrapped.
        accelerator ([`~accelerate.Accelerator`]):
            The trainer's.
        training (`bool`, *optional*, defaults to `True`):
            Whether to check train mode. An evaluation needs eval mode, and no gradients.
        row_options (`Any`):
            What the collator gives beside: `position_ids_start`, `host_offsets` and `repeats_offsets`, as for
            [`check_isolation`].

    Returns:
        [`IsolationReport`]: Of this rank.

    Raises:
        [`LeakError`]: On every rank, if any rank found a leak or could not finish a probe.
    """

    def check() -> IsolationReport:
        report = check_isolation(model, training=training, gradients=training, **row_options)
        report.raise_if_leaking()
        return report

    return agreed(check, accelerator)


def agreed(check: Callable[[], _Result], accelerator: Accelerator) -> _Result:
    """
    Run a check on every rank, and stop all ranks where it failed on one.

    Args:
        check (`Callable`):
            Without arguments.
        accelerator ([`~accelerate.Accelerator`]):
            The trainer's.

    Returns:
        `Any`: What the check returned on this rank.

    Raises:
        [`LeakError`]: On every rank, if it raised on any.
    """
    failure, result = None, None
    try:
        result = check()
    except Exception as error:
        # A rank that raised alone would leave the others waiting in their next collective.
        failure = error
    failures = [message for message in gather_object([None if failure is None else str(failure)]) if message]
    if failure is not None:
        if isinstance(failure, LeakError):
            raise failure
        raise LeakError(f"The isolation check could not run: {type(failure).__name__}: {failure}") from failure
    if failures:
        raise LeakError(f"The isolation check failed on another rank: {failures[0]}")
    assert result is not None
    return result


def isolation_line(report: IsolationReport) -> str:
    """Say in one line what a passed check found."""
    effects = ", ".join(f"{probe.name} {probe.effect:.1g}" for probe in report.probes if probe.status != OFF)
    where = f"{report.model}, {report.dtype}, {report.attn_implementation} attention"
    return " ".join([f"Isolation: proven on {where} ({effects}).", *report.notes])


class AdapterProof(TrainerCallback):  # type: ignore[misc]
    """
    After the first optimiser step of a run: a table of the adapters that received a gradient, and an error for dead
    ones.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            The trainer's.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.gradients: AdapterGradients | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Look again in every run."""
        self.gradients = None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Judge the adapters while their gradients are there."""
        if self.gradients is not None or not isinstance(self.accelerator.unwrap_model(model), PeftModel):
            return
        self.gradients = adapter_gradients(model)
        self.accelerator.print(self.gradients.to_text())
        self.gradients.raise_if_dead()
