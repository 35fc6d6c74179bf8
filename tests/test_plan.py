"""`trl-packing plan`: the plan of a run, from its data and its tokenizer alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calling import call

RUN = ["--config", "quickstart_tiny.yaml"]


def test_plan_is_the_plan_of_the_run(capsys: Any, tmp_path: Path) -> None:
    from trl_packing.recipe import build_sft, parse_sft

    words = [*RUN, "--token_budget", "3000", "--max_length", "700", "--output_dir", str(tmp_path / "out")]
    code, out, _ = call(capsys, "plan", *words, "--json")
    assert code == 0
    planned = json.loads(out)
    *settings, _ = parse_sft(words)
    trained = build_sft(*settings).plan_report.to_dict()
    names = [name for name in trained if name.startswith("num_") and name != "num_epochs"]
    for name in (*names, "fill_rate", "padded_tokens", "optimizer_steps", "segments_per_row"):
        assert planned[name] == trained[name], name
    assert planned["num_cut_tokens"] > 0


def test_plan_counts_ranks_and_draws(capsys: Any, tmp_path: Path) -> None:
    alone = json.loads(call(capsys, "plan", *RUN, "--json")[1])
    picture = tmp_path / "plan.png"
    code, out, _ = call(capsys, "plan", *RUN, "--ranks", "2", "--picture", str(picture))
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "2 ranks" in out
    assert max(map(len, out.splitlines())) <= 100
    assert alone["optimizer_steps"] == alone["num_rows"]


def test_a_shape_that_the_run_refuses_is_refused(capsys: Any) -> None:
    words = ["--packing", "false", "--row_shape", "fixed", "--max_segments", "4", "--token_budget", "8192"]
    code, _, err = call(capsys, "plan", *RUN, *words)
    assert code == 2
    assert "Rows have the shape of `max_segments: 4`" in err


def test_a_config_for_a_gpu_is_planned_without_one(capsys: Any) -> None:
    assert not torch.cuda.is_available()
    words = ["--model_name_or_path", "quickstart/tiny-bamba", "--dataset_name", "quickstart/conversations"]
    code, out, _ = call(capsys, "plan", "--config", "qwen3_5", *words, "--eos_token", "<|im_end|>")
    assert (code, "packed rows" in out) == (0, True)


def test_plan_uses_a_template_of_another_tokenizer(capsys: Any, tmp_path: Path) -> None:
    from trl_packing.quickstart.tiny import byte_tokenizer

    other = byte_tokenizer()
    other.add_tokens(["<|new|>"])
    other.chat_template = "{% for message in messages %}<|new|>{{ message['content'] }}{% endfor %}"
    other.save_pretrained(tmp_path)
    words = ["--assistant_only_loss", "false", "--chat_template_path", str(tmp_path), "--json"]
    plain, templated = (json.loads(call(capsys, "plan", *RUN, *more)[1]) for more in (["--json"], words))
    assert templated["num_tokens"] < plain["num_tokens"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([*RUN, "--ranks", "0"], ["--ranks", "'0'"]),
        ([], ["--config"]),
        ([*RUN, "--dataset_streaming", "true"], ["stream"]),
        ([*RUN, "--tokenbudget", "9"], ["`token_budget`"]),
        ([*RUN, "--model_name_or_path", "./nothing"], ["./nothing"]),
        ([*RUN, "--dataset_name", "./nothing.jsonl"], ["nothing.jsonl"]),
    ],
    ids=["ranks", "no_config", "stream", "option", "model", "data"],
)
def test_a_wrong_plan_is_refused(words: list[str], parts: list[str], capsys: Any) -> None:
    code, out, err = call(capsys, "plan", *words)
    assert (code, out) == (2, "")
    assert all(part in err for part in parts), err


def test_plan_also_says_what_memory_the_run_takes(capsys: Any) -> None:
    code, out, _ = call(capsys, "plan", *RUN, "--json")
    assert code == 0
    assert 0 < json.loads(out)["memory"]["total"] < 2**32
    assert "optimiser" in call(capsys, "plan", *RUN)[1]


def test_samples_with_images_have_nothing_to_plan(capsys: Any, tmp_path: Path) -> None:
    from tiny_vision import picture_talks

    data = tmp_path / "pictures.parquet"
    picture_talks(4).to_parquet(data)
    code, out, err = call(capsys, "plan", *RUN, "--dataset_name", str(data), "--eval_strategy", "no")
    assert (code, out) == (2, "")
    assert "per_device_train_batch_size" in err.splitlines()[-1]
