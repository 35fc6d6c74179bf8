"""
The four probes, and the verdict over them.

Shapes: T tokens in the row, N segments, V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ..boundaries import Boundaries
from ..errors import PackingError
from .layers import Entry, LayerWatch, has_convolution, kind_of, mask_opens
from .report import FAILED, NOT_RUN, OFF, PASSED, IsolationReport, LayerLeak, ProbeResult
from .row import Row, configs_of, token_effects
from .state import RandomState, has_reentrant_checkpointing, mode, without_checkpointing

# Two runs whose noise is n may differ by a few n; four covers the maximum over a row of tokens.
_NOISE_MARGIN = 4
# What a check promises to see. A model whose own noise comes near it cannot be judged.
_SMALLEST_LEAK_FLOAT32 = 1e-3
_SMALLEST_LEAK_HALF_IN_EPSILONS = 4
# Kernels of short convolutions are at most this wide.
_CONVOLUTION_REACH = 8

_Outcome = tuple[str, float, float, str]


class Probes:
    """
    Run the probes of one check.

    Args:
        model (`nn.Module`):
            In the mode that training uses.
        boundaries ([`Boundaries`]):
            Segments of the row.
        random_state (`RandomState`):
            Restored before every run.
        row_options (`Any`):
            As for [`Row`].
    """

    def __init__(
        self, model: nn.Module, boundaries: Boundaries, random_state: RandomState, **row_options: Any
    ) -> None:
        self._model = model
        self._boundaries = boundaries
        self._random_state = random_state
        self._row_options = row_options
        self._is_sharded = dist.is_available() and dist.is_initialized() and _has_sharded_parameters(model)
        shape = (boundaries.num_segments, boundaries.num_segments)
        self._influence, self._influence_before = np.full(shape, np.nan), np.full(shape, np.nan)
        self._layers: tuple[LayerLeak, ...] = ()
        self._max_leak = 0.0
        self._rounding = 0.0
        self._notes: list[str] = []
        self._draws_random_numbers = False

    def report(self, *, gradients: bool, control: bool, influence: bool) -> IsolationReport:
        """Run the probes that are asked for. Whatever a model raises becomes a probe that could not run."""
        names = ("perturbation", "gradient", "control", "alone")
        try:
            self._row = Row(self._model, self._boundaries, random_state=self._random_state, **self._row_options)
            self._base = self._row.run(self._row.tokens)
            self._draws_random_numbers = self._random_state.is_drawn_from()
        except Exception as error:
            results = [ProbeResult(name, NOT_RUN, np.nan, np.nan, _sentence(error)) for name in names]
            return self._assemble(results)
        # The gradient goes first: it uses the graph of the unchanged run, which is freed before the next one.
        gradient = self._attempt("gradient", self._probe_gradient if gradients else None)
        self._base = self._base.detach()
        perturbation = self._attempt("perturbation", self._probe_perturbation)
        sources = range(self._boundaries.num_segments) if influence else range(1)
        run_control = (lambda: self._probe_control(sources)) if control or influence else None
        return self._assemble(
            [perturbation, gradient, self._attempt("control", run_control), self._attempt("alone", self._probe_alone)]
        )

    # ---- perturbation

    def _probe_perturbation(self) -> _Outcome:
        num_segments = self._boundaries.num_segments
        for source in range(num_segments):
            self._influence[source] = self._effects_of(source)
            if self._agree(bool(self._others(self._influence[source], source).any())):
                return self._judge_layers()
        return PASSED, 0.0, 0.0, f"Changed each of {num_segments} segments: no other's logits moved by a single bit."

    def _effects_of(self, source: int, base: torch.Tensor | None = None) -> np.ndarray:
        """Change one segment, with boundaries unless the run without them is given as `base`."""
        changed = self._row.run(self._row.with_changed(self._row.is_in(source)), bounded=base is None)
        return self._row.per_segment(token_effects(self._base if base is None else base, changed))

    def _judge_layers(self) -> _Outcome:
        watch = LayerWatch(self._row.model, self._boundaries.total_tokens)
        with watch.recording():
            self._row.run(self._row.tokens, eager=True)
        everywhere = np.ones(self._boundaries.total_tokens, dtype=bool)
        noise = {entry.name: float(entry.effects.max()) for entry in self._compare(watch, watched=everywhere)}
        worst_noise = max(noise.values(), default=0.0)
        if _NOISE_MARGIN * worst_noise > self._smallest_leak():
            raise PackingError(
                f"Two runs of the same row differ by {worst_noise:.1e} in one layer, so a leak of {self._smallest_leak():.1e} "
                "would not be seen. Set `torch.use_deterministic_algorithms(True)`."
            )
        allowed = max(self._row.rounding(), _NOISE_MARGIN * worst_noise)
        found: dict[str, tuple[Entry, LayerLeak]] = {}
        for source in range(self._boundaries.num_segments):
            local = np.zeros(self._boundaries.num_segments)
            for entry in self._compare(watch, watched=~self._row.is_in(source)):
                effects = self._others(self._row.per_segment(entry.effects), source)
                local = np.maximum(local, effects)
                leak = LayerLeak(entry.name, _class_name(entry.module), "", source, int(effects.argmax()), effects.max())
                if leak.effect > allowed and (entry.name not in found or leak.effect > found[entry.name][1].effect):
                    found[entry.name] = (entry, leak)
            if np.isnan(self._influence[source]).any():
                self._influence[source] = local
        return self._verdict(watch, found, allowed)

    def _verdict(self, watch: LayerWatch, found: dict[str, tuple[Entry, LayerLeak]], allowed: float) -> _Outcome:
        if not found:
            effect = float(np.nanmax([self._others(row, i).max() for i, row in enumerate(self._influence)]))
            self._rounding = effect
            return PASSED, effect, allowed, "The others moved, and each layer by itself by no more than rounding."
        for source in range(self._boundaries.num_segments):
            self._influence[source] = self._effects_of(source)
        order = {name: place for place, name in enumerate(watch.order())}
        beyond_convolution = self._reaches_beyond_a_convolution(watch, allowed)
        leaks = []
        for entry, leak in sorted(found.values(), key=lambda item: order[item[1].name]):
            kind = self._kind(entry, leak, beyond_convolution)
            leaks.append(LayerLeak(leak.name, leak.class_name, kind, leak.source, leak.target, float(leak.effect)))
        self._layers = tuple(leaks)
        effect = max(self._others(row, i).max() for i, row in enumerate(self._influence))
        self._max_leak = max(self._max_leak, float(effect))
        first = leaks[0]
        detail = f"Changing segment {first.source} moves segment {first.target}: the leak enters in {first.name}."
        return FAILED, float(effect), allowed, detail

    def _compare(self, watch: LayerWatch, watched: np.ndarray) -> list[Entry]:
        with watch.comparing(torch.from_numpy(watched)) as entries:
            self._row.run(self._row.with_changed(~watched), eager=True)
        return entries

    def _reaches_beyond_a_convolution(self, watch: LayerWatch, allowed: float) -> set[str]:
        """Name the layers that leak from tokens too far from the segment's end for a short convolution to carry."""
        source = int(np.argmax(self._boundaries.lengths[:-1]))
        changed = self._row.is_in(source)
        changed[self._boundaries.offsets[source + 1] - _CONVOLUTION_REACH : self._boundaries.offsets[source + 1]] = False
        names = set()
        for entry in self._compare(watch, watched=~changed):
            if self._others(self._row.per_segment(entry.effects), source).max() > allowed:
                names.add(entry.name)
        return names

    def _kind(self, entry: Entry, leak: LayerLeak, beyond_convolution: set[str]) -> str:
        if has_convolution(entry.module) and entry.name not in beyond_convolution:
            return "convolution"
        queries, keys = self._row.is_in(leak.target), self._row.is_in(leak.source)
        if mask_opens(entry.mask, torch.from_numpy(queries), torch.from_numpy(keys)):
            return "mask"
        return kind_of(entry.module)

    # ---- the other probes

    def _probe_gradient(self) -> _Outcome:
        logits = self._base
        if self._row.is_compiled:
            self._notes.append("The gradient probe ran without torch.compile.")
            logits = self._row.run(self._row.tokens, eager=True)
        elif has_reentrant_checkpointing(self._model):
            self._notes.append("The gradient probe ran with gradient checkpointing off, because it is reentrant.")
            with without_checkpointing(self._model):
                logits = self._row.run(self._row.tokens)
        targets = tuple(range(1, self._boundaries.num_segments, 2))
        is_target = self._row.is_in(*targets)
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=logits.shape[-1])
        cotangent = np.where(is_target, 1.0, 0.0)[:, None] * signs
        cotangent = torch.from_numpy(cotangent).to(logits)
        leaves = () if self._row.leaf is None else (self._row.leaf,)
        gradient = next(iter(torch.autograd.grad(logits, leaves, cotangent, allow_unused=True)), None) if leaves else None
        if gradient is None:
            raise PackingError("The logits do not depend on the token embeddings, so there is no gradient to look at.")
        sizes = gradient.detach().reshape(len(is_target), -1).abs().amax(dim=-1).double().cpu().numpy()
        own = float(np.median(sizes[is_target]))
        if not np.isfinite(sizes).all() or own == 0.0:
            raise PackingError("The gradient at the token embeddings is zero or not finite, so the probe sees nothing.")
        others = self._row.per_segment(torch.from_numpy(np.where(is_target, 0.0, sizes / own)))
        effect, allowed = float(others.max()), self._row.gradient_rounding()
        named = ", ".join(map(str, targets))
        if effect > allowed:
            self._max_leak = max(self._max_leak, effect)
            detail = f"The logits of segments {named} have a gradient at the embeddings of segment {others.argmax()}."
            return FAILED, effect, allowed, detail
        self._rounding = max(self._rounding, effect)
        exactly = "exactly zero" if effect == 0.0 else "zero but for rounding"
        return PASSED, effect, allowed, f"Gradient of the logits of segments {named} at the others' embeddings: {exactly}."

    def _probe_control(self, sources: range) -> _Outcome:
        base = self._row.run(self._row.tokens, bounded=False).detach()
        for source in sources:
            self._influence_before[source] = self._effects_of(source, base)
        effect, allowed = float(self._others(self._influence_before[0], 0).max()), self._row.rounding()
        if effect > allowed:
            return PASSED, effect, allowed, "Without boundaries the others do move, so the probes can see a leak."
        return FAILED, effect, allowed, "Even without boundaries nothing moves: the probes see nothing on this model."

    def _probe_alone(self) -> _Outcome:
        segment = self._boundaries.num_segments - 1
        is_in = self._row.is_in(segment)
        tokens = self._row.tokens[is_in]
        with mode(self._model, training=not self._draws_random_numbers):
            packed = self._base
            if self._draws_random_numbers:
                self._notes.append("The model draws random numbers in train mode: it was run alone in eval mode.")
                packed = self._row.run(self._row.tokens).detach()
            alone = self._row.run_alone(tokens).detach()
            effect = float(token_effects(alone, packed[torch.from_numpy(is_in)]).median())
            allowed = self._row.rounding()
            if self._agree(effect > allowed):
                # A longer row of the same tokens changes nothing but the order in which they are summed.
                longer = self._row.run_alone(np.concatenate([tokens, self._row.tokens[:64]])).detach()
                noise = float(token_effects(alone, longer[: len(tokens)]).median())
                allowed = max(allowed, _NOISE_MARGIN * noise)
        if effect <= allowed:
            return PASSED, effect, allowed, f"Segment {segment} gives the logits of the same tokens run unpacked."
        return FAILED, effect, allowed, f"Segment {segment} gives other logits than the same tokens run unpacked."

    # ---- shared

    def _attempt(self, name: str, probe: Callable[[], _Outcome] | None) -> ProbeResult:
        if probe is None:
            return ProbeResult(name, OFF, np.nan, np.nan, "The caller turned it off.")
        try:
            return ProbeResult(name, *probe())
        except Exception as error:
            return ProbeResult(name, NOT_RUN, np.nan, np.nan, _sentence(error))

    def _assemble(self, results: list[ProbeResult]) -> IsolationReport:
        configs = configs_of(self._model)
        base_model = getattr(self._model, "get_base_model", None)
        row = getattr(self, "_row", None)
        return IsolationReport(
            ok=all(result.status in (PASSED, OFF) for result in results),
            max_leak=self._max_leak,
            layers=self._layers,
            probes=tuple(results),
            influence=self._influence,
            influence_before=self._influence_before,
            rounding=self._rounding,
            lengths=self._boundaries.lengths,
            model=f"{_class_name(base_model())} with adapters" if base_model else _class_name(self._model),
            dtype=str(row.compute_dtype).removeprefix("torch.") if row else "unknown dtype",
            attn_implementation=str(getattr(configs[-1], "_attn_implementation", None) if configs else None),
            notes=tuple(self._notes),
        )

    def _others(self, effects: np.ndarray, source: int) -> np.ndarray:
        return np.where(np.arange(len(effects)) == source, 0.0, effects)

    def _smallest_leak(self) -> float:
        info = torch.finfo(self._row.compute_dtype)
        return _SMALLEST_LEAK_HALF_IN_EPSILONS * info.eps if info.bits < 32 else _SMALLEST_LEAK_FLOAT32

    def _agree(self, flag: bool) -> bool:
        """Let all ranks take the same branch where a forward pass is a collective operation."""
        if not self._is_sharded:
            return flag
        vote = torch.tensor(int(flag), device=self._row.device)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX)
        return bool(vote)


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def _has_sharded_parameters(model: nn.Module) -> bool:
    return any(
        hasattr(parameter, "ds_id") or hasattr(parameter, "placements") or hasattr(parameter, "_is_fsdp_flattened")
        for parameter in model.parameters()
    ) or any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__
