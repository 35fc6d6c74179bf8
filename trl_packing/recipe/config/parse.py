"""The recipe's command line: TRL's parser, with a YAML in which every key and every value is checked."""

from __future__ import annotations

import json
import os
import sys
from argparse import Action
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from trl import ScriptArguments, TrlParser

from ...errors import LeakError, MissingDependencyError, PackingError, UnsupportedVersionError
from .files import ConfigFile, read_config, resolve_config
from .values import MisfitError, fit, nearest

# Keys that older versions of TRL and transformers had, and what to write now.
_GONE = {
    "dataset_batch_size": "remove the line: it has no successor",
    "evaluation_strategy": "write `eval_strategy`",
    "group_by_length": "remove the line: packed rows need no grouping",
    "logging_dir": "set the variable TENSORBOARD_LOGGING_DIR, for example under `env`",
    "max_seq_length": "write `max_length`",
    "no_cuda": "write `use_cpu`",
    "overwrite_output_dir": "remove the line and choose a new `output_dir`, or continue with `resume_from_checkpoint`",
    "per_gpu_eval_batch_size": "write `per_device_eval_batch_size`",
    "per_gpu_train_batch_size": "write `per_device_train_batch_size`",
    "push_to_hub_model_id": "write `hub_model_id`",
    "push_to_hub_token": "write `hub_token`",
    "save_safetensors": "remove the line: checkpoints are always safetensors",
    "torch_dtype": "write `dtype`",
    "use_liger": "write `use_liger_kernel`",
    "warmup_ratio": "write the ratio as `warmup_steps`, for example `warmup_steps: 0.03`",
}
# What other launchers call it.
_ELSEWHERE = dict.fromkeys(("nproc", "nproc_per_node", "num_gpus", "gpus", "np"), "num_processes")
# Values that TRL still takes from a YAML and renames, although they are no longer among the choices.
_RENAMED_CHOICES = {"packing_strategy": ("bfd-requeue",)}


@dataclass
class RecipeArguments(ScriptArguments):
    """
    TRL's script arguments, with the adapter settings that its `ModelConfig` cannot reach.

    Args:
        lora_config (`dict[str, Any]`, *optional*):
            Fields of `peft.LoraConfig` by PEFT's own names, for example `exclude_modules` or `rank_pattern`. They win
            over the `lora_*` keys and switch adapters on. On the command line, a JSON object.
    """

    lora_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Fields of `peft.LoraConfig` by PEFT's own names, for example `exclude_modules` or "
            "`rank_pattern`. They win over the `lora_*` keys and switch adapters on. On the command line, a JSON "
            "object."
        },
    )

    def __post_init__(self) -> None:
        if isinstance(self.lora_config, str):
            try:
                self.lora_config = json.loads(self.lora_config)
            except ValueError as error:
                raise PackingError(f"`lora_config` must be a JSON object, but is {self.lora_config!r}.") from error
        if self.lora_config is not None and not isinstance(self.lora_config, dict):
            raise PackingError(f"`lora_config` must be a mapping, but is {self.lora_config!r}.")


@dataclass(frozen=True)
class LaunchOptions:
    """
    What a config says to the launcher and not to the run.

    Args:
        config (`Path`, *optional*):
            The YAML that was read, or `None` without `--config`.
        options (`dict[str, Any]`):
            Options of `accelerate launch` found in it, and TRL's `accelerate_config`.
    """

    config: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def to_argv(self) -> list[str]:
        """Give the options as words for `accelerate launch`; a switch that is off gives none."""
        words: list[str] = []
        switches = _launch_switches() if self.options else frozenset()
        for key, value in self.options.items():
            if key not in switches:
                words += [f"--{key}", str(value)]
            elif value is True or str(value).lower() in ("true", "yes", "1"):
                words.append(f"--{key}")
        return words

    def note(self) -> str | None:
        """Say that the options do nothing in a process that is running already, or `None` without options."""
        if not self.options:
            return None
        names = ", ".join(f"`{key}: {value}`" for key, value in self.options.items())
        kind = "a launch option" if len(self.options) == 1 else "launch options"
        return (
            f"found {kind} in {self.config}: {names}. `accelerate launch` and `trl-packing sft` take such options; "
            "they have no effect in a process that is already running."
        )


class RecipeParser(TrlParser):
    """
    TRL's parser with a checked YAML. Results and precedence are TRL's: command line over YAML over default.

    Args:
        dataclass_types (`Iterable[type]`):
            Dataclasses to fill, in the order of the results.
        recipe_file (`str` or `PathLike`, *optional*):
            The running recipe, beside which `--config NAME` is looked up.
        **kwargs:
            For `argparse.ArgumentParser`.
    """

    def __init__(
        self,
        dataclass_types: Iterable[type],
        *,
        recipe_file: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("epilog", "--config NAME or --config PATH: a YAML file with any of the options above.")
        super().__init__(dataclass_types, **kwargs)
        self.recipe_file = recipe_file
        self.launch = LaunchOptions()
        self._hints: dict[str, Any] = {}
        for cls in self.dataclass_types:
            self._hints.update(get_type_hints(cls))

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """
        Parse the command line and the YAML it names.

        Args:
            args (`Iterable[str]`, *optional*):
                Words of the command line; the default is `sys.argv[1:]`. `--config NAME` and `--config=NAME` name the
                YAML.
            return_remaining_strings (`bool`, *optional*, defaults to `False`):
                Whether to return the launch options as words too, as TRL's launcher command wants them, and to leave
                unknown words of the command line to it. Unknown keys of the YAML stop in any case.
            fail_with_unknown_args (`bool`, *optional*, defaults to `True`):
                Has no effect: unknown arguments always stop the run.
            separate_remaining_strings (`bool`, *optional*, defaults to `False`):
                Whether words from the YAML and from the command line come as two lists.

        Returns:
            `tuple`: One instance per dataclass, followed by the lists of words asked for.

        Raises:
            [`PackingError`]: If anything in the YAML or on the command line is wrong, in one sentence.
        """
        words, name = _split_config(sys.argv[1:] if args is None else list(args))
        self.launch = LaunchOptions()
        if name is not None:
            config = read_config(resolve_config(name, self.recipe_file))
            _say(f"config: {config.path}")
            self._take_defaults(config)
        # A misspelled option is said before the settings are built, which may refuse this machine.
        if not return_remaining_strings and (unknown := self.parse_known_args(words)[1]):
            raise PackingError(self.explain_unknown(unknown))
        *parsed, rest = self._parse_words(words)
        if not return_remaining_strings:
            if rest:
                raise PackingError(self.explain_unknown(rest))
            if (note := self.launch.note()) is not None:
                _say(note)
            return tuple(parsed)
        launch_words = self.launch.to_argv()
        return (*parsed, launch_words, rest) if separate_remaining_strings else (*parsed, launch_words + rest)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message in place of printing the usage of every option and leaving the process."""
        raise PackingError(f"The arguments are refused: {message.rstrip('.')}.")

    def _take_defaults(self, config: ConfigFile) -> None:
        values = dict(config.values)
        environment = values.pop("env", None) or {}
        if not isinstance(environment, dict):
            raise PackingError(f"{config.where('env')}: `env` must be a mapping of variables, but is {environment!r}.")
        # TRL's own command line takes it for us, and ours needs no telling.
        if values.get("module") == "trl_packing.sft":
            del values["module"]
        own = {action.dest: action for action in reversed(self._actions)}
        unknown = [key for key in values if key not in own or key == "help"]
        launch_names = _launch_names() - set(own) if unknown else frozenset()
        for key in unknown:
            if key not in launch_names:
                raise PackingError(f"{config.where(key)}: {_unknown_key(key, own, launch_names)}")
        self.launch = LaunchOptions(config.path, {key: values.pop(key) for key in unknown})
        fitted = {key: self._fit(own[key], value, config) for key, value in values.items()}
        for key, value in environment.items():
            os.environ[str(key)] = str(value)
        self.set_defaults_with_config(**fitted)

    def _fit(self, action: Action, value: Any, config: ConfigFile) -> Any:
        key = action.dest
        choices = (*action.choices, *_RENAMED_CHOICES.get(key, ())) if action.choices else None
        if value is None and action.default is None:
            return None
        try:
            return fit(value, self._hints[key], text=config.texts.get(key), choices=choices)
        except MisfitError as error:
            raise PackingError(f"{config.where(key)}: `{key}` {error}.") from error
        except PackingError as error:
            raise PackingError(f"{config.where(key)}: `{key}`: {error}") from error

    def _parse_words(self, words: list[str]) -> tuple[Any, ...]:
        try:
            result: tuple[Any, ...] = self.parse_args_into_dataclasses(words, return_remaining_strings=True)
        except PackingError:
            raise
        except (ValueError, TypeError) as error:
            sentence = " ".join(str(error).split()).rstrip(".")
            advice = " On a CPU, set `use_cpu: true`." if "bf16" in sentence else ""
            raise PackingError(f"The settings are refused: {sentence}.{advice}") from error
        except ImportError as error:
            # DeepSpeed, for one, is looked for as soon as a setting names it.
            raise MissingDependencyError(f"A setting needs a package: {' '.join(str(error).split())}") from error
        return result

    def explain_unknown(self, rest: Sequence[str]) -> str:
        """Say in one sentence what is wrong with words that no option took."""
        word = next((word for word in rest if word.startswith("-")), rest[0])
        key = word.lstrip("-").partition("=")[0].replace("-", "_")
        if not word.startswith("-"):
            return f"The command line has the word {word!r}, which belongs to no option."
        own = {action.dest: action for action in self._actions}
        launch_names = _launch_names() - set(own)
        if key in launch_names:
            return (
                f"`{word}` is a launch option. Write it before the script: `accelerate launch {word} ...`, or with "
                "`trl sft` in the YAML, above `module`."
            )
        return _unknown_key(key, own, launch_names, written=word)


def parse_recipe(
    argv: Sequence[str] | None = None,
    *,
    dataclass_types: Iterable[type],
    recipe_file: str | os.PathLike[str] | None = None,
    prog: str | None = None,
) -> tuple[Any, ...]:
    """
    Parse a recipe's command line and YAML.

    Args:
        argv (`Sequence[str]`, *optional*):
            Words after the program's name. The default is `sys.argv[1:]`.
        dataclass_types (`Iterable[type]`):
            Dataclasses to fill, in the order of the results.
        recipe_file (`str` or `PathLike`, *optional*):
            The running recipe, beside which `--config NAME` is looked up.
        prog (`str`, *optional*):
            The program's name in the help.

    Returns:
        `tuple`: One instance per dataclass, and last the [`LaunchOptions`] with the path of the YAML. The path and the
            launch options are also printed on stderr, by the main process.

    Raises:
        [`PackingError`]: If the config or the command line is wrong, in one sentence. [`usage_errors`] prints it.
    """
    parser = RecipeParser(dataclass_types, recipe_file=recipe_file, prog=prog)
    return (*parser.parse_args_and_config(argv), parser.launch)


@contextmanager
def usage_errors(prog: str = "trl-packing") -> Iterator[None]:
    """
    Turn refusals into one line on stderr, without a traceback: exit code 1 for a leak, 2 for everything else. So is
    Ctrl-C, with the exit code 130 that shells give it.

    Works as a decorator too.

    Args:
        prog (`str`, *optional*, defaults to `"trl-packing"`):
            What the line starts with.
    """
    try:
        yield
    except (LeakError, PackingError, MissingDependencyError, UnsupportedVersionError) as error:
        rank = os.environ.get("RANK", "0")
        print(f"{prog}{f' [rank {rank}]' if rank != '0' else ''}: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, LeakError) else 2) from None
    except KeyboardInterrupt:
        print(f"{prog}: interrupted.", file=sys.stderr)
        raise SystemExit(130) from None


def _split_config(words: list[str]) -> tuple[list[str], str | None]:
    """Take `--config NAME` or `--config=NAME` out of the words."""
    rest: list[str] = []
    names: list[str] = []
    todo = iter(words)
    for word in todo:
        if word == "--config":
            name = next(todo, None)
            if name is None or name.startswith("--"):
                raise PackingError("`--config` needs the name or the path of a YAML file after it.")
            names.append(name)
        elif word.startswith("--config="):
            names.append(word.partition("=")[2])
        else:
            rest.append(word)
    if len(names) > 1:
        raise PackingError(f"`--config` may be given once, but is given {len(names)} times: {', '.join(names)}.")
    return rest, names[0] if names else None


def _unknown_key(key: str, own: Iterable[str], launch_names: Iterable[str], written: str | None = None) -> str:
    shown = f"`{written or key}`"
    if key in _GONE:
        return f"{shown} is gone: {_GONE[key]}."
    guess = _ELSEWHERE.get(key) or nearest(key, own) or nearest(key, launch_names)
    return f"{shown} is no known option.{f' Did you mean `{guess}`?' if guess else ''}"


def _launch_actions() -> list[Action]:
    # Imported on demand: accelerate's launcher loads torch.
    from accelerate.commands.launch import launch_command_parser

    positional = ("help", "training_script", "training_script_args")
    return [action for action in launch_command_parser()._actions if action.dest not in positional]


def _launch_names() -> frozenset[str]:
    """Names of `accelerate launch`'s own parser, and the one that TRL's command line adds."""
    return frozenset({"accelerate_config", *(action.dest for action in _launch_actions())})


def _launch_switches() -> frozenset[str]:
    return frozenset(action.dest for action in _launch_actions() if action.nargs == 0)


def _say(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"trl_packing: {message}", file=sys.stderr)
