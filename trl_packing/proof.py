"""The isolation check as the trainer runs it: on the model about to be trained, on all ranks, before step 1."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from .errors import LeakError
from .isolation import IsolationReport, check_isolation


def prove_isolation(model: nn.Module, accelerator: Accelerator) -> IsolationReport:
    """
    Check that segments do not influence one another, and stop all ranks otherwise.

    Args:
        model (`nn.Module`):
            The model to train, with adapters, before or after it is wrapped.
        accelerator ([`~accelerate.Accelerator`]):
            The trainer's.

    Returns:
        [`IsolationReport`]: Of this rank.

    Raises:
        [`LeakError`]: On every rank, if any rank found a leak or could not finish a probe.
    """
    failure, report = None, None
    try:
        report = check_isolation(model)
        report.raise_if_leaking()
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
    assert report is not None
    return report


def isolation_line(report: IsolationReport) -> str:
    """Say in one line what a passed check found."""
    effects = ", ".join(f"{probe.name} {probe.effect:.1g}" for probe in report.probes)
    return f"Isolation: proven on {report.model}, {report.dtype}, {report.attn_implementation} attention ({effects})."
