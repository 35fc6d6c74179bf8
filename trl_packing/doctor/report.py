"""What the doctor found, as text of 80 columns and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from .environment import BROKEN, MISSING, OK, UNFIT, UNNEEDED, Entry

if TYPE_CHECKING:
    from .examine import ModelReport

_WIDTH = 80
_NAMES, _VALUES = 27, 12
_MARKS = {OK: "", MISSING: "-", UNNEEDED: ".", BROKEN: "!", UNFIT: "!"}
_LEGEND = "  - missing   . missing, and of use on a GPU only   ! there, but not usable"


@dataclass(frozen=True, eq=False)
class DoctorReport:
    """
    The environment and the models that were checked in it.

    Args:
        environment (`tuple[Entry, ...]`):
            One entry per package or property.
        models (`tuple[ModelReport, ...]`):
            Empty where the environment cannot run one.
    """

    environment: tuple[Entry, ...]
    models: tuple[ModelReport, ...]

    @property
    def ok(self) -> bool:
        """Whether everything required is there and every model is proven to keep samples apart."""
        required = all(entry.status == OK for entry in self.environment if entry.required)
        return required and bool(self.models) and all(model.ok for model in self.models)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as JSON values."""
        return {
            "version": __version__,
            "ok": self.ok,
            "environment": [asdict(entry) for entry in self.environment],
            "models": [model.to_dict() for model in self.models],
        }

    def to_text(self) -> str:
        """Give everything as lines of at most 80 columns."""
        lines = [f"trl_packing {__version__}", "", "Environment"]
        for entry in self.environment:
            lines += _row(f"{_MARKS[entry.status]:<2}{entry.name}", entry.found, entry.note, command=entry.install)
        lines.append(_LEGEND)
        for model in self.models:
            lines += ["", *_model_lines(model)]
        return "\n".join([*lines, "", *textwrap.wrap(self._result(), _WIDTH)])

    def save_pictures(self, path: Path) -> list[Path]:
        """
        Draw who moves whom on each model.

        Args:
            path (`Path`):
                PNG file to write. Of several models, each gets its name added.

        Returns:
            `list[Path]`: The files.

        Raises:
            [`MissingDependencyError`]: If matplotlib is not installed.
        """
        files = []
        for model in self.models:
            if model.isolation is not None:
                file = path if len(self.models) == 1 else path.with_stem(f"{path.stem}-{model.name}")
                model.isolation.save_picture(file)
                files.append(file)
        return files

    def _result(self) -> str:
        broken = [entry.name for entry in self.environment if entry.required and entry.status != OK]
        if broken:
            return f"Result: nothing was checked, because of {', '.join(broken)}."
        if not self.models:
            return "Result: no model was checked."
        bad = [model.name for model in self.models if not model.ok]
        if bad:
            return f"Result: NOT PROVEN for {', '.join(bad)}. Packed training would stop before its first step."
        number = len(self.models)
        return f"Result: samples of a packed row stay apart{f' on all {number} models' if number > 1 else ''}."


def _model_lines(model: ModelReport) -> list[str]:
    title = f"{model.name}: {model.model or 'not loaded'}, {model.dtype} on {model.device}"
    lines = textwrap.wrap(title, _WIDTH)
    if model.weights:
        lines += _row("  weights", model.weights)
    if model.adapters:
        lines += _row("  adapters", model.adapters)
    lines += _row("  attention", model.attention, model.attention_reason)
    layer = None
    for choice in model.layers:
        if choice.layer != layer:
            layer = choice.layer
            lines.append(f"  {layer} x {choice.count}")
        lines += _row(f"    {choice.function}", choice.implementation, choice.reason)
    if model.problem is not None:
        return lines + _row("! isolation", "not proven", model.problem)
    assert model.isolation is not None
    if not model.isolation.ok:
        return [*lines, "! isolation", "", *model.isolation.to_text().splitlines()]
    effects = {probe.name: f"{probe.effect:.1g}" for probe in model.isolation.probes}
    found = (
        f"effect on other samples {effects['perturbation']}, gradient {effects['gradient']}; without boundaries "
        f"{effects['control']}; against alone {effects['alone']}"
    )
    return lines + _row("  isolation", "proven", " ".join([found, *model.isolation.notes]))


def _row(name: str, found: str, note: str = "", *, command: str = "") -> list[str]:
    """Name, value and note in columns. What is too long goes on below; a command is never broken."""
    if len(name) >= _NAMES:
        return [name, *_row("", found, note, command=command)]
    lines = [f"{name:<{_NAMES}}{found}"]
    column = _NAMES + _VALUES if len(found) < _VALUES else _NAMES
    texts = [*textwrap.wrap(note, _WIDTH - column), *([command] if command else [])]
    if texts and column > _NAMES and len(texts[0]) <= _WIDTH - column:
        lines = [f"{lines[0]:<{column}}{texts.pop(0)}"]
    for text in texts:
        indent = next((indent for indent in (column, _NAMES) if indent + len(text) <= _WIDTH), 4)
        lines.append(" " * indent + text)
    return lines
