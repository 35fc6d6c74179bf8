"""The command line: TRL's with ours added, light to start, one sentence and the right exit code for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calling import call, sentence
from launching import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trl_packing import cli
from trl_packing.errors import UnsupportedVersionError
from trl_packing.sft import drop_launcher_words, recipe_folder

ROOT = Path(__file__).parents[1]
CPU = ["--use_cpu", "true", "--bf16", "false"]
LIGHT = """
import sys
import trl_packing, trl_packing.recipe.config, trl_packing.sft
from trl_packing.cli import main
for words in (["--help"], [], ["configs"], ["cp", "--help"], ["plan", "--help"], ["doctor", "--help"]):
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code == 0, words
    heavy = {"torch", "transformers", "accelerate", "datasets"} & set(sys.modules)
    assert not heavy, (words, heavy)
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be launched, in place of launching it."""
    calls: list[Any] = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", calls.append)
    return calls


# ---- TRL's command line with ours added


def test_help_and_imports_load_no_torch() -> None:
    result = run([sys.executable, "-c", LIGHT])
    for name in ("sft", "plan", "doctor", "configs", "cp", "dpo", "grpo", "vllm-serve"):
        assert name in result.stdout
    assert "usage: trl-packing " in result.stdout


def test_the_rest_of_trl_is_reached_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import importlib

    from trl.cli.commands import get_commands
    from trl.cli.commands.training import TrainingCommand

    seen = []
    monkeypatch.setattr(
        TrainingCommand, "run", lambda self, args, context: seen.append((self.name, context.argv)) or 7
    )
    assert call(capsys, "dpo", "--anything", "1")[0] == 7
    assert seen == [("dpo", ["dpo", "--anything", "1"])]
    trl_main = importlib.import_module("trl.cli.main")
    assert trl_main.get_commands is get_commands
    assert [type(command) for command in get_commands() if command.name == "sft"] == [TrainingCommand]


def test_a_name_that_trl_comes_to_have_is_trls_and_sft_is_ours() -> None:
    theirs = [SimpleNamespace(name=name) for name in ("sft", "plan", "dpo")]
    merged = {command.name: command for command in cli.merge_commands(theirs)}
    assert list(merged) == ["sft", "doctor", "configs", "cp", "plan", "dpo"]
    assert merged["sft"] is cli.sft_command
    assert merged["plan"] is theirs[1]


def test_commands_are_trls_and_stand_in_its_entry_point_group() -> None:
    from trl.cli.commands import Command

    assert all(isinstance(command, Command) for command in cli.COMMANDS)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = {name: value.split(":") for name, value in project["entry-points"]["trl.commands"].items()}
    assert {name: getattr(cli, attribute) for name, (_, attribute) in group.items()} == {
        # `trl sft` stays TRL's.
        command.name: command
        for command in cli.COMMANDS
        if command.name != "sft"
    }
    assert {module for module, _ in group.values()} == {"trl_packing.cli"}
    assert project["scripts"] == {"trl-packing": "trl_packing.cli:main"}


def test_an_unsupported_environment_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def refuse() -> None:
        raise UnsupportedVersionError("trl 0.9 is too old. Install with `pip install trl`.")

    monkeypatch.setattr("trl_packing._compat.check_versions", refuse)
    monkeypatch.setattr("trl_packing.doctor.main", lambda words: len(words))
    assert call(capsys, "plan", "--config", "x") == (
        2,
        "",
        "trl-packing: trl 0.9 is too old. Install with `pip install trl`.\n",
    )
    # The doctor says more.
    assert call(capsys, "doctor", "--json")[0] == 1


def test_an_unknown_command_is_wrong_usage(capsys: Any) -> None:
    code, _, err = call(capsys, "sfft")
    assert code == 2
    assert "invalid choice: 'sfft'" in err


# ---- sft


def test_sft_launches_the_recipe_with_its_own_words(launched: list[Any], capsys: Any) -> None:
    words = ["--config", "quickstart_tiny.yaml", "--max_steps", "2", "--num_processes", "2", "--learning_rate", "2"]
    assert call(capsys, "sft", *words)[0] == 0
    [options] = launched
    assert (options.module, options.training_script) == (True, "trl_packing.sft")
    assert options.num_processes == 2
    assert options.training_script_args == [word for word in words if word != "--num_processes"][:4] + words[6:]


def test_every_process_starts_without_a_gpu(launched: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """accelerate would start one, in silence."""
    words = ["sft", "--config", "quickstart_tiny.yaml", "--num_processes", "2"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call(capsys, *words)[0] == 0
    assert call(capsys, *words[:-2])[0] == 0
    assert [options.multi_gpu for options in launched] == [True, False]
    code, _, err = call(capsys, *words, "--cpu")
    assert code == 2
    assert "`--cpu` starts one process and not 2" in sentence(err)


def test_launch_options_of_the_yaml_reach_the_launcher(launched: list[Any], tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("use_cpu: true\nbf16: false\nnum_processes: 3\nmulti_gpu: true\naccelerate_config: ddp\n")
    assert call(capsys, "sft", "--config", str(config))[0] == 0
    assert call(capsys, "sft", "--config", str(config), "--num_processes", "5")[0] == 0
    assert [(options.num_processes, options.multi_gpu) for options in launched] == [(3, True), (5, True)]
    assert Path(launched[0].config_file) == ROOT / "configs/accelerate/ddp.yaml"
    assert launched[0].training_script_args == ["--config", str(config)]


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (["--accelerate_config", "fsdp2"], ROOT / "configs/accelerate/fsdp2.yaml"),
        (["--accelerate_config=zero3.yaml"], ROOT / "configs/accelerate/zero3.yaml"),
        (["--accelerate_config", "multi_gpu"], Path("trl/accelerate_configs/multi_gpu.yaml")),
        (["--accelerate_config", "ddp", "--accelerate_config", "mine.yaml"], Path("mine.yaml")),
    ],
    ids=["ours", "ours_with_suffix", "trls", "path_and_last_wins"],
)
def test_accelerate_config_is_ours_or_trls_or_a_path(
    given: list[str], where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("num_processes: 1\n")
    option, path, *rest = cli.resolve_accelerate_config([*given, "--num_processes", "2"])
    assert (option, rest) == ("--config_file", ["--num_processes", "2"])
    assert Path(path).is_file()
    assert path.endswith(str(where))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([*CPU, "--lerning_rate", "1"], ["`--lerning_rate`", "`learning_rate`"]),
        (["--config", "quickstart_tinny"], ["'quickstart_tinny'", "'quickstart_tiny'"]),
        (["--config"], ["`--config` needs"]),
        ([*CPU, "llama.yaml"], ["'llama.yaml'"]),
        ([*CPU, "--num_processes", "two"], ["num_processes", "'two'"]),
        ([*CPU, "--num_processes"], ["num_processes"]),
        ([*CPU, "--accelerate_config", "fsdp9"], ["fsdp9", "ddp, ddp_nodes, fsdp2"]),
        ([*CPU, "--accelerate_config", str(ROOT / "README.md")], ["README.md", "is not valid YAML"]),
        ([*CPU, "--accelerate_config", "/dev/null"], ["/dev/null"]),
        ([*CPU, "--nproc", "2"], ["`num_processes`"]),
        ([*CPU, "--accelerate_config"], ["`--accelerate_config` needs"]),
        (["--overlong", "cut"], ["overlong", "truncate"]),
        (["--use_cpu", "false", "--bf16", "true"], ["`use_cpu: true`"]),
    ],
    ids=lambda value: "_".join(value[-2:]) if isinstance(value, list) else "",
)
def test_a_wrong_sft_line_is_one_sentence(
    words: list[str], parts: list[str], launched: list[Any], capsys: Any
) -> None:
    code, out, err = call(capsys, "sft", *words)
    assert (code, out, launched) == (2, "", [])
    assert sentence(err).startswith("trl-packing sft: ")
    assert all(part in err for part in parts), err


@pytest.mark.parametrize(
    "text",
    [
        "lerning_rate: 1",
        "packing_strategy: bdf",
        "dtype: bfloat17",
        "",
        "- a",
        "\tx: 1",
        "a: 1\na: 2",
        "token_budget: []",
    ],
    ids=["key", "choice", "dtype", "empty", "list", "tab", "twice", "type"],
)
@pytest.mark.parametrize("command", ["sft", "plan", "doctor"])
def test_a_wrong_yaml_is_one_sentence(
    command: str, text: str, launched: list[Any], tmp_path: Path, capsys: Any
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(text)
    code, out, err = call(capsys, command, "--config", str(config))
    assert (code, out, launched) == (2, "", [])
    assert sentence(err).startswith(f"trl-packing {command}: ")
    assert "run.yaml" in err


def test_the_exit_code_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail_with(error: Exception) -> tuple[int, str]:
        def launch(options: Any) -> None:
            raise error

        monkeypatch.setattr("accelerate.commands.launch.launch_command", launch)
        code, _, err = call(capsys, "sft", *CPU)
        return code, err

    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file="")
    assert fail_with(subprocess.CalledProcessError(2, "python")) == (2, "")
    assert fail_with(subprocess.CalledProcessError(-9, "python")) == (1, "")
    assert fail_with(ChildFailedError("python", {0: failure})) == (2, "")
    code, err = fail_with(ValueError("You need to use at least 2 processes"))
    assert (code, "at least 2 processes" in sentence(err)) == (2, True)
    code, err = fail_with(ImportError("DeepSpeed is not installed"))
    assert (code, "DeepSpeed" in sentence(err)) == (2, True)


# ---- TRL's own command line


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's own command line, with what it would launch in place of launching it."""
    import importlib

    from trl.cli.accelerate_launcher import launch_training_script

    launched: list[Any] = []
    monkeypatch.setitem(launch_training_script.__kwdefaults__, "launch_command_fn", launched.append)

    def launch(*words: str) -> Any:
        assert importlib.import_module("trl.cli.main").main(["sft", *words]) == 0
        [options] = launched
        launched.clear()
        assert (options.module, options.training_script) == (True, "trl_packing.sft")
        return options

    return launch


def test_stock_trl_launches_our_module(stock: Any, tmp_path: Path) -> None:
    """Contract with TRL: `trl sft -m trl_packing.sft` hands us the user's words and one of its own."""
    config = tmp_path / "run.yaml"
    config.write_text("model_name_or_path: x\nuse_cpu: true\nbf16: false\nnum_processes: 1\n")
    own_words = ["--config", str(config), "--max_steps", "2", "--token_budget", "4096"]
    options = stock("-m", "trl_packing.sft", *own_words)
    assert sorted(drop_launcher_words(options.training_script_args)) == sorted(own_words)
    assert options.num_processes == 1
    # TRL looks for `--config` as a word of its own.
    hidden = ["--config=quickstart_tiny.yaml", *CPU]
    options = stock("--num_processes", "2", "-m", "trl_packing.sft", *hidden)
    assert drop_launcher_words(options.training_script_args) == hidden
    assert options.num_processes == 2


@pytest.mark.parametrize("module", [["-m", "trl_packing.sft"], []], ids=["named", "from_the_yaml"])
def test_keys_of_ours_pass_stock_trl_below_the_module(stock: Any, module: list[str], tmp_path: Path) -> None:
    """Contract with TRL: keys that it does not know become launch options, in the YAML's order, before the words."""
    config = tmp_path / "run.yaml"
    config.write_text(f"num_processes: 2\n{(ROOT / 'configs/quickstart_tiny.yaml').read_text()}")
    words = ["--config", str(config), "--max_steps", "2"]
    options = stock(*module, "--token_budget", "4096", *words)
    assert options.num_processes == 2
    assert drop_launcher_words(options.training_script_args) == ["--token_budget", "4096", *words]
    options = stock(*module, "--accelerate_config", "multi_gpu", *words)
    assert options.config_file.endswith("multi_gpu.yaml")
    assert drop_launcher_words(options.training_script_args) == words


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_runs_from_stock_trl(path: Path) -> None:
    """`module` comes before every key that TRL does not know."""
    import yaml
    from trl.scripts.sft import make_parser

    known = {action.dest for action in make_parser(prog="trl sft")._actions}
    unknown = [key for key in yaml.safe_load(path.read_text()) if key not in known]
    assert unknown[0] == "module"


def test_only_the_launchers_words_are_dropped(tmp_path: Path) -> None:
    stray = "/somewhere/trl/scripts/sft.py"
    assert drop_launcher_words([stray, "--output_dir", stray]) == ["--output_dir", stray]
    assert drop_launcher_words(["--config", "mine/sft.py"]) == ["--config", "mine/sft.py"]
    assert drop_launcher_words(["--token_budget", "3", stray]) == ["--token_budget", "3"]
    config = tmp_path / "run.yaml"
    config.write_text("token_budget: 2048\nlora_config: {r: 16}\n")
    before = ["--token_budget", "2048", "--lora_config", "{'r': 16}", "-m", "trl_packing.sft", "--token_budget", "5"]
    after = ["--config", str(config)]
    assert drop_launcher_words([*before, stray, *after]) == ["--token_budget", "5", *after]
    # What is wrong with the file, the recipe says.
    for wrong in ("a: [", "- a", None):
        if wrong is None:
            config.unlink()
        else:
            config.write_text(wrong)
        assert drop_launcher_words(["--a", "1", stray, *after]) == ["--a", "1", *after]


# ---- configs, cp


def test_configs_lists_every_config_with_its_purpose(capsys: Any) -> None:
    code, out, err = call(capsys, "configs")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    entries = json.loads(call(capsys, "configs", "--json")[1])
    files = {entry["path"] for entry in entries}
    assert files == {str(path) for path in (ROOT / "configs").rglob("*.yaml")}
    for entry in entries:
        assert entry["purpose"]
        assert entry["name"] in out
    launch = {"ddp", "fsdp2", "zero3", "ddp_nodes", "fsdp2_nodes", "zero3_nodes"}
    assert {entry["name"] for entry in entries if entry["option"] == "--accelerate_config"} == launch


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("llama", "configs/llama.yaml"),
        ("llama.yaml", "configs/llama.yaml"),
        ("accelerate/fsdp2", "configs/accelerate/fsdp2.yaml"),
        ("ddp", "configs/accelerate/ddp.yaml"),
        ("sft.py", "recipes/sft.py"),
        ("sft", "recipes/sft.py"),
    ],
)
def test_cp_copies_here_and_never_overwrites(
    name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "cp", name)[0] == 0
    copy = tmp_path / Path(source).name
    assert copy.read_bytes() == (ROOT / source).read_bytes()
    copy.write_text("mine")
    code, out, err = call(capsys, "cp", name)
    assert (code, out) == (2, "")
    assert copy.name in sentence(err)
    assert copy.read_text() == "mine"
    (tmp_path / "folder").mkdir()
    assert call(capsys, "cp", name, "folder")[0] == 0
    assert call(capsys, "cp", name, "other.txt")[0] == 0
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {copy.name, "other.txt"}


@pytest.mark.parametrize(
    ("words", "part"),
    [(["lama"], "Did you mean `llama`?"), (["llama", "no/such/folder/x.yaml"], "cannot be written"), ([], "NAME")],
    ids=["unknown", "folder", "nothing"],
)
def test_cp_says_what_is_wrong(words: list[str], part: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "cp", *words)
    assert (code, out) == (2, "")
    assert part in err


def test_the_checkout_comes_before_the_copy_in_the_package() -> None:
    assert recipe_folder() == ROOT / "recipes"
