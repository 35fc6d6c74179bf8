"""What a check found: data for programs, text for people, and the error that stops a training run."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import LeakError

PASSED, FAILED, NOT_RUN, OFF = "passed", "failed", "could not run", "turned off"

_UNPACKED = "train it unpacked, with TRL's own `SFTTrainer`, `packing: false` and `padding_free: false`."
_OTHER_ATTENTION = (
    'Load the model with `attn_implementation="varlen"` or with flash attention, and pass no `attention_mask`; if it '
    f"supports neither, {_UNPACKED}"
)
_OTHER_OPERATIONS = (
    "Call `register_ops(model)`, or install the kernels that `trl-packing doctor` names; if it leaks even then, "
    f"{_UNPACKED}"
)
_WAYS_OUT = {
    "attention": _OTHER_ATTENTION,
    "mask": _OTHER_ATTENTION,
    "convolution": _OTHER_OPERATIONS,
    "recurrence": _OTHER_OPERATIONS,
    "router": f"Its routing looks at the whole row, which no boundary keyword changes: {_UNPACKED}",
    "position": (
        "Positions, chunks or windows do not start anew in each segment: load the model with "
        f'`attn_implementation="varlen"`; if its logits differ even then, {_UNPACKED}'
    ),
    "layer": f"It reads other tokens without the boundary keywords: {_UNPACKED}",
    "varlen": f"Its attention has a bias or a mask of its own, or the boundaries never reach it: {_UNPACKED}",
}


@dataclass(frozen=True)
class ProbeResult:
    """
    Outcome of one probe.

    Args:
        name (`str`):
            `"perturbation"`, `"gradient"`, `"control"` or `"alone"`.
        status (`str`):
            `"passed"`, `"failed"`, `"could not run"` or `"turned off"`.
        effect (`float`):
            Largest relative effect found, NaN if the probe did not run.
        allowed (`float`):
            Up to here an effect is rounding. For the control: the effect has to be above.
        detail (`str`):
            What was done and found, one or two sentences.
    """

    name: str
    status: str
    effect: float
    allowed: float
    detail: str


@dataclass(frozen=True)
class LayerLeak:
    """
    One layer through which one segment reaches another.

    Args:
        name (`str`), class_name (`str`):
            Module path in the model, and its class.
        kind (`str`):
            `"attention"`, `"mask"` (the layer was given a mask that shows other segments), `"convolution"`,
            `"recurrence"`, `"router"` or `"layer"`.
        source (`int`), target (`int`):
            The segment that was changed and the one that moved most.
        effect (`float`):
            How far a token of the target moved, relative to the layer's output there.
    """

    name: str
    class_name: str
    kind: str
    source: int
    target: int
    effect: float


@dataclass(frozen=True, eq=False)
class IsolationReport:
    """
    Result of [`check_isolation`].

    Args:
        ok (`bool`):
            Whether every probe that was asked for ran and passed.
        max_leak (`float`):
            Largest relative effect of one segment on another's logits or gradients, 0.0 if none is more than rounding.
        layers (`tuple[LayerLeak, ...]`):
            Leaking layers in the order in which they run; the first is where the leak enters. Empty on an exact model.
        probes (`tuple[ProbeResult, ...]`):
            Perturbation, gradient, control and alone, in this order.
        influence (`np.ndarray`), influence_before (`np.ndarray`):
            float64 `[N, N]`: entry `[i, j]` is how far segment j's logits moved when segment i's tokens were changed,
            with and without boundaries. NaN where it was not measured.
        rounding (`float`):
            Largest effect that was judged to be rounding, such as that of an expert layer that regroups its tokens.
        lengths (`tuple[int, ...]`):
            Tokens per segment of the probed row.
        model (`str`), dtype (`str`), attn_implementation (`str`):
            Class of the model, lowest precision it computes in, attention it runs.
        notes (`tuple[str, ...]`):
            What a reader has to know beside: where a probe ran differently from training.
    """

    ok: bool
    max_leak: float
    layers: tuple[LayerLeak, ...]
    probes: tuple[ProbeResult, ...]
    influence: np.ndarray
    influence_before: np.ndarray
    rounding: float
    lengths: tuple[int, ...]
    model: str
    dtype: str
    attn_implementation: str
    notes: tuple[str, ...] = ()

    def probe(self, name: str) -> ProbeResult:
        """Give the result of the probe with this name."""
        return next(probe for probe in self.probes if probe.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain Python values that `json.dumps` takes: NaN becomes `None`."""
        values = asdict(self)
        values["influence"] = self.influence.tolist()
        values["influence_before"] = self.influence_before.tolist()
        return _without_nan(values)  # type: ignore[no-any-return]

    def to_text(self) -> str:
        """Give the report as text of at most 80 columns."""
        verdict = "keeps its segments apart" if self.ok else "IS NOT PROVEN to keep its segments apart"
        if self.layers or self.max_leak > 0:
            verdict = "LEAKS between segments"
        lengths = ", ".join(map(str, self.lengths))
        lines = _wrapped(f"{self.model} ({self.dtype}, {self.attn_implementation} attention) {verdict}.")
        lines += [*_wrapped(f"One packed row of {len(self.lengths)} segments with {lengths} tokens."), ""]
        lines.append(f"{'probe':<14}{'result':<15}{'effect':>9}{'allowed':>12}")
        for probe in self.probes:
            sign = ">" if probe.name == "control" else "<="
            effect, allowed = _number(probe.effect), _number(probe.allowed)
            lines.append(f"{probe.name:<14}{probe.status:<15}{effect:>9}{sign:>4}{allowed:>8}")
            lines += _wrapped(probe.detail, indent="  ")
        if self.layers:
            lines += ["", f"Leaking layers: {len(self.layers)}. The first ones:"]
            for leak in self.layers[:5]:
                lines.append(f"  {leak.name}"[:80])
                effect = f"{leak.kind}, segment {leak.source} moves {leak.target} by {_number(leak.effect)}"
                lines += _wrapped(f"{leak.class_name}: {effect}", indent="    ")
            lines += _wrapped(self._way_out())
        for note in self.notes:
            lines += ["", *_wrapped(note)]
        return "\n".join(lines)

    def save_picture(self, path: str | Path) -> None:
        """
        Draw who moves whom, without and with boundaries, as a PNG.

        Args:
            path (`str` or `Path`):
                File to write.

        Raises:
            [`MissingDependencyError`]: If matplotlib is not installed.
        """
        from .picture import save_influence

        save_influence(self, Path(path))

    def raise_if_leaking(self) -> None:
        """
        Stop unless the model is proven to keep segments apart.

        Raises:
            [`LeakError`]: If a probe found a leak, or a probe that was asked for could not run.
        """
        if self.ok:
            return
        if self.layers:
            leak = self.layers[0]
            raise LeakError(
                f"Segments of a packed row must not influence one another, but changing segment {leak.source} moves "
                f"segment {leak.target} by {_number(leak.effect)} (relative) in `{leak.name}` ({leak.class_name}, "
                f"{leak.kind}) of {self.model}. The largest effect on logits or gradients is "
                f"{_number(self.max_leak)}, and {len(self.layers)} of its layers leak. {self._way_out()}"
            )
        bad = next(probe for probe in self.probes if probe.status in (FAILED, NOT_RUN))
        if bad.status == NOT_RUN:
            raise LeakError(
                f"Packed training needs proof that segments do not influence one another, but the {bad.name} probe "
                f"could not run on {self.model}: {bad.detail}"
            )
        raise LeakError(
            f"Segments of a packed row must give what they give alone, but the {bad.name} probe measured "
            f"{_number(bad.effect)} (relative) on {self.model}, where the limit is {_number(bad.allowed)}. "
            f"{bad.detail} {self._way_out()}"
        )

    def _way_out(self) -> str:
        if not self.layers:
            return _WAYS_OUT["position" if self.max_leak == 0 else "layer"]
        kind = self.layers[0].kind
        return _WAYS_OUT["varlen" if kind in ("attention", "mask") and self.attn_implementation == "varlen" else kind]


def sentence_of(error: Exception) -> str:
    """Give an error's type and text in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def _number(value: float) -> str:
    if value != value:
        return "-"
    return f"{value:.2g}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and value != value else value
