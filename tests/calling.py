"""Call a command in this process, and look at what it prints and how it ends."""

from __future__ import annotations

from typing import Any

from trl_packing import cli


def call(capsys: Any, *words: str) -> tuple[int, str, str]:
    """Exit code, results and diagnostics of a command, run in this process."""
    capsys.readouterr()
    try:
        code = cli.main(list(words))
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def sentence(err: str) -> str:
    """The one line that a refusal prints, after the line that names the config."""
    lines = [line for line in err.splitlines() if not line.startswith("trl_packing: config:")]
    assert len(lines) == 1, err
    return lines[0]
