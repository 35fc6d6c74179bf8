"""`trl-packing doctor`: what is here, what will run, the proof; and an exit code that a script can trust."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calling import call, sentence
from tiny_models import tiny_model
from transformers import AutoConfig

from trl_packing.doctor import environment, load
from trl_packing.doctor.environment import BROKEN, MISSING, OK, UNFIT, UNNEEDED, read_environment
from trl_packing.quickstart import TINY_NAMES
from trl_packing.quickstart.tiny import build_tiny, byte_tokenizer, tiny_config

DOCTOR = "trl_packing.doctor"


@pytest.fixture(scope="module")
def bamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("doctor") / "bamba", "bamba")


@pytest.fixture
def leaking(tmp_path: Path) -> Path:
    model = tiny_model("recurrent_gemma", vocab_size=272)
    model.save_pretrained(tmp_path / "leaking")
    byte_tokenizer().save_pretrained(tmp_path / "leaking")
    return tmp_path / "leaking"


def is_narrow(text: str) -> bool:
    return max(map(len, text.splitlines())) <= 80 and "\x1b" not in text


# ---- environment


def test_everything_missing_has_its_install_line() -> None:
    entries = {entry.name: entry for entry in read_environment()}
    wanted = "torch device trl transformers peft accelerate kernels flash-attn flash-linear-attention causal-conv1d"
    assert set(entries) >= {*wanted.split(), "mamba-ssm", "deepspeed", "bitsandbytes"}
    for entry in entries.values():
        assert entry.status in (OK, MISSING, UNNEEDED, BROKEN, UNFIT)
        assert (entry.status == OK) == (entry.install == "")
        assert entry.status == OK or entry.install.startswith("pip install ")
    assert entries["torch"].found == torch.__version__


def test_a_gpu_makes_missing_kernels_worth_installing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_packing._compat.is_available", lambda name: False)
    for has_gpu, status in ((False, UNNEEDED), (True, MISSING)):
        entry = environment._optional("mamba-ssm", "mamba_ssm", "'trl-packing[mamba]'", True, has_gpu=has_gpu)
        assert (entry.status, entry.install) == (status, "pip install 'trl-packing[mamba]'")
    assert environment._optional("deepspeed", "deepspeed", "x", False, has_gpu=False).status == MISSING


def test_an_installed_package_that_cannot_be_imported_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "half_built.py").write_text("raise OSError('undefined symbol:\\n _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    entry = environment._optional("half-built", "half_built", "half-built", True, has_gpu=False)
    assert entry.status == BROKEN
    assert "undefined symbol: _ZN3c10" in entry.note
    # The extra's dependencies would replace torch.
    assert entry.install == "pip install --force-reinstall --no-deps half-built"


def test_kernels_that_do_not_fit_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformers": "5.24.0", "kernels": "0.17.2"}
    monkeypatch.setattr("trl_packing._compat.installed_version", versions.get)
    monkeypatch.setattr("trl_packing._compat._range_for_kernels", lambda: ">=0.18.2,<0.20")
    entry = environment._kernels()
    assert (entry.found, entry.status) == ("0.17.2", UNFIT)
    assert ">=0.18.2,<0.20" in entry.note
    assert entry.install == "pip install 'trl-packing[kernels]'"


def test_nothing_is_checked_with_an_unsupported_trl(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("trl_packing._compat.REQUIRED", {"trl": ">=99", "transformers": ">=5", "torch": ">=2"})
    code, out, _ = call(capsys, "doctor")
    assert code == 1
    assert "pip install 'trl>=99'" in out
    assert "nothing was checked, because of trl" in out
    assert is_narrow(out)


# ---- models


def test_without_a_model_all_recipe_architectures_are_proven(capsys: Any, tmp_path: Path) -> None:
    picture = tmp_path / "influence.png"
    code, out, err = call(capsys, "doctor", "--picture", str(picture))
    assert code == 0
    assert is_narrow(out)
    for architecture in TINY_NAMES.values():
        assert f"\n{architecture}: " in out
        drawn = tmp_path / f"influence-{architecture}.png"
        assert drawn.read_bytes().startswith(b"\x89PNG")
        assert drawn.name in err
    assert out.count("proven") == len(TINY_NAMES)
    for part in ("Qwen3NextGatedDeltaNet x 3", "chunk_gated_delta_rule", "BambaMixer x 3", "no kernels", "varlen"):
        assert part in out


def test_json_is_all_that_is_on_stdout(bamba: Path, capsys: Any) -> None:
    code, out, _ = call(capsys, "doctor", "--model", str(bamba), "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (0, True)
    [model] = report["models"]
    assert (model["model"], model["attention"], model["problem"]) == ("BambaForCausalLM", "varlen", None)
    assert {choice["function"]: choice["implementation"] for choice in model["layers"]} == {
        "causal_conv1d_fn": "torch",
        "mamba_chunk_scan_combined": "torch",
        "mamba_split_conv1d_scan_combined": "unfused",
    }
    assert [probe["status"] for probe in model["isolation"]["probes"]] == ["passed"] * 4
    assert "real weights" in model["weights"]


def test_a_config_is_checked_with_its_settings(bamba: Path, capsys: Any) -> None:
    words = ["--config", "quickstart_bamba", "--model_name_or_path", str(bamba), "--attn_implementation", "sdpa"]
    code, out, _ = call(capsys, "doctor", *words, "--json")
    [model] = json.loads(out)["models"]
    assert (model["attention"], model["attention_reason"]) == ("sdpa", "as set")
    assert model["adapters"].startswith("30,656 of ")
    assert code == int(not model["ok"])


def test_a_model_that_leaks_is_exit_code_1(leaking: Path, capsys: Any) -> None:
    code, out, _ = call(capsys, "doctor", "--model", str(leaking))
    assert code == 1
    assert "NOT PROVEN for " in out
    assert "RecurrentGemmaRecurrentBlock" in out


def test_a_leak_that_only_the_probes_see_is_told_in_full(
    bamba: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stock transformers, without our operations: nothing in the model's classes gives it away.
    monkeypatch.setattr(f"{DOCTOR}.examine.register_ops", lambda *args, **kwargs: None)
    monkeypatch.setattr("trl_packing.register.dispatch.host_lengths", lambda cu_seqlens, _: (int(cu_seqlens[-1]),))
    from transformers import AutoModelForCausalLM

    from trl_packing import register_ops

    register_ops(AutoModelForCausalLM.from_config(tiny_config("bamba")))
    code, out, _ = call(capsys, "doctor", "--model", str(bamba))
    assert code == 1
    assert "LEAKS between segments" in out
    assert "BambaMixer" in out
    assert is_narrow(out)


def test_dead_adapters_are_a_problem_of_the_model(bamba: Path, capsys: Any) -> None:
    words = ["--config", "quickstart_bamba", "--model_name_or_path", str(bamba)]
    code, out, _ = call(capsys, "doctor", *words, "--lora_config", '{"target_modules": ["lm_head"]}')
    assert code == 1
    assert "not proven" in out
    assert "lm_head" in out


def test_a_check_that_fails_is_no_success(bamba: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image\nis available")

    monkeypatch.setattr(f"{DOCTOR}.examine.check_isolation", fail)
    code, out, _ = call(capsys, "doctor", "--model", str(bamba))
    assert code == 1
    assert "RuntimeError: CUDA error: no kernel" in out
    assert is_narrow(out)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--config", "nothing"], ["'nothing'", "Known configs"]),
        (["--config", "quickstart_tiny", "--lora_rr", "3"], ["`--lora_rr`"]),
    ],
    ids=["config", "option"],
)
def test_wrong_usage_is_one_sentence(words: list[str], parts: list[str], capsys: Any) -> None:
    code, out, err = call(capsys, "doctor", *words)
    assert (code, out) == (2, "")
    assert all(part in sentence(err) for part in parts), err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--model", "some/model"], ["some/model", "offline"]),
        (["--model", "./nothing"], ["`--model` is ./nothing", "does not exist"]),
        (["--config", "quickstart_tiny", "--lora_config", '{"rr": 1}'], ["`rr`"]),
    ],
    ids=["hub", "path", "adapters"],
)
def test_without_a_model_the_environment_is_shown_all_the_same(
    words: list[str], parts: list[str], capsys: Any
) -> None:
    code, out, err = call(capsys, "doctor", *words)
    assert code == 2
    assert "Environment" in out
    assert out.endswith("Result: no model was checked.\n")
    assert all(part in sentence(err) for part in parts), err
    report = json.loads(call(capsys, "doctor", *words, "--json")[1])
    assert (report["ok"], report["models"]) == (False, [])
    assert report["environment"]


@pytest.mark.parametrize(
    "words",
    [
        ["--modell", "x"],
        ["--model", "x", "--config", "y"],
        ["x"],
        ["--model", ""],
        ["--picture", "."],
        ["--picture", "/dev/null/x.png"],
    ],
)
def test_wrong_options_are_usage(words: list[str], capsys: Any) -> None:
    code, out, err = call(capsys, "doctor", *words)
    assert (code, out) == (2, "")
    assert "usage: trl-packing doctor" in err


# ---- what is loaded


@pytest.mark.parametrize(("architecture", "depth"), [("llama", 1), ("qwen3_next", 3), ("qwen3_5", 3), ("bamba", 3)])
def test_first_layers_hold_every_kind(architecture: str, depth: int) -> None:
    config = tiny_config(architecture)
    with torch.device("meta"):
        model = load._build(load.AutoModelForCausalLM, config, torch.device("meta"), {})
    assert load.depth_with_all_kinds(model, config) == depth
    cut = load.with_depth(config, depth)
    assert cut.num_hidden_layers == depth
    assert config.num_hidden_layers > depth
    shallow = load._build(load.AutoModelForCausalLM, cut, torch.device("meta"), {})
    assert {type(layer) for layer in shallow.modules()} == {type(layer) for layer in model.modules()}


def test_a_model_that_does_not_fit_is_checked_by_its_first_layers(
    bamba: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.from_pretrained(bamba)
    whole = load._num_bytes(load._build(load.AutoModelForCausalLM, config, torch.device("meta"), {}))
    monkeypatch.setattr(load, "_free_bytes", lambda device: int(whole * 1.1))
    code, out, _ = call(capsys, "doctor", "--model", str(bamba), "--json")
    [model] = json.loads(out)["models"]
    assert (code, model["ok"]) == (0, True)
    assert model["weights"].startswith("real weights, the first 3 of 4 layers")
    monkeypatch.setattr(load, "_free_bytes", lambda device: 1000)
    code, out, _ = call(capsys, "doctor", "--model", str(bamba))
    assert code == 1
    assert "GiB free" in " ".join(out.split())


def test_weights_that_are_not_here_are_random(bamba: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text((bamba / "config.json").read_text())
    code, out, _ = call(capsys, "doctor", "--model", str(tmp_path))
    assert code == 0
    assert "random weights, all layers" in out
