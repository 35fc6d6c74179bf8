"""`trl-packing doctor`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LeakError, MissingDependencyError, PackingError
from .environment import OK, read_environment
from .report import DoctorReport

if TYPE_CHECKING:
    from .examine import ModelReport


def main(argv: Sequence[str]) -> int:
    """
    Check the environment and a model, and print one table.

    Args:
        argv (`Sequence[str]`):
            Words after `trl-packing doctor`.

    Returns:
        `int`: 0 if everything is proven, 1 if not, 2 for wrong usage.
    """
    parser = ArgumentParser(
        prog="trl-packing doctor",
        allow_abbrev=False,
        description="Say what is installed here, what every kind of layer will run and why, and prove on a model that "
        "packed samples stay apart. Without a model, tiny ones of all recipe architectures are checked. Works "
        "offline.",
        epilog="With --config, every option of `trl-packing sft` works here too. Exit codes: 0 proven, 1 not, 2 "
        "usage.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", metavar="NAME", help="check the model of a run, with the run's settings")
    which.add_argument("--model", metavar="PATH_OR_ID", help="check a model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw who moves whom, as a PNG")
    own, rest = parser.parse_known_args(argv)
    if rest and own.config is None:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if own.model == "":
        parser.error("argument --model: it is empty")
    if own.picture is not None and (obstacle := _why_not_written(own.picture)) is not None:
        parser.error(f"argument --picture: {own.picture} cannot be written, because {obstacle}")
    report, problem = None, ""
    try:
        # What libraries print is no result.
        with contextlib.redirect_stdout(sys.stderr):
            examine = _examination(own.config, own.model, rest, influence=own.picture is not None)
            report = DoctorReport(tuple(read_environment()), ())
            if all(entry.status == OK for entry in report.environment if entry.required):
                report = replace(report, models=tuple(examine()))
            for file in report.save_pictures(own.picture) if own.picture is not None else []:
                print(f"{parser.prog}: drew {file}", file=sys.stderr)
    except (PackingError, LeakError, MissingDependencyError) as error:
        problem = " ".join(str(error).split())
        if own.model is not None:
            problem = problem.replace("`model_name_or_path`", "`--model`")
    if report is not None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(report.to_dict(), indent=2) if own.json else report.to_text(), flush=True)
    if problem:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
        return 2
    return 0 if report is not None and report.ok else 1


def _why_not_written(file: Path) -> str | None:
    if file.is_dir():
        return "it is a folder"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return None if os.access(file.parent, os.W_OK) else f"{file.parent} is read-only"


def _examination(
    config: str | None, model: str | None, rest: list[str], *, influence: bool
) -> Callable[[], Iterable[ModelReport]]:
    """Read what the words ask for, and give what does it."""
    if model is not None:
        return lambda: [_examiners().examine_model(model, influence=influence)]
    if config is None:
        from ..quickstart import TINY_NAMES

        return lambda: [_examiners().examine_tiny(name, influence=influence) for name in TINY_NAMES.values()]
    import torch

    from ..recipe import parse_sft

    # A config for a GPU is checked here in its dtype, but without autocast.
    no_gpu = [] if torch.cuda.is_available() else ["--use_cpu", "true", "--bf16", "false", "--fp16", "false"]
    script, training, model_args, _, _ = parse_sft(["--config", config, *rest, *no_gpu], prog="trl-packing doctor")
    return lambda: [_examiners().examine_run(script, training, model_args, influence=influence)]


def _examiners() -> Any:
    # It needs torch and transformers, which may be what is missing.
    from . import examine

    return examine
