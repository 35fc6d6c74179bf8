"""The report of a plan: its numbers by hand, its advice tried out, its three forms looked at."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from training import conversations, packed_trainer

from trl_packing import MissingDependencyError, RankedBatchSampler, plan_packs
from trl_packing.cost import PairWork, RowCost
from trl_packing.packing import plan_batches
from trl_packing.report import PlanReport, padded_batches


def skewed_lengths(number: int = 2_000, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).lognormal(5, 1, number).astype(int).clip(8, 2_000)


def report_of(lengths: Any, token_budget: int = 4_096, **options: Any) -> PlanReport:
    cuts = {name: options.pop(name) for name in ("overlong", "exclude", "max_length") if name in options}
    plan = plan_packs(lengths, token_budget, **cuts)
    options = {"batch_size": 4, "rows_per_step": 2, "max_length": cuts.get("max_length"), **options}
    return PlanReport.from_plan(plan, **options)


@pytest.mark.parametrize(
    ("overlong", "trained", "cut", "split", "dropped", "line"),
    [
        ("truncate", 4_126, (1, 4_904), 0, (0, 0), "1  sample longer than `max_length`: 4,904 tokens lost"),
        ("split", 9_030, (0, 0), 1, (0, 0), "1  sample longer than `max_length`: in fragments, no token lost"),
        ("drop", 30, (0, 0), 0, (1, 9_000), "1  sample longer than `max_length`: 9,000 tokens lost"),
    ],
)
def test_every_sample_and_token_is_accounted_for(
    overlong: str, trained: int, cut: tuple[int, int], split: int, dropped: tuple[int, int], line: str
) -> None:
    report = report_of([10, 9_000, 20], overlong=overlong)
    assert (report.num_samples, report.num_tokens) == (3, 9_030)
    assert report.num_trained_tokens == trained
    assert report.num_trained_samples == 3 - dropped[0]
    assert (report.num_cut_samples, report.num_cut_tokens) == cut
    assert report.num_split_samples == split
    assert (report.num_dropped_samples, report.num_dropped_tokens) == dropped
    assert line in report.to_text()


def test_samples_without_a_label_are_named() -> None:
    report = report_of([10, 30, 20], exclude=np.array([False, True, False]))
    assert (report.num_masked_samples, report.num_masked_tokens, report.num_trained_tokens) == (1, 30, 30)
    assert "1  sample left out, no label to train on: 30 tokens" in report.to_text()


def test_padding_is_what_padded_batches_would_compute() -> None:
    real, computed = padded_batches(np.array([5, 5, 5, 5, 5]), 2)
    assert (real.tolist(), computed.tolist()) == ([10, 10, 5], [10, 10, 5])
    lengths = skewed_lengths(50)
    real, computed = padded_batches(lengths, 8)
    shuffled = np.random.default_rng(0).permutation(lengths)
    batches = [shuffled[start : start + 8] for start in range(0, 50, 8)]
    assert real.tolist() == [batch.sum() for batch in batches]
    assert computed.tolist() == [batch.size * batch.max() for batch in batches]
    report = report_of(lengths, batch_size=8)
    assert report.padded_tokens == computed.sum()
    assert report.speed_up == pytest.approx(computed.sum() / lengths.sum())
    assert report.padding_share == pytest.approx(1 - 1 / report.speed_up)


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (2, 3), (5, 2)])
def test_steps_are_those_that_ranks_take(ranks: int, accumulation: int) -> None:
    plan = plan_packs(skewed_lengths(), 4_096)
    sampler = RankedBatchSampler(
        lambda epoch: plan, num_epochs=1, num_ranks=ranks, gradient_accumulation_steps=accumulation
    )
    report = PlanReport.from_plan(plan, batch_size=4, rows_per_step=ranks * accumulation, sampler=sampler)
    assert report.optimizer_steps == -(-len(sampler) // accumulation) == sum(1 for _ in sampler.steps(0))
    assert report.padded_optimizer_steps == -(-2_000 // (4 * ranks * accumulation))
    assert report.tokens_per_step * report.optimizer_steps == pytest.approx(plan.num_planned_tokens)
    assert (report.num_ranks, report.gradient_accumulation_steps) == (ranks, accumulation)


def test_steps_of_a_run_follow_epochs_or_max_steps() -> None:
    lengths = skewed_lengths()
    epoch = report_of(lengths)
    part = report_of(lengths, num_epochs=1.5)
    assert part.run_steps == -(-3 * epoch.optimizer_steps // 2)
    assert part.padded_run_steps == -(-3 * epoch.padded_optimizer_steps // 2)
    limited = report_of(lengths, max_steps=7)
    assert limited.run_steps == 7
    assert limited.num_epochs == pytest.approx(7 / epoch.optimizer_steps)


def test_suggested_settings_give_the_tokens_of_a_padded_step() -> None:
    lengths = skewed_lengths(20_000)
    before = report_of(lengths, 8_192, rows_per_step=8, learning_rate=1e-4)
    assert before.tokens_ratio > 5
    settings = before.equal_token_settings()
    rows = settings["gradient_accumulation_steps"]
    after = report_of(lengths, settings["token_budget"], rows_per_step=rows, learning_rate=1e-4)
    padded = before.padded_tokens_per_step
    assert after.tokens_per_step == pytest.approx(padded * before.equal_token_ratio(), rel=0.02)
    assert before.equal_token_ratio() == pytest.approx(1, abs=0.2)
    assert f"`token_budget: {settings['token_budget']}`" in before.to_text()
    assert before.scaled_learning_rate() == pytest.approx(1e-4 * before.tokens_ratio**0.5)
    alike = report_of(np.full(4_000, 1_000), 4_000, learning_rate=1e-4)
    assert alike.equal_token_settings() == {}
    assert alike.scaled_learning_rate() is None
    assert "carry over" in alike.to_text()


def test_a_budget_below_the_longest_sample_is_never_suggested() -> None:
    report = report_of([*[50] * 400, 4_096], 4_096, batch_size=1)
    assert report.equal_token_settings()["token_budget"] == 4_096
    assert report.equal_token_ratio() > 20
    assert f"the longest sample allows no less: {report.equal_token_ratio():.1f}x" in " ".join(
        report.to_text().split()
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": [100] * 400}, "Only 5 optimiser steps are left"),
        ({"lengths": [4_096, 20_000], "num_epochs": 200}, "66% of all tokens are lost"),
        ({"lengths": [2_500] * 400}, "Rows are only 61.0% full"),
        ({"lengths": [4_096] * 400}, None),
    ],
)
def test_warnings_come_when_they_are_due(options: dict[str, Any], words: str | None) -> None:
    report = report_of(**options)
    if words is None:
        assert report.warnings() == []
    else:
        assert [words in warning for warning in report.warnings()] == [True]
        assert words in report.to_text(200)


def test_too_few_rows_for_the_ranks_are_named() -> None:
    plan = plan_packs([100] * 3, 100)
    sampler = RankedBatchSampler(lambda epoch: plan, num_epochs=1, num_ranks=8)
    report = PlanReport.from_plan(plan, batch_size=1, rows_per_step=8, sampler=sampler, num_epochs=500)
    assert "3 rows cannot keep 8 ranks busy." in report.warnings()[0]


def test_idle_is_the_samplers_simulation() -> None:
    plan = plan_packs(skewed_lengths(), 4_096)
    cost = RowCost((PairWork("full", float("inf"), 1e-3),))
    sampler = RankedBatchSampler(lambda epoch: plan, num_epochs=1, num_ranks=4, row_cost=cost)
    report = PlanReport.from_plan(plan, batch_size=4, rows_per_step=4, sampler=sampler)
    assert (report.idle_before, report.idle_after) == sampler.idle(0)
    assert report.idle_before is not None
    assert report.idle_after is not None
    assert report.idle_after < report.idle_before
    assert f"{report.idle_after:.1%}  of the time, simulated for 4 ranks" in report.to_text()
    assert "ranks wait" not in report_of(skewed_lengths()).to_text()


@pytest.mark.parametrize("width", [80, 100])
def test_text_is_plain_and_fits_its_columns(width: int) -> None:
    report = report_of(skewed_lengths(), learning_rate=2e-4, max_length=512)
    text = report.to_text(width)
    assert text.isascii()
    assert "\x1b" not in text
    assert max(map(len, text.split("\n"))) <= width
    # A word is never cut in two.
    assert text.split() == report.to_text(1_000).split()


def test_a_terminal_gets_the_same_words_with_style() -> None:
    report = report_of(skewed_lengths())
    shown = Console(file=StringIO(), width=96, force_terminal=True, color_system="standard")
    shown.print(report)
    styled = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1m" in styled
    piped = Console(file=StringIO(), width=96)
    piped.print(report)
    plain = piped.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in plain
    assert plain.split() == report.to_text().split()


def test_rows_without_a_budget_have_no_fill_and_no_advice() -> None:
    plan = plan_batches(skewed_lengths(40), 4, order=np.arange(40))
    report = PlanReport.from_plan(plan, batch_size=4, rows_per_step=1, learning_rate=1e-4)
    assert (report.token_budget, report.optimizer_steps, report.padded_optimizer_steps) == (0, 10, 10)
    assert report.equal_token_settings() == {}
    assert "full" not in report.to_text()


def test_json_holds_every_number_and_what_it_means() -> None:
    report = report_of(skewed_lengths(), learning_rate=2e-4)
    values = json.loads(json.dumps(report.to_dict()))
    assert values["num_rows"] == report.num_rows
    assert values["equal_token_settings"] == report.equal_token_settings()
    assert values["warnings"] == report.warnings()
    assert sum(values["shape"]["samples_per_length"]) == 2_000
    assert sum(values["shape"]["first_rows"][0]) <= report.token_budget
    assert np.mean(values["shape"]["row_fill"]) == pytest.approx(report.fill_rate, abs=0.01)
    assert np.mean(values["shape"]["padded_fill"]) == pytest.approx(1 - report.padding_share, abs=0.01)


@pytest.mark.parametrize("lengths", [[5], [7] * 20, skewed_lengths(300)], ids=["one", "alike", "skewed"])
def test_the_picture_can_be_drawn(lengths: Any, tmp_path: Any) -> None:
    from matplotlib.image import imread

    report_of(lengths, max_length=1_024, overlong="split").save_picture(tmp_path / "plan.png")
    picture = imread(tmp_path / "plan.png")
    assert picture.shape[:2] == (1_040, 1_560)
    assert picture.std() > 0.05


def test_without_matplotlib_the_other_two_forms_are_written(tmp_path: Any, monkeypatch: Any) -> None:
    report = report_of(skewed_lengths(100))
    report.save(tmp_path / "with")
    assert sorted(path.name for path in (tmp_path / "with").iterdir()) == ["plan.json", "plan.png", "plan.txt"]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "matplotlib" else find_spec(name, *args)
    )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report.save(tmp_path / "without")
    assert sorted(path.name for path in (tmp_path / "without").iterdir()) == ["plan.json", "plan.txt"]
    with pytest.raises(MissingDependencyError, match=r"pip install 'trl-packing\[plots\]'"):
        report.save_picture(tmp_path / "plan.png")


def test_a_report_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from trl_packing import plan_packs; from trl_packing.report import PlanReport;"
        "PlanReport.from_plan(plan_packs([3, 4], 8), batch_size=1, rows_per_step=1).to_text();"
        "print(sorted({'torch', 'matplotlib', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_prints_and_saves_its_report(tmp_path: Any, capsys: Any) -> None:
    trainer = packed_trainer(tmp_path, conversations(12), packing=True, packing_report=str(tmp_path / "report"))
    assert trainer.plan_report.num_samples == 12
    assert (tmp_path / "report" / "plan.txt").read_text().strip() in capsys.readouterr().out
    assert json.loads((tmp_path / "report" / "plan.json").read_text())["num_samples"] == 12
