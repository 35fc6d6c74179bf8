"""What a checkpoint records of the plan and of its place in it, and the refusal to resume with another plan."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import PackingError

STATE_NAME = "packing_state.json"
# Of the Trainer and FSDP, and of DeepSpeed.
_OPTIMIZER_NAMES = ("optimizer", "global_step")


@dataclass(frozen=True)
class ResumeState:
    """
    What a checkpoint records.

    Args:
        fingerprint (`dict[str, Any]`):
            Of the plan, JSON values.
        num_tokens (`int`):
            Real tokens trained so far, on all ranks.
        num_ranks (`int`):
            Processes that trained.
        gradient_accumulation_steps (`int`):
            Micro-steps of an optimiser step.
        epoch (`int`, *optional*):
            Epoch that the run is in. `None` for a stream.
        num_fragments (`int`, *optional*):
            Fragments of that epoch trained so far, in the order of the plan.
    """

    fingerprint: dict[str, Any]
    num_tokens: int
    num_ranks: int
    gradient_accumulation_steps: int
    epoch: int | None = None
    num_fragments: int | None = None

    def write(self, checkpoint: str | Path) -> None:
        """Write it into a checkpoint's folder."""
        Path(checkpoint, STATE_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def check_resume(checkpoint: str | Path, fingerprint: dict[str, Any]) -> ResumeState:
    """
    Compare a checkpoint's plan with this run's.

    Args:
        checkpoint (`str` or `Path`):
            Folder of the checkpoint.
        fingerprint (`dict[str, Any]`):
            Of this run's plan.

    Returns:
        [`ResumeState`]: Of the checkpoint.

    Raises:
        [`PackingError`]: If the checkpoint has no plan or no optimiser state, or if its plan differs, naming what
            differs.
    """
    path = Path(checkpoint, STATE_NAME)
    if not path.is_file():
        raise PackingError(
            f"The checkpoint {Path(checkpoint).name} was not written by `PackedSFTTrainer`: it has no {STATE_NAME}, "
            "so its place in the data is unknown. Start a new run from its weights instead."
        )
    if not any(path.name.startswith(_OPTIMIZER_NAMES) for path in Path(checkpoint).iterdir()):
        raise PackingError(
            f"The checkpoint {Path(checkpoint).name} holds no optimiser state (`save_only_model`), so a resumed run "
            "would not go on as it would have. Start a new run from its weights instead."
        )
    state = ResumeState(**json.loads(path.read_text(encoding="utf-8")))
    differences = [
        f"`{name}` was {state.fingerprint.get(name)!r} and is {value!r}"
        for name, value in fingerprint.items()
        if state.fingerprint.get(name) != value
    ]
    if differences:
        raise PackingError(
            f"The checkpoint {Path(checkpoint).name} belongs to another pack plan: {'; '.join(differences)}. Resume "
            "with the same data and settings, or start a new run from its weights."
        )
    return state


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
