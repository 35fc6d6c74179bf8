"""What a checkpoint records of the plan, and the refusal to resume with another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import PackingError

STATE_NAME = "packing_state.json"


def write_resume_state(checkpoint: str | Path, fingerprint: dict[str, Any], num_tokens: int) -> None:
    """
    Record in a checkpoint what its plan was made from and how many tokens it has trained.

    Args:
        checkpoint (`str` or `Path`):
            Folder of the checkpoint.
        fingerprint (`dict[str, Any]`):
            Of the plan, JSON values.
        num_tokens (`int`):
            Real tokens trained so far, on all ranks.
    """
    state = {"fingerprint": fingerprint, "num_tokens": num_tokens}
    Path(checkpoint, STATE_NAME).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def check_resume(checkpoint: str | Path, fingerprint: dict[str, Any]) -> int:
    """
    Compare a checkpoint's plan with this run's.

    Args:
        checkpoint (`str` or `Path`):
            Folder of the checkpoint.
        fingerprint (`dict[str, Any]`):
            Of this run's plan.

    Returns:
        `int`: Real tokens trained up to the checkpoint, on all ranks.

    Raises:
        [`PackingError`]: If the checkpoint has no plan or its plan differs, naming what differs.
    """
    path = Path(checkpoint, STATE_NAME)
    if not path.is_file():
        raise PackingError(
            f"The checkpoint {Path(checkpoint).name} was not written by `PackedSFTTrainer`: it has no {STATE_NAME}, "
            "so its place in the data is unknown. Start a new run from its weights instead."
        )
    state = json.loads(path.read_text(encoding="utf-8"))
    differences = [
        f"`{name}` was {state['fingerprint'].get(name)!r} and is {value!r}"
        for name, value in fingerprint.items()
        if state["fingerprint"].get(name) != value
    ]
    if differences:
        raise PackingError(
            f"The checkpoint {Path(checkpoint).name} belongs to another pack plan: {'; '.join(differences)}. Resume "
            "with the same data and settings, or start a new run from its weights."
        )
    return int(state["num_tokens"])


def last_whole_checkpoint(output_dir: str | Path) -> str:
    """
    Find the last checkpoint that was written to its end.

    Args:
        output_dir (`str` or `Path`):
            Folder of the run.

    Returns:
        `str`: The checkpoint's folder.

    Raises:
        [`PackingError`]: If there is none.
    """
    checkpoints = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]
    for path in sorted(checkpoints, key=lambda path: int(path.name.partition("-")[2]), reverse=True):
        if _is_whole(path):
            return str(path)
    raise PackingError(
        f"There is no whole checkpoint to resume from in {output_dir}. Leave out `resume_from_checkpoint`, or name "
        "another `output_dir`."
    )


def _is_whole(checkpoint: Path) -> bool:
    # The Trainer writes this file last.
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
