"""The recipe's YAML: what is found, what is accepted, and the one sentence for everything else (shared case 18)."""

import dataclasses
import os

import pytest
import yaml
from trl import DatasetMixtureConfig, ModelConfig, SFTConfig, TrlParser

from trl_packing import PackingError
from trl_packing.recipe.config import LaunchOptions, RecipeArguments, files, list_configs, parse_recipe, resolve_config

TYPES = (RecipeArguments, SFTConfig, ModelConfig, DatasetMixtureConfig)
CPU = "use_cpu: true\nbf16: false\n"


@pytest.fixture
def parse(tmp_path):
    """Parse the text of a YAML, and further words of a command line."""

    def run(text, *words):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else (CPU + text).encode())
        return parse_recipe(["--config", str(path), *words], dataclass_types=TYPES)

    return run


def refusal(parse, text, *words):
    with pytest.raises(PackingError) as caught:
        parse(text, *words)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- where a config is found


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A recipe's folder, a checkout and a package, each with a config of its own and one that all have."""
    folders = {
        "variable": tmp_path / "own",
        "recipe": tmp_path / "copied" / "configs",
        "checkout": tmp_path / "checkout" / "configs",
        "package": tmp_path / "checkout" / "trl_packing" / "configs",
    }
    for name, folder in folders.items():
        folder.mkdir(parents=True)
        (folder / f"only_{name}.yaml").write_text("seed: 1")
        (folder / "shared.yaml").write_text("seed: 1")
    (tmp_path / "checkout" / "pyproject.toml").touch()
    (folders["package"] / "accelerate").mkdir()
    monkeypatch.setattr(files, "_PACKAGE", tmp_path / "checkout" / "trl_packing")
    monkeypatch.setenv("TRL_PACKING_CONFIG_DIR", str(folders["variable"]))
    monkeypatch.chdir(tmp_path)
    return folders


def test_bare_names_are_looked_up_in_the_promised_order(places, monkeypatch, tmp_path):
    recipe = tmp_path / "copied" / "recipes" / "sft.py"
    assert set(list_configs(recipe)) == {"shared", *(f"only_{name}" for name in places)}
    assert resolve_config("shared", recipe) == places["variable"] / "shared.yaml"
    monkeypatch.delenv("TRL_PACKING_CONFIG_DIR")
    assert resolve_config("shared", recipe) == places["recipe"] / "shared.yaml"
    assert resolve_config("shared.yaml") == places["checkout"] / "shared.yaml"
    (tmp_path / "checkout" / "pyproject.toml").unlink()
    assert resolve_config("shared") == places["package"] / "shared.yaml"
    (tmp_path / "shared.yaml").touch()
    assert resolve_config("shared", recipe).resolve() == tmp_path / "shared.yaml"


def test_a_folder_named_like_a_config_does_not_hide_it(places, tmp_path):
    (tmp_path / "shared").mkdir()
    assert resolve_config("shared") == places["variable"] / "shared.yaml"


def test_paths_work_with_and_without_suffix(places, tmp_path):
    assert resolve_config("own/shared").name == "shared.yaml"
    assert resolve_config(str(places["package"] / "shared.yaml")) == places["package"] / "shared.yaml"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("only_chekout", ["'only_checkout'", "Known configs", "shared", "only_variable"]),
        ("own/shred.yaml", ["'own/shred.yaml' does not exist", "'shared.yaml'"]),
        ("checkout", ["is a folder"]),
        ("", ["empty"]),
    ],
    ids=["bare", "path", "folder", "empty"],
)
def test_a_config_that_is_not_there_lists_what_is(places, name, parts):
    with pytest.raises(PackingError) as caught:
        resolve_config(name)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_wrong_config_variable_is_said(places, monkeypatch):
    monkeypatch.setenv("TRL_PACKING_CONFIG_DIR", "nowhere")
    with pytest.raises(PackingError, match=r"`TRL_PACKING_CONFIG_DIR`.*'nowhere'"):
        resolve_config("shared")


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]], ids=["two-words", "one-word"])
def test_config_is_given_either_way_and_its_path_is_printed(tmp_path, capsys, form):
    path = tmp_path / "a.yaml"
    path.write_text(CPU + "max_steps: 7")
    parsed = parse_recipe([word.format(path) for word in form], dataclass_types=TYPES)
    assert parsed[1].max_steps == 7
    assert parsed[-1] == LaunchOptions(path, {})
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--config"], ["--config", "--max_steps"], ["--config=a", "--config", "b"], ["--config="]]
)
def test_config_without_a_value_or_twice_is_one_sentence(words):
    with pytest.raises(PackingError, match="`--config`"):
        parse_recipe(words, dataclass_types=TYPES)


# ---- what TRL accepts keeps its meaning


TRL_YAML = """
env: {TRL_PACKING_TEST_A: 1e-4, TRL_PACKING_TEST_B: true}
model_name_or_path: some/model
dtype: bfloat16
learning_rate: 1e-4
weight_decay: 1
max_length: null
packing: yes
packing_strategy: bfd-requeue
eval_strategy: "no"
report_to: [tensorboard]
run_name: tuning
lora_target_modules: all-linear
lora_modules_to_save: [embed_tokens]
use_peft: true
model_init_kwargs: {revision: 12e4567, use_cache: false}
gradient_checkpointing_kwargs: {use_reentrant: false}
accelerator_config: {split_batches: false}
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 1.0e-5}
resume_from_checkpoint: true
pad_to_multiple_of: 64
logging_steps: 5
warmup_steps: 0.03
datasets:
  - {path: a/b, split: "train[:5%]", columns: [messages], fraction: 0.5}
  - {path: json, data_files: x.jsonl, fraction: 1}
streaming: false
num_processes: 8
"""


def as_dicts(parsed):
    return [{**dataclasses.asdict(one), "logging_dir": None} for one in parsed]


@pytest.mark.filterwarnings("ignore:The `bfd-requeue`:FutureWarning")
def test_a_yaml_for_trl_means_the_same_here(tmp_path, monkeypatch):
    monkeypatch.delenv("TRL_PACKING_TEST_A", raising=False)
    path = tmp_path / "trl.yaml"
    path.write_text(CPU + TRL_YAML)
    theirs = TrlParser(TYPES).parse_args_and_config(["--config", str(path)], fail_with_unknown_args=False)
    variables = {name: os.environ.pop(name) for name in ("TRL_PACKING_TEST_A", "TRL_PACKING_TEST_B")}
    *ours, launch = parse_recipe(["--config", str(path)], dataclass_types=TYPES)
    assert as_dicts(ours) == as_dicts(theirs)
    assert (
        {name: os.environ.pop(name) for name in variables}
        == variables
        == {
            "TRL_PACKING_TEST_A": "1e-4",
            "TRL_PACKING_TEST_B": "True",
        }
    )
    assert launch.options == {"num_processes": 8}


def test_every_key_of_trl_takes_its_own_default(tmp_path):
    # Reversed, so that a switch wins over its `--no_` form.
    defaults = {action.dest: action.default for action in reversed(TrlParser(TYPES)._actions) if action.dest != "help"}
    plain = {
        key: value for key, value in defaults.items() if value is None or type(value) in (bool, int, float, str, list)
    }
    assert len(plain) > 100
    path = tmp_path / "defaults.yaml"
    path.write_text(yaml.safe_dump({**plain, "use_cpu": True, "bf16": False}))
    *ours, _ = parse_recipe(["--config", str(path)], dataclass_types=TYPES)
    theirs = TrlParser(TYPES).parse_args_and_config(["--use_cpu", "true", "--bf16", "false"])
    assert as_dicts(ours) == as_dicts(theirs)


def test_the_command_line_wins_over_the_yaml(parse):
    script, training, model, _, _ = parse(
        "max_steps: 3\nlearning_rate: 1.0\nlora_config: {r: 2}\npacking: true\nlora_r: 3",
        "--max_steps", "4", "--lora_config", '{"r": 8}', "--packing", "false",
    )  # fmt: skip
    assert (training.max_steps, training.learning_rate, training.packing) == (4, 1.0, False)
    assert (script.lora_config, model.lora_r) == ({"r": 8}, 3)


def test_numbers_and_words_that_yaml_1_1_misreads_are_what_they_look_like(parse):
    script, training, _, _, _ = parse(
        "learning_rate: 1e-4\nseed: 1e3\nsave_strategy: no\nrun_name: 2024-01-02\ndataset_name: 0012\n"
        "lr_scheduler_kwargs: {min_lr: 1e-6}\nlora_config: {lora_alpha: 32, rank_pattern: {a.b: 4}}\n"
    )
    assert training.learning_rate == 1e-4
    assert training.seed == 1000
    assert training.save_strategy == "no"
    assert training.run_name == "2024-01-02"
    assert script.dataset_name == "0012"
    assert training.lr_scheduler_kwargs == {"min_lr": 1e-6}
    assert script.lora_config == {"lora_alpha": 32, "rank_pattern": {"a.b": 4}}


def test_merge_keys_and_anchors_work(parse):
    parsed = parse(
        "model_init_kwargs: &a {use_cache: false}\ngradient_checkpointing_kwargs: {<<: *a}\n<<: {max_steps: 3}"
    )
    assert parsed[1].gradient_checkpointing_kwargs == {"use_cache": False}
    assert parsed[1].max_steps == 3


# ---- what is wrong is one sentence


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lerning_rate: 1e-4", ["run.yaml, line 3", "`lerning_rate`", "`learning_rate`"]),
        ("learning-rate: 1e-4", ["`learning_rate`"]),
        ("tokn_budget: 3", ["`tokn_budget` is no known option"]),
        ("no_gradient_checkpointing: true", ["`gradient_checkpointing`"]),
        ("packing_strategy: bdf", ["bfd, bfd_split, wrapped", "'bdf'", "nearest: bfd"]),
        ("dtype: bfloat17", ["auto, bfloat16, float16, float32", "'bfloat17'"]),
        ("eval_strategy: off", ["no, steps, epoch", "'off'"]),
        ("optim: adamw", ["nearest: adamw_torch"]),
        ("max_steps: many", ["`max_steps` takes a whole number", "'many'"]),
        ("max_steps: 2.5", ["a whole number", "2.5"]),
        ("max_steps: true", ["a whole number", "True"]),
        ("learning_rate: [1]", ["`learning_rate` takes a number", "a list"]),
        ("learning_rate:", ["`learning_rate` takes a number", "empty"]),
        ("packing: perhaps", ["true or false", "'perhaps'"]),
        ("run_name: {a: 1}", ["text", "a mapping"]),
        ("lora_target_modules: [q_proj, 3]", ["list of text", "3"]),
        ("lora_config: [r]", ["`lora_config`", "a list"]),
        ("datasets: some/name", ["`datasets` takes a list"]),
        ("datasets: [some/name]", ["entry 0", "'some/name'"]),
        ("datasets: [{path: a}, {pth: b}]", ["Entry 1", "`pth`", "`path`"]),
        ("datasets: [{name: a}]", ["needs the key `path`"]),
        ("datasets: [{path: a, fraction: half}]", ["`fraction` takes a number"]),
        ("env: [A]", ["`env` must be a mapping"]),
        ("seed: 1\nseed: 2", ["`seed`", "lines 3 and 4"]),
        ("model_init_kwargs: {a: 1, a: 2}", ["`a`", "lines 3 and 3"]),
        ("on: 1", ["line 3", "`on`"]),
        ("load_in_4bit: true\nload_in_8bit: true", ["settings are refused", "4 bit"]),
        (b"", ["is empty"]),
        (b"# only a comment\n", ["is empty"]),
        (b"- a\n- b\n", ["a list"]),
        (b"just words", ["a single value"]),
        (b"seed:\n\tvalue: 1\n", ["line 2", "tab"]),
        (b"seed: [1\n", ["not valid YAML"]),
        (b"seed: 1\n---\nseed: 2\n", ["not valid YAML", "another document"]),
        (b"seed: !!python/object:os.system 1\n", ["not valid YAML"]),
        (b"\xff\xfe\x00", ["UTF-8"]),
    ],
)  # fmt: skip
def test_a_wrong_yaml_is_one_sentence(parse, text, parts):
    message = refusal(parse, text)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("key", "replacement"),
    [
        ("warmup_ratio", "`warmup_steps: 0.03`"),
        ("group_by_length", "grouping"),
        ("overwrite_output_dir", "`output_dir`"),
        ("max_seq_length", "`max_length`"),
        ("torch_dtype", "`dtype`"),
        ("evaluation_strategy", "`eval_strategy`"),
    ],
)
def test_keys_that_are_gone_name_what_to_write_now(parse, key, replacement):
    assert replacement in refusal(parse, f"{key}: 1")
    assert replacement in refusal(parse, "seed: 1", f"--{key}", "1")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--lerning_rate", "1"], ["`--lerning_rate`", "`learning_rate`"]),
        (["--lerning-rate=1"], ["`learning_rate`"]),
        (["--dtype", "bfloat17"], ["bfloat17", "float16"]),
        (["--max_steps", "many"], ["max_steps", "many"]),
        (["--max_steps"], ["max_steps", "expected one argument"]),
        (["stray"], ["'stray'"]),
        (["--num_processes", "2"], ["launch option", "accelerate launch --num_processes"]),
        (["--lora_config", "{r: 2"], ["`lora_config`", "JSON"]),
        (["--lora_config", "[1]"], ["`lora_config`", "mapping"]),
    ],
    ids=lambda value: " ".join(value)[:24],
)
def test_a_wrong_command_line_is_one_sentence(parse, words, parts):
    message = refusal(parse, "seed: 1", *words)
    assert all(part in message for part in parts), message


def test_a_misspelled_option_is_said_before_the_settings_are_built():
    with pytest.raises(PackingError, match="`learning_rate`"):
        parse_recipe(["--bf16", "true", "--use_cpu", "false", "--lerning_rate", "1"], dataclass_types=TYPES)


def test_env_is_left_alone_when_the_yaml_is_refused(parse, monkeypatch):
    monkeypatch.delenv("TRL_PACKING_TEST_C", raising=False)
    refusal(parse, "env: {TRL_PACKING_TEST_C: 1}\nsed: 3")
    assert "TRL_PACKING_TEST_C" not in os.environ
