"""A plan's report as a table for a terminal, plain where it is piped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..packing import PackPlan
    from .plan import PlanReport


def render(report: PlanReport) -> RenderableType:
    """
    Lay out a report: a number and a remark per line, advice, warnings.

    Args:
        report ([`PlanReport`]):
            Of a plan.

    Returns:
        `RenderableType`: For any rich console.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for name, number, remark in _lines(report):
        table.add_row(name, number, remark)
    parts: list[RenderableType] = [Text("Pack plan", style="bold"), Padding(table, (0, 0, 1, 2))]
    parts += [Text(sentence) for sentence in _advice(report)]
    parts += [Text.assemble(("Warning: ", "bold yellow"), sentence) for sentence in report.warnings()]
    return Group(*parts)


def _lines(report: PlanReport) -> list[tuple[str, str, str]]:
    lines = [
        ("samples", f"{report.num_trained_samples:,}", _rest(report.num_samples, "in the data set")),
        ("tokens", f"{report.num_trained_tokens:,}", _rest(report.num_tokens, "in the data set")),
    ]
    lines += _fates(report)
    row = f"{report.segments_per_row:.1f} segments each"
    if report.token_budget:
        row = f"of {report.token_budget:,} tokens, {report.fill_rate:.1%} full, {row}"
    lines += [
        ("packed rows", f"{report.num_rows:,}", row),
        (
            "steps an epoch",
            f"{report.optimizer_steps:,}",
            f"of {report.tokens_per_step:,.0f} tokens: {_step_size(report)}",
        ),
        (
            "padded instead",
            f"{report.padded_optimizer_steps:,}",
            f"step{_s(report.padded_optimizer_steps)} of {report.padded_tokens_per_step:,.0f} tokens, at "
            f"{report.batch_size} sample{_s(report.batch_size)} a micro-step",
        ),
        (
            "pads saved",
            f"{report.padding_share:.1%}",
            f"of the {report.padded_tokens:,} tokens that padded batches compute: about "
            f"{report.speed_up:.1f}x as fast",
        ),
    ]
    if report.idle_before is not None:
        lines.append(
            (
                "ranks wait",
                f"{report.idle_after:.1%}",
                f"of the time, simulated for {report.num_ranks} ranks; {report.idle_before:.1%} in the plan's own "
                "order",
            )
        )
    epochs = f"{report.num_epochs:.3g} epoch{_s(report.num_epochs)}"
    lines.append(("steps in all", f"{report.run_steps:,}", f"in {epochs}; {report.padded_run_steps:,} if padded"))
    return lines


def fates_text(plan: PackPlan) -> str:
    """Say in one line what became of a plan's overlong and masked samples; empty where nothing happened to any."""
    return "; ".join(f"{name.strip()} {number} {remark}" for name, number, remark in _fates(plan))


def _fates(report: PlanReport | PackPlan) -> list[tuple[str, str, str]]:
    fates = (
        ("  cut", report.num_cut_samples, f"longer than `max_length`: {report.num_cut_tokens:,} tokens lost"),
        ("  split", report.num_split_samples, "longer than `max_length`: in fragments, no token lost"),
        (
            "  dropped",
            report.num_dropped_samples,
            f"longer than `max_length`: {report.num_dropped_tokens:,} tokens lost",
        ),
        (
            "  masked",
            report.num_masked_samples,
            f"left out, no label to train on: {report.num_masked_tokens:,} tokens",
        ),
    )
    return [(name, f"{number:,}", f"sample{_s(number)} {remark}") for name, number, remark in fates if number]


def _step_size(report: PlanReport) -> str:
    ranks = f"{report.num_ranks} rank{_s(report.num_ranks)}"
    return f"{ranks} x {report.gradient_accumulation_steps} micro-step{_s(report.gradient_accumulation_steps)}"


def _advice(report: PlanReport) -> list[str]:
    settings = report.equal_token_settings()
    if not settings:
        return ["A packed step has about the tokens of a padded one: learning rate and batch carry over."]
    advice = [
        f"A packed step has {report.tokens_ratio:.1f}x the tokens of a padded one, so a learning rate tuned on padded "
        "batches does not carry over."
    ]
    named = [f"`{name}: {value}`" for name, value in settings.items() if value != _present(report, name)]
    if named:
        left = report.equal_token_ratio()
        near = "" if left < 1.25 else f" (the longest sample allows no less: {left:.1f}x)"
        advice.append(f"For steps of the padded size: {' and '.join(named)}{near}.")
    rate = report.scaled_learning_rate()
    if rate is not None:
        size = "large" if report.tokens_ratio > 1 else "small"
        advice.append(
            f"{'Or keep' if named else 'Keep'} the {size} step and try a `learning_rate` of {rate:.1e} instead of "
            f"{report.learning_rate:.1e}, scaled by the square root of {report.tokens_ratio:.1f}."
        )
    return [" ".join(advice)]


def _present(report: PlanReport, name: str) -> int:
    return {
        "gradient_accumulation_steps": report.gradient_accumulation_steps,
        "token_budget": report.token_budget,
    }[name]


def _rest(number: int, where: str) -> str:
    return f"of {number:,} {where}"


def _s(number: float) -> str:
    return "" if number == 1 else "s"
