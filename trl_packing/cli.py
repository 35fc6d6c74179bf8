"""
`trl-packing`: TRL's whole command line with ours added, in a process of its own. TRL's own `trl` is left as it is.

Our commands are TRL `Command` objects. A name that TRL comes to have itself is TRL's, except `sft`. Nothing heavy is
imported before a command needs it.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import _compat
from .errors import MissingDependencyError, PackingError, UnsupportedVersionError
from .sft import recipe_folder

try:
    from trl.cli.commands.base import Command
except ImportError:
    # No TRL, or one without commands: `main` says which to install, and `doctor` works all the same.
    Command = object

PROG = "trl-packing"
_MODULE = "trl_packing.sft"


class PackingCommand(Command):  # type: ignore[misc]
    """
    One of our commands. It parses its own words, because TRL's parser drops those that it does not know.

    Args:
        name (`str`), help_text (`str`):
            As in TRL.
        function (`Callable[[list[str]], int]`):
            Takes the words after the name and gives the exit code.
    """

    def __init__(self, name: str, help_text: str, function: Callable[[list[str]], int]) -> None:
        self.name = name
        self.help_text = help_text
        self.function = function

    def register(self, subparsers: Any) -> None:
        """Add the name to TRL's parser."""
        subparsers.add_parser(self.name, help=self.help_text, add_help=False)

    def run(self, args: Namespace, context: Any) -> int:
        """Run on the words after the name."""
        return self.function(context.argv_after(self.name))


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command line.

    Args:
        argv (`Sequence[str]`, *optional*):
            Words after the program's name. The default is `sys.argv[1:]`.

    Returns:
        `int`: 0 for success, 1 for a leak or a failed run, 2 for wrong usage.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _compat.check_versions()
    except (MissingDependencyError, UnsupportedVersionError) as error:
        # It says what is wrong with an environment in which TRL cannot run.
        if words[:1] == ["doctor"]:
            return _doctor(words[1:])
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    with _our_commands_added() as trl_main:
        try:
            code: int = trl_main.main(words)
            # A shell may have closed it.
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            # The reader has seen enough.
            _drop_output()
            return 0
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            print(f"{PROG}: the output cannot be written: {error.strerror}.", file=sys.stderr)
            _drop_output()
            return 1
        except KeyboardInterrupt:
            print(f"{PROG}: interrupted.", file=sys.stderr)
            return 130
    return code


def _drop_output() -> None:
    """Python flushes what is left when it ends, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def merge_commands(theirs: Sequence[Any]) -> list[Any]:
    """
    Add our commands to TRL's.

    Args:
        theirs (`Sequence[trl.cli.commands.Command]`):
            TRL's.

    Returns:
        `list[trl.cli.commands.Command]`: Ours first. A name that TRL has too is TRL's, except `sft`.
    """
    taken = {command.name for command in theirs} - {"sft"}
    ours = [command for command in COMMANDS if command.name not in taken]
    return [*ours, *(command for command in theirs if command.name != "sft")]


@contextlib.contextmanager
def _our_commands_added() -> Iterator[Any]:
    # `trl.cli` has a function of this name, which hides the module.
    trl_main: Any = importlib.import_module("trl.cli.main")
    get_commands, build_parser = trl_main.get_commands, trl_main._build_parser

    def build_ours(commands: list[Any]) -> ArgumentParser:
        parser: ArgumentParser = build_parser(commands)
        parser.prog = PROG
        parser.description = "Padding-free fine-tuning that cannot leak: packed `sft` and more, and the rest of TRL."
        parser.epilog = f"`{PROG} COMMAND --help` explains a command. Exit codes: 0 clean, 1 leak or failed, 2 usage."
        return parser

    trl_main.get_commands = lambda: merge_commands(get_commands())
    trl_main._build_parser = build_ours
    try:
        yield trl_main
    finally:
        trl_main.get_commands, trl_main._build_parser = get_commands, build_parser


# ---- sft


def _sft(words: list[str]) -> int:
    """Launch the recipe with accelerate. Options of the launcher are told from the run's, as in `trl sft`."""
    from .recipe.config import RecipeParser, usage_errors

    with usage_errors(f"{PROG} sft"):
        from accelerate.commands.launch import launch_command, launch_command_parser
        from trl.cli.commands.training import _subtract_subsequence

        from .recipe.build import RUN_TYPES

        parser = RecipeParser(
            RUN_TYPES,
            recipe_file=recipe_folder() / "sft.py",
            prog=f"{PROG} sft",
            epilog="--config NAME or --config PATH: a YAML file with any of the options above. Options of `accelerate "
            "launch` (`accelerate launch --help`) work too, here and in the YAML: --num_processes 2. So does "
            f"--accelerate_config NAME, of which `{PROG} configs` has a list.",
        )
        *_, launch_words, own_words = parser.parse_args_and_config(
            words, return_remaining_strings=True, separate_remaining_strings=True
        )
        launcher = launch_command_parser()
        launcher.error = _refuse_launch
        launch_words = resolve_accelerate_config([*launch_words, *own_words])
        options, unknown = launcher.parse_known_args(
            [*launch_words, "--module", _MODULE, *_subtract_subsequence(words, own_words)]
        )
        stray = [] if options.training_script == _MODULE else [options.training_script]
        if unknown or stray:
            raise PackingError(parser.explain_unknown([*unknown, *stray]))
        _start_every_process(options)
        return _launch(launch_command, options)


def _start_every_process(options: Any) -> None:
    """Without a GPU, accelerate starts one process whatever number is asked for, unless it is told `--multi_gpu`."""
    import torch

    if (options.num_processes or 1) > 1 and options.config_file is None and not torch.cuda.is_available():
        if options.cpu:
            raise PackingError(
                f"`--cpu` starts one process and not {options.num_processes}. Write `use_cpu: true` in its place."
            )
        options.multi_gpu = True


def _refuse_launch(message: str) -> None:
    raise PackingError(f"The launch options are refused: {message.rstrip('.')}.")


def resolve_accelerate_config(words: Sequence[str]) -> list[str]:
    """
    Turn `--accelerate_config` into the option of `accelerate launch`.

    Args:
        words (`Sequence[str]`):
            Launch options. The last `--accelerate_config` counts: a path, a name in our `configs/accelerate`, or one
            of TRL's names.

    Returns:
        `list[str]`: The same options with `--config_file PATH`.

    Raises:
        [`PackingError`]: If there is no such file or name.
    """
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    rest: list[str] = []
    name: str | None = None
    todo = iter(words)
    for word in todo:
        option, _, value = word.partition("=")
        if option in ("--accelerate_config", "--accelerate-config"):
            name = value or next(todo, None)
            if name is None:
                raise PackingError("`--accelerate_config` needs the name or the path of a YAML file after it.")
        else:
            rest.append(word)
    if name is None:
        return rest
    known = _launch_configs()
    if not Path(name).is_file() and (own := known.get(name.removesuffix(".yaml"))):
        name = str(own)
    try:
        resolved: list[str] = resolve_accelerate_config_argument(["--accelerate_config", name, *rest])
    except ValueError as error:
        raise PackingError(f"{error} Ours are {', '.join(known)}.") from error
    from .recipe.config import read_config

    # The launcher takes a file on trust.
    read_config(Path(resolved[1]))
    return resolved


def _launch(launch_command: Callable[[Any], None], options: Any) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(options)
    except subprocess.CalledProcessError as error:
        # The run has said on stderr what was wrong.
        return max(error.returncode, 1)
    except ChildFailedError as error:
        return max(error.get_first_failure()[1].exitcode, 1)
    except ValueError as error:
        raise PackingError(f"The launch options are refused: {' '.join(str(error).split())}") from error
    except ImportError as error:
        raise MissingDependencyError(f"The launch needs a package: {error}") from error
    return 0


# ---- plan, doctor


def _plan(words: list[str]) -> int:
    parser = ArgumentParser(
        prog=f"{PROG} plan",
        allow_abbrev=False,
        description="Say what packing does to a run's data: rows, fill, what is cut, steps. Reads the data and the "
        "tokenizer, not the model's weights, and needs no GPU.",
        epilog=f"Every option of `{PROG} sft` works here too: --token_budget 4096.",
    )
    parser.add_argument("--config", required=True, metavar="NAME", help="name or path of the run's YAML")
    parser.add_argument("--ranks", type=_count, default=1, metavar="N", help="processes that will train (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the plan, as a PNG")
    own, rest = parser.parse_known_args(words)
    from .recipe.config import usage_errors

    with usage_errors(parser.prog):
        # What libraries print is no result.
        with contextlib.redirect_stdout(sys.stderr):
            from .recipe import estimate_sft, parse_sft, plan_sft

            # No weight is loaded, so a config for a GPU can be planned anywhere.
            no_gpu = ["--use_cpu", "true", "--bf16", "false", "--fp16", "false"]
            *settings, _ = parse_sft(
                ["--config", own.config, *rest, *no_gpu], recipe_file=recipe_folder() / "sft.py", prog=parser.prog
            )
            report = plan_sft(*settings, num_ranks=own.ranks)
            memory = estimate_sft(
                *settings[:3],
                mixed_precision=settings[2].dtype in ("bfloat16", "float16"),
                num_ranks=own.ranks,
                segments_per_row=report.segments_per_row,
            )
            if own.picture is not None:
                try:
                    report.save_picture(own.picture)
                except OSError as error:
                    raise PackingError(f"`--picture` {own.picture} cannot be written: {error.strerror}.") from error
        if own.json:
            print(json.dumps({**report.to_dict(), "memory": None if memory is None else memory.to_dict()}, indent=2))
        else:
            print("\n\n".join(part.to_text() for part in (report, memory) if part is not None))
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, but is {text!r}")
    return int(text)


def _doctor(words: list[str]) -> int:
    from .doctor import main as run_doctor

    return run_doctor(words)


# ---- configs, cp


def _configs(words: list[str]) -> int:
    parser = ArgumentParser(
        prog=f"{PROG} configs",
        allow_abbrev=False,
        description="List the configs: complete runs for --config, and ways to spread one for --accelerate_config.",
        epilog=f"`{PROG} cp NAME` copies one to change.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    own = parser.parse_args(words)
    from .recipe.config import list_configs, usage_errors

    with usage_errors(parser.prog):
        groups = {"--config": list_configs(recipe_folder() / "sft.py"), "--accelerate_config": _launch_configs()}
    if own.json:
        entries = [
            {"option": option, "name": name, "purpose": _purpose(path), "path": str(path)}
            for option, configs in groups.items()
            for name, path in configs.items()
        ]
        print(json.dumps(entries, indent=2))
        return 0
    width = 2 + max(len(name) for configs in groups.values() for name in configs)
    lines: list[str] = []
    for option, configs in groups.items():
        lines += [*([""] if lines else []), f"{option} NAME"]
        for name, path in configs.items():
            indents = {"initial_indent": f"  {name:<{width}}", "subsequent_indent": " " * (width + 2)}
            lines += textwrap.wrap(_purpose(path) or "(no purpose line)", 80, **indents)  # type: ignore[arg-type]
    print("\n".join(lines))
    return 0


def _launch_configs() -> dict[str, Path]:
    """Name to file of the configs for accelerate. The first folder that has a name wins."""
    from .recipe.config import config_folders

    found: dict[str, Path] = {}
    for folder in config_folders(recipe_folder() / "sft.py"):
        for path in sorted((folder / "accelerate").glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def _purpose(path: Path) -> str | None:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# Purpose:"):
            return line.removeprefix("# Purpose:").strip()
    return None


def _cp(words: list[str]) -> int:
    parser = ArgumentParser(
        prog=f"{PROG} cp",
        allow_abbrev=False,
        formatter_class=RawDescriptionHelpFormatter,
        description="Copy a config or a recipe, to change it. Nothing is overwritten.",
        epilog=f"{PROG} cp llama            llama.yaml, a run\n"
        f"{PROG} cp accelerate/fsdp2 how a run is spread\n"
        f"{PROG} cp sft.py mine.py   the recipe itself, under another name",
    )
    parser.add_argument("name", metavar="NAME", help=f"a config, as `{PROG} configs` lists them, or sft.py")
    parser.add_argument("target", metavar="TARGET", nargs="?", default=".", help="folder or file (default: here)")
    own = parser.parse_args(words)
    from .recipe.config import usage_errors

    with usage_errors(parser.prog):
        source = _find_source(own.name)
        target = Path(own.target).expanduser()
        target = target / source.name if target.is_dir() else target
        try:
            # Fails where something is there already, a dangling link too.
            with target.open("xb") as file:
                file.write(source.read_bytes())
        except FileExistsError as error:
            raise PackingError(f"Nothing is overwritten, but {target} is there already. Name another file.") from error
        except OSError as error:
            raise PackingError(f"{target} cannot be written: {error.strerror or error}.") from error
        shutil.copymode(source, target)
    print(f"Copied {source.name} to {target}.")
    return 0


def _find_source(name: str) -> Path:
    from .recipe.config import list_configs
    from .recipe.config.values import nearest

    recipes = {path.name: path for path in sorted(recipe_folder().glob("*.py"))}
    configs = {path.name: path for path in list_configs(recipe_folder() / "sft.py").values()}
    launch = {f"accelerate/{path.name}": path for path in _launch_configs().values()}
    sources = configs | recipes | launch
    for candidate in (name, f"{name}.yaml", f"{name}.py", f"accelerate/{name}", f"accelerate/{name}.yaml"):
        if candidate in sources:
            return sources[candidate]
    guess = nearest(name, [*sources, *(Path(source).stem for source in sources)])
    hint = f" Did you mean `{guess}`?" if guess else ""
    raise PackingError(f"There is nothing called {name!r} to copy.{hint} Known: {', '.join(sources)}.")


sft_command = PackingCommand("sft", "Fine-tune on packed rows, from one YAML", _sft)
plan_command = PackingCommand("plan", "Say what packing does to a run's data, without training", _plan)
doctor_command = PackingCommand("doctor", "Check this environment and prove that samples stay apart", _doctor)
configs_command = PackingCommand("configs", "List the configs that come with the package", _configs)
cp_command = PackingCommand("cp", "Copy a config or the recipe, to change it", _cp)
COMMANDS = (sft_command, plan_command, doctor_command, configs_command, cp_command)

if __name__ == "__main__":
    raise SystemExit(main())
