"""What people mistype: one sentence that names it, exit code 2, no traceback, and nothing trained."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from calling import sentence
from launching import ENVIRONMENT

ROOT = Path(__file__).parents[1]
RUN = """\
model_name_or_path: quickstart/tiny-llama
dataset_name: quickstart/conversations
max_steps: 1
use_cpu: true
bf16: false
report_to: none
save_strategy: "no"
output_dir: out
"""


def run_recipe(text: str | bytes, capsys: Any) -> tuple[int, str]:
    Path("run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    main = runpy.run_path(str(ROOT / "recipes" / "sft.py"))["main"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["--config", "run.yaml"])
    assert not Path("out", "model.safetensors").exists()
    return stop.value.code, capsys.readouterr().err  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("learning_rate: -1", "`learning_rate` must be at least 0"),
        ("dataloader_num_workers: -2", "`dataloader_num_workers` must be at least 0"),
        ("per_device_train_batch_size: 0", "`per_device_train_batch_size` must be at least 1"),
        ("seed: -1", "Seed must be"),
        ("logging_steps: 0", "logging_steps"),
        ("load_in_4bit: true", "bitsandbytes"),
        ("output_dir: file/below", "`output_dir` needs the folder file/below"),
        ("packing_report: file/below", "`packing_report` needs the folder file/below"),
        ("eval_per_sample: file/below/losses.jsonl", "`eval_per_sample` needs the folder file/below"),
        ("model_name_or_path: ./nowhere", "`model_name_or_path` is ./nowhere"),
        ("model_name_or_path: file", "holds no `config.json`"),
        ("dataset_name: empty.jsonl", "empty.jsonl is empty"),
        ("dataset_name: broken.jsonl", "line 1 is not JSON"),
        ("lora_config: {target_modules: [nothing_proj]}", "nothing_proj"),
        ("attn_implementation: flash_attention_9", "flash_attention_9"),
        ("chat_template_path: none.jinja", "none.jinja"),
    ],
    ids=lambda value: value.partition(":")[0] if ": " in value else "",
)
def test_a_wrong_value_is_one_sentence(
    change: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if "4bit" in change and find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes is installed, and this is about its absence")
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("empty.jsonl").write_text("")
    Path("broken.jsonl").write_text('{"text": ')
    key = change.partition(":")[0]
    kept = [line for line in RUN.splitlines() if not line.startswith(f"{key}:")]
    code, err = run_recipe("\n".join([*kept, change]), capsys)
    last = err.strip().splitlines()[-1]
    assert code == 2
    assert last.startswith("trl-packing: ")
    assert part in last


@pytest.mark.parametrize(
    "text",
    [
        b"a: [1, 2\nb: }",
        b"a:\n\tb: 1\n",
        b"a: \xff\xfe\n",
        os.urandom(64) + b"\xff",
        b"a: 1\na: 2\n",
        b"",
        b"- a",
        b"x",
    ],
    ids=["syntax", "tab", "latin1", "binary", "twice", "empty", "list", "text"],
)
def test_what_is_no_config_is_one_sentence(
    text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code, err = run_recipe(text, capsys)
    assert code == 2
    assert "run.yaml" in sentence(err)


@pytest.mark.parametrize(
    ("words", "redirect", "code", "part"),
    [
        ("configs", "| head -1", 0, ""),
        ("configs", "| true", 0, ""),
        ("configs", "> /dev/full", 1, "cannot be written: No space"),
        ("configs", ">&-", 0, ""),
        ("--help", ">&-", 0, ""),
    ],
    ids=["head", "reader_gone", "full", "closed", "help_closed"],
)
def test_an_output_that_cannot_be_written_is_no_traceback(words: str, redirect: str, code: int, part: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m trl_packing.cli {words} {redirect}"
    result = subprocess.run(["bash", "-c", command], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from calling import call

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("accelerate.commands.launch.launch_command", stop)
    code, _, err = call(capsys, "sft", "--use_cpu", "true", "--bf16", "false")
    assert (code, sentence(err)) == (130, "trl-packing sft: interrupted.")
    monkeypatch.setattr("trl_packing.doctor.main", stop)
    code, _, err = call(capsys, "doctor")
    assert (code, sentence(err)) == (130, "trl-packing: interrupted.")
