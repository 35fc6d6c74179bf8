"""Whole runs of the recipe on real input, a sentence for every input it cannot use, and one loss by every way in."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calling import sentence
from launching import run
from peft import PeftModel
from tiny_models import tiny_model
from training import conversations
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_packing.quickstart.tiny import build_tiny, byte_tokenizer

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "sft.py"
SETTINGS = {
    "dtype": "float32",
    "use_cpu": "true",
    "bf16": "false",
    "packing": "true",
    "max_length": "256",
    "per_device_train_batch_size": "2",
    "max_steps": "2",
    "learning_rate": "0.01",
    "gradient_checkpointing": "false",
    "logging_steps": "1",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": "true",
}
LORA = '{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": false}'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "conversations.jsonl", conversations())


def write(path: Path, samples: list[Any]) -> Path:
    path.write_text("".join(f"{sample if isinstance(sample, str) else json.dumps(sample)}\n" for sample in samples))
    return path


def without(checkpoint: Path, folder: Path, *parts: str) -> Path:
    """Copy a checkpoint whose tokenizer lacks something."""
    shutil.copytree(checkpoint, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for part in parts:
        settings.pop(part, None)
        (folder / f"{part}.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def words_for(model: Any, data: Any, output_dir: Path, **changes: Any) -> list[str]:
    settings = {
        "model_name_or_path": model,
        "dataset_name": data,
        "output_dir": output_dir,
        **SETTINGS,
        **changes,
    }
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def start(words: list[str]) -> Any:
    """Run the recipe in this process, as `python recipes/sft.py` does."""
    return runpy.run_path(str(RECIPE))["main"](words)


def refusal(words: list[str], capsys: Any) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        start(words)
    assert stop.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trl-packing: ")]
    assert len(errors) == 1
    return sentence(errors[0])


# ---- a run on real input


def test_adapter_is_saved_and_reloads_in_plain_peft_with_the_same_logits(
    checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    from trl_packing.recipe import build_sft, finish_sft, parse_sft

    *settings, _ = parse_sft(words_for(checkpoint, data, tmp_path / "out", lora_config=LORA))
    trainer = build_sft(*settings)
    trainer.train()
    finish_sft(trainer)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")("Packed rows keep samples apart.", return_tensors="pt")
    trainer.model.eval()
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path / "out").eval()
    with torch.no_grad():
        trained, again, before = (model(**tokens).logits for model in (trainer.model, reloaded, base))
    torch.testing.assert_close(again, trained, rtol=1e-5, atol=1e-5)
    assert (trained - before).abs().max() > 0.01


def test_the_whole_model_is_saved_without_adapters(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    start(words_for(checkpoint, data, tmp_path / "out"))
    trained, before = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "out", checkpoint)
    )
    assert trained.keys() == before.keys()
    assert all((trained[name] != before[name]).any() for name in trained if name.endswith("proj.weight"))


@pytest.mark.parametrize("kind", ["prompt_completion", "text", "mixture"])
def test_other_kinds_of_data_train(kind: str, checkpoint: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    pairs = [{"prompt": f"Say {number}.", "completion": " " + "word " * number} for number in range(1, 9)]
    texts = [{"text": pair["prompt"] + pair["completion"]} for pair in pairs]
    words = words_for(checkpoint, write(tmp_path / "data.jsonl", {"text": texts}.get(kind, pairs)), tmp_path / "out")
    if kind == "mixture":
        config = tmp_path / "run.yaml"
        config.write_text(f"datasets:\n- path: {data}\n- path: quickstart/conversations\n")
        words = [*words_for(checkpoint, data, tmp_path / "out"), "--config", str(config), "--max_length", "2048"]
        del words[words.index("--dataset_name") : words.index("--dataset_name") + 2]
    start(words)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    samples = {"mixture": 124}.get(kind, 8)
    assert f"of {samples} in the data set" in capsys.readouterr().out


def test_tokenizer_without_pad_token_pads_with_eos_as_in_trl(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    model = without(checkpoint, tmp_path / "model", "pad_token")
    assert AutoTokenizer.from_pretrained(model).pad_token is None
    start(words_for(model, data, tmp_path / "out", max_steps=1))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token == "<|im_end|>"


# ---- what cannot be used


def test_a_second_run_does_not_write_over_the_first(checkpoint: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    words = words_for(checkpoint, data, tmp_path / "out", lora_config=LORA, max_steps=1)
    start(words)
    saved = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    assert "already holds a run" in refusal(words, capsys)
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == saved


BAD_DATA: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (lambda folder: folder / "nothing.jsonl", ["nothing.jsonl", "does not exist"]),
    "empty": (lambda folder: write(folder / "bad.jsonl", []), ["bad.jsonl", "empty"]),
    "bytes": (lambda folder: garbage(folder / "bad.jsonl"), ["bad.jsonl", "line 1"]),
    "parquet": (lambda folder: garbage(folder / "bad.parquet"), ["bad.parquet", "cannot be loaded"]),
    "line": (lambda folder: write(folder / "bad.jsonl", [*conversations(2), "{'a'"]), ["bad.jsonl", "line 3"]),
    "column": (lambda folder: write(folder / "bad.jsonl", [{"foo": 1}]), ["foo", "`messages`"]),
    "type": (lambda folder: write(folder / "bad.jsonl", [{"messages": 5}]), ["Sample 0", "`messages`"]),
    "role": (lambda folder: write(folder / "bad.jsonl", [*conversations(2), turn("robot")]), ["Sample 2", "'robot'"]),
    "mixed": (lambda folder: write(folder / "bad.jsonl", [*conversations(2), {"text": "x"}]), ["Sample 2"]),
    "hub": (lambda folder: "some/data", ["some/data", "hub cannot be reached"]),
}


def garbage(path: Path) -> Path:
    path.write_bytes(b"PAR1\xff\xfe\x00garbage")
    return path


def turn(role: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "x"}]}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_one_sentence(case: str, checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    make, parts = BAD_DATA[case]
    error = refusal(words_for(checkpoint, make(tmp_path), tmp_path / "out"), capsys)
    assert all(part in error for part in parts), error


def test_conversation_without_an_assistant_turn_is_named(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    bad = write(tmp_path / "bad.jsonl", [*conversations(3), turn("user")])
    assert "Sample 3 " in refusal(words_for(checkpoint, bad, tmp_path / "out", assistant_only_loss="true"), capsys)


@pytest.mark.parametrize(
    ("missing", "changes", "text", "parts"),
    [
        (["chat_template"], {}, False, ["chat template", "`chat_template_path`"]),
        (["chat_template"], {"assistant_only_loss": "true"}, False, ["chat template", "`chat_template_path`"]),
        (["eos_token"], {}, True, ["end-of-sequence", "`eos_token`"]),
        (["pad_token", "eos_token"], {}, False, ["`pad_token`"]),
        ([], {"eos_token": "<nope>"}, False, ["`eos_token`", "<nope>"]),
        ([], {"chat_template_path": "nothing.jinja"}, False, ["nothing.jinja", "does not exist"]),
    ],
    ids=["template", "template_assistant", "eos", "pad_and_eos", "unknown_eos", "template_file"],
)
def test_a_tokenizer_that_lacks_something_is_one_sentence(
    missing: list[str],
    changes: dict[str, str],
    text: bool,
    parts: list[str],
    checkpoint: Path,
    data: Path,
    tmp_path: Path,
    capsys: Any,
) -> None:
    model = without(checkpoint, tmp_path / "model", *missing)
    samples = write(tmp_path / "text.jsonl", [{"text": "one"}, {"text": "two"}]) if text else data
    error = refusal(words_for(model, samples, tmp_path / "out", **changes), capsys)
    assert all(part in error for part in parts), error


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_name_or_path": "some/model"}, ["some/model", "offline"]),
        ({"model_name_or_path": "./nothing"}, ["./nothing", "does not exist"]),
        ({"lora_config": '{"target_modules": ["nope"]}'}, ["nope", "`lora_target_modules: auto`"]),
        ({"lora_config": '{"target_modules": ["lm_head"]}'}, ["lm_head", "train nothing"]),
        ({"lora_config": '{"rr": 4}'}, ["`rr`"]),
        ({"lerning_rate": "1"}, ["`--lerning_rate`", "`learning_rate`"]),
        ({"packing_strategy": "wrapped"}, ["`packing_strategy: wrapped`"]),
        ({"dataloader_drop_last": "true"}, ["`dataloader_drop_last`"]),
        ({"resume_from_checkpoint": "nowhere"}, ["nowhere", "no folder"]),
        ({"resume_from_checkpoint": "true"}, ["no whole checkpoint"]),
    ],
    ids=["hub", "path", "target", "head", "lora_key", "option", "wrapped", "drop_last", "checkpoint", "no_checkpoint"],
)
def test_a_wrong_setting_is_one_sentence(
    changes: dict[str, str], parts: list[str], checkpoint: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    error = refusal(words_for(checkpoint, data, tmp_path / "out", **changes), capsys)
    assert all(part in error for part in parts), error


def test_a_folder_of_an_adapter_is_no_model(data: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge it first" in refusal(words_for(tmp_path, data, tmp_path / "out"), capsys)


def test_a_leak_is_exit_code_1_and_no_step(data: Path, tmp_path: Path, capsys: Any) -> None:
    tiny_model("recurrent_gemma", vocab_size=272).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit) as stop:
        start(words_for(tmp_path / "model", data, tmp_path / "out"))
    out, err = capsys.readouterr()
    assert stop.value.code == 1
    assert "RecurrentGemmaRecurrentBlock" in err
    assert "'loss'" not in out
    assert not (tmp_path / "out").exists()


# ---- every way in

STEPS = ["--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "steps", "--save_steps", "2"]
CONFIG = ["--config", "quickstart_tiny.yaml"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TRL = [sys.executable, "-m", "trl.cli.main", "sft", "-m", "trl_packing.sft"]
WAYS = {
    "launch_recipe": [*ACCELERATE, "--num_processes", 1, "--cpu", RECIPE, *CONFIG],
    "recipe": [sys.executable, RECIPE, *CONFIG],
    "module": [sys.executable, "-m", "trl_packing.sft", *CONFIG],
    "command": [sys.executable, "-m", "trl_packing.cli", "sft", *CONFIG, "--num_processes", 1, "--cpu"],
    # TRL reads `--config FILE` itself and knows no key of ours; with an equals sign it hands the word on.
    "stock_trl": [*TRL, "--config=quickstart_tiny.yaml", "--use_cpu", "true", "--bf16", "false"],
}


def losses_of(command: list[Any], output_dir: Path) -> list[float]:
    environment_words = [*command, *STEPS, "--output_dir", output_dir]
    result = run(environment_words, cwd=output_dir.parent)
    assert "Isolation: proven" in result.stdout
    assert (output_dir / "adapter_model.safetensors").is_file()
    state = json.loads((output_dir / "checkpoint-2" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.mark.slow
def test_every_way_in_gives_the_same_losses(tmp_path: Path) -> None:
    found = {name: losses_of(command, tmp_path / name) for name, command in WAYS.items()}
    assert len(found["recipe"]) == 2
    assert found == dict.fromkeys(WAYS, found["recipe"])


@pytest.mark.slow
def test_two_processes_give_the_same_losses_by_launcher_and_by_command(tmp_path: Path) -> None:
    spread = ["--multi_gpu", "--num_processes", 2]
    launched = losses_of([*ACCELERATE, *spread, RECIPE, *CONFIG], tmp_path / "launched")
    assert losses_of([*WAYS["command"][:-3], *spread], tmp_path / "command") == launched


@pytest.mark.slow
def test_a_mistake_in_two_launched_processes_shows_no_traceback(tmp_path: Path) -> None:
    spread = ["--multi_gpu", "--num_processes", 2]
    words = [*WAYS["command"][:-3], *spread, "--dataset_name", "nothing.jsonl", "--output_dir", tmp_path / "out"]
    result = run(words, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "trl-packing: The data 'nothing.jsonl'" in result.stderr
