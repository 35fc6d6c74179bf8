"""
The four probes, and the verdict over them.

Shapes: T tokens in the row, N segments, V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ..boundaries import Boundaries
from ..errors import PackingError
from .alone import NOISE_MARGIN, Outcome, has_choices, judge_layers_alone, largest
from .layers import Entry, LayerWatch, class_name, has_indexer, kind_of, mask_opens
from .reach import length_notes
from .report import FAILED, NOT_RUN, OFF, PASSED, IsolationReport, LayerLeak, ProbeResult, sentence_of
from .row import Row, configs_of, together, token_effects
from .state import RandomState, has_reentrant_checkpointing, has_sharded_parameters, mode, without_checkpointing

# What a check promises to see. A model whose own noise comes near it cannot be judged.
_SMALLEST_LEAK_FLOAT32 = 1e-3
_SMALLEST_LEAK_HALF_IN_EPSILONS = 4

# Which segments were changed, bool `[N]`, and the logits.
_Run = tuple[np.ndarray, torch.Tensor]


class Probes:
    """
    Run the probes of one check.

    Args:
        model (`nn.Module`):
            In the mode to check.
        boundaries ([`Boundaries`]):
            Segments of the row.
        random_state (`RandomState`):
            Restored before every run.
        training (`bool`, *optional*, defaults to `True`):
            Whether that is train mode.
        row_options (`Any`):
            As for [`Row`].
    """

    def __init__(
        self,
        model: nn.Module,
        boundaries: Boundaries,
        random_state: RandomState,
        training: bool = True,
        **row_options: Any,
    ) -> None:
        self._model, self._training = model, training
        self._boundaries = boundaries
        self._random_state = random_state
        self._row_options = {"random_state": random_state, "agree": self._agree, **row_options}
        self._is_sharded = dist.is_available() and dist.is_initialized() and has_sharded_parameters(model)
        shape = (boundaries.num_segments, boundaries.num_segments)
        self._influence, self._influence_before = np.full(shape, np.nan), np.full(shape, np.nan)
        self._layers: tuple[LayerLeak, ...] = ()
        self._max_leak = 0.0
        self._rounding = 0.0
        self._notes: list[str] = []
        self._draws_random_numbers = False
        self._has_leaking_gradient = False
        self._alone: torch.Tensor | None = None
        # Logits of the perturbation's runs, as far as the gradient probe has needed their graphs.
        self._changed: dict[int, torch.Tensor] = {}

    def report(self, *, gradients: bool, control: bool, influence: bool) -> IsolationReport:
        """Run the probes that are asked for. Whatever a model raises becomes a probe that could not run."""
        names = ("perturbation", "gradient", "control", "alone")
        try:
            self._row = Row(self._model, self._boundaries, **self._row_options)
            self._base = self._row.run(self._row.tokens)
            self._draws_random_numbers = self._random_state.is_drawn_from()
        except Exception as error:
            results = [ProbeResult(name, NOT_RUN, np.nan, np.nan, sentence_of(error)) for name in names]
            return self._assemble(results)
        # The gradient goes first: it uses the graph of the unchanged run, which is freed before the next one.
        gradient = self._attempt("gradient", self._probe_gradient if gradients else None)
        self._base = self._base.detach()
        perturbation = self._attempt("perturbation", self._probe_perturbation)
        if self._agree(gradient.status == FAILED and not self._layers):
            # It only adds a name to a leak that is proven.
            with suppress(Exception):
                self._layers = self._layers or self._locate_in_gradients()
        if influence:
            # Without it the picture has an empty half.
            with suppress(Exception):
                self._measure_influence()
        controlled = self._attempt("control", self._probe_control if control else None)
        return self._assemble([perturbation, gradient, controlled, self._attempt("alone", self._probe_alone)])

    # ---- perturbation

    def _probe_perturbation(self) -> Outcome:
        """
        Compare runs that differ in some segments' tokens, at the segments that they have in common.

        Run k changes the segments whose number, counted from 1, has bit k set. As these patterns differ, for any two
        segments there are two runs in which one keeps its tokens and the other does not: every pair is tried, in
        both directions, by 3 runs for 4 segments.
        """
        num_segments = self._boundaries.num_segments
        runs = [(np.zeros(num_segments, dtype=bool), self._base)]
        for number in range(num_segments.bit_length()):
            changed, logits = self._pattern(number), self._changed.get(number)
            if logits is None:
                logits = self._row.run(self._changed_in(changed)).detach()
            runs.append((changed, logits))
            if self._agree(any(self._has_moved(before, runs[-1]) for before in runs[:-1])):
                pairs = [(before, runs[-1]) for before in runs[:-1]]
                return self._judge_layers(max(pairs, key=lambda pair: self._move(*pair)))
        self._influence[~np.eye(num_segments, dtype=bool)] = 0.0
        detail = f"Changed each of {num_segments} segments: no other's logits moved by a single bit."
        return PASSED, 0.0, 0.0, detail

    def _has_moved(self, one: _Run, other: _Run) -> bool:
        """Say whether any segment with the same tokens in both runs has other logits."""
        offsets, kept = self._boundaries.offsets, np.flatnonzero(one[0] == other[0])
        parts = [slice(offsets[segment], offsets[segment + 1]) for segment in kept]
        return any(not torch.equal(one[1][part], other[1][part]) for part in parts)

    def _move(self, one: _Run, other: _Run) -> float:
        """Measure how far the segments with the same tokens in both runs moved."""
        effects = self._row.per_segment(token_effects(one[1], other[1]))
        return float(np.where(one[0] == other[0], effects, 0.0).max())

    def _move_in_eager(self, one: _Run, other: _Run) -> float:
        again = [
            (changed, self._row.run(self._changed_in(changed), eager=True).detach()) for changed in (one[0], other[0])
        ]
        return self._move(again[0], again[1])

    def _pattern(self, number: int) -> np.ndarray:
        """Say which segments the run with this number changes: bool `[N]`."""
        return (np.arange(1, self._boundaries.num_segments + 1) >> number & 1).astype(bool)

    def _changed_in(self, segments: np.ndarray) -> np.ndarray:
        return self._row.with_changed(self._row.is_in(*np.flatnonzero(segments).tolist()))

    def _effects_of(self, source: int, base: torch.Tensor | None = None) -> np.ndarray:
        """Change one segment, with boundaries unless the run without them is given as `base`."""
        changed = self._row.run(self._row.with_changed(self._row.is_in(source)), bounded=base is None)
        return self._row.per_segment(token_effects(self._base if base is None else base, changed))

    def _judge_layers(self, moved: tuple[_Run, _Run]) -> Outcome:
        """Judge every layer by itself, because these two runs differ where they have the same tokens."""
        watch = LayerWatch(self._row.model, self._boundaries.total_tokens)
        with watch.recording():
            self._row.run(self._row.tokens, eager=True)
        everywhere = np.ones(self._boundaries.total_tokens, dtype=bool)
        noise = {entry.name: float(entry.effects.max()) for entry in self._compare(watch, watched=everywhere)}
        worst_noise = max(noise.values(), default=0.0)
        if self._agree(NOISE_MARGIN * worst_noise > self._smallest_leak()):
            raise PackingError(
                f"Two runs of the same row differ by {worst_noise:.1e} in one layer, so a leak of "
                f"{self._smallest_leak():.1e} would not be seen. Set `torch.use_deterministic_algorithms(True)`."
            )
        allowed = max(self._row.rounding(), NOISE_MARGIN * worst_noise)
        found: dict[str, LayerLeak] = {}
        largest_local = 0.0
        for source in range(self._boundaries.num_segments):
            local = np.zeros(self._boundaries.num_segments)
            for entry in self._compare(watch, watched=~self._row.is_in(source)):
                effects = self._others(self._row.per_segment(entry.effects), source)
                local = np.maximum(local, effects)
                effect, target = float(effects.max()), int(effects.argmax())
                is_larger = entry.name not in found or effect > found[entry.name].effect
                if effect > self._allowed_in(entry.module, allowed, worst_noise) and is_larger:
                    found[entry.name] = self._leak(entry, source, target, effect)
            if np.isnan(self._influence[source]).any():
                self._influence[source] = local
            largest_local = max(largest_local, float(local.max()))
        is_found_anywhere = self._agree(bool(found))
        if is_found_anywhere:
            for source in range(self._boundaries.num_segments):
                self._influence[source] = self._effects_of(source)
        order = {name: place for place, name in enumerate(watch.order())}
        self._layers = tuple(sorted(found.values(), key=lambda leak: order[leak.name]))
        if found:
            return self._verdict_on_layers(allowed)
        explained = allowed if largest_local == 0.0 else np.inf
        if self._row.is_compiled and not is_found_anywhere:
            # The layers were judged without torch.compile, which must not move logits more than eager rounding does.
            explained = max(allowed, NOISE_MARGIN * self._move_in_eager(*moved))
        return self._verdict_on_rounding(self._move(*moved), allowed, explained)

    def _allowed_in(self, layer: nn.Module, allowed: float, noise: float) -> float:
        """Say how far a layer may move: by rounding only where it regroups tokens or carries a sum along the row."""
        kinds = {kind_of(part) for part in layer.modules()}
        # Attention multiplies what it must not see by exactly zero.
        is_attention = kind_of(layer) == "attention" and "router" not in kinds and not has_indexer(layer)
        # Where a gradient has proven that there is a leak, only layers that regroup tokens may still move by rounding.
        if is_attention or (self._has_leaking_gradient and kind_of(layer) != "router"):
            return max(self._row.gradient_rounding(), NOISE_MARGIN * noise)
        return allowed

    def _verdict_on_rounding(self, effect: float, allowed: float, explained: float) -> Outcome:
        if effect > explained:
            self._max_leak = max(self._max_leak, effect)
            return FAILED, effect, explained, "The logits moved, but no layer by itself shows why."
        self._rounding = max(self._rounding, effect)
        return PASSED, effect, allowed, "The others moved, and each layer by itself by no more than rounding."

    def _verdict_on_layers(self, allowed: float) -> Outcome:
        effect = max(float(self._others(row, source).max()) for source, row in enumerate(self._influence))
        self._max_leak = max(self._max_leak, effect)
        first = self._layers[0]
        detail = f"Changing segment {first.source} moves segment {first.target}: the leak enters in {first.name}."
        return FAILED, effect, allowed, detail

    def _compare(self, watch: LayerWatch, watched: np.ndarray) -> list[Entry]:
        with watch.comparing(torch.from_numpy(watched)) as entries:
            self._row.run(self._row.with_changed(~watched), eager=True)
        return entries

    def _leak(self, entry: Entry, source: int, target: int, effect: float) -> LayerLeak:
        queries, keys = (torch.from_numpy(self._row.is_in(segment)) for segment in (target, source))
        kind = "convolution" if entry.is_convolution else kind_of(entry.module)
        if kind == "attention" and mask_opens(entry.mask, queries, keys):
            kind = "mask"
        return LayerLeak(entry.name, class_name(entry.module), kind, source, target, effect)

    # ---- the other probes

    def _probe_gradient(self) -> Outcome:
        """
        Look for gradients of some segments' logits at the others' embeddings.

        Pass k takes the segments whose number, counted from 0, has bit k set. Of any two segments there is a pass that
        takes the later one and not the earlier one: 2 passes for 4 segments. Each follows a run that is needed anyway.
        """
        effect, num_segments = 0.0, self._boundaries.num_segments
        sets = [np.flatnonzero(np.arange(num_segments) >> bit & 1) for bit in range((num_segments - 1).bit_length())]
        for number, chosen in enumerate(sets):
            logits, targets = self._logits_with_graph(number), tuple(chosen.tolist())
            effects = together(self._agree, partial(self._gradient_sizes, logits, targets))
            is_leaking = bool(effects.max() > self._row.gradient_rounding())
            if self._agree(is_leaking) and not is_leaking:
                break
            if is_leaking:
                self._has_leaking_gradient = True
                self._max_leak = max(self._max_leak, float(effects.max()))
                named = f"segments {', '.join(map(str, targets))} have a gradient at the embeddings of segment"
                detail = f"The logits of {named} {effects.argmax()}."
                return FAILED, float(effects.max()), self._row.gradient_rounding(), detail
            effect = max(effect, float(effects.max()))
        self._rounding = max(self._rounding, effect)
        exactly = "exactly zero" if effect == 0.0 else "zero but for rounding"
        detail = f"Gradient of each segment's logits at the embeddings of those before it: {exactly}."
        return PASSED, effect, self._row.gradient_rounding(), detail

    def _logits_with_graph(self, number: int) -> torch.Tensor:
        """Run the row unchanged for the first pass, and changed as the perturbation needs it for the others."""
        none = np.zeros(self._boundaries.num_segments, dtype=bool)
        tokens = self._changed_in(self._pattern(number - 1) if number else none)
        if self._row.is_compiled:
            self._note("The gradient probe ran without torch.compile.")
            return self._row.run(tokens, eager=True)
        if has_reentrant_checkpointing(self._model):
            self._note("The gradient probe ran with gradient checkpointing off, because it is reentrant.")
            with without_checkpointing(self._model):
                return self._row.run(tokens)
        if not number:
            return self._base
        logits = self._row.run(tokens)
        self._changed[number - 1] = logits.detach()
        return logits

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _gradient_sizes(self, logits: torch.Tensor, targets: tuple[int, ...]) -> np.ndarray:
        """Give the largest gradient of the targets' logits in each other segment, relative to their own: `[N]`."""
        is_target = self._row.is_in(*targets)
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=logits.shape[-1])
        cotangent = torch.from_numpy(np.where(is_target, 1.0, 0.0)[:, None] * signs).to(logits)
        leaves = self._row.leaves
        gradients = torch.autograd.grad(logits, leaves, cotangent, allow_unused=True) if leaves else ()
        rows = [gradient.detach().reshape(len(is_target), -1) for gradient in gradients if gradient is not None]
        if not rows:
            raise PackingError("The logits do not depend on the token embeddings, so there is no gradient to look at.")
        sizes = torch.cat(rows, dim=-1).abs().amax(dim=-1).double().cpu().numpy()
        own = float(np.median(sizes[is_target]))
        if not np.isfinite(sizes).all() or own == 0.0:
            raise PackingError(
                "The gradient at the token embeddings is zero or not finite, so the probe sees nothing."
            )
        return self._row.per_segment(torch.from_numpy(np.where(is_target, 0.0, sizes / own)))

    def _locate_in_gradients(self) -> tuple[LayerLeak, ...]:
        """Name the layer in which a gradient crosses over, for a leak that shows in the backward pass only."""
        watch, allowed = LayerWatch(self._row.model, self._boundaries.total_tokens), self._row.gradient_rounding()
        leaks: list[LayerLeak] = []
        for target in range(1, self._boundaries.num_segments):
            is_target = self._row.is_in(target)

            def size(gradient: torch.Tensor, is_target: np.ndarray = is_target) -> float:
                sizes = gradient.detach().reshape(len(is_target), -1).abs().amax(dim=-1).double().cpu().numpy()
                own = max(float(np.median(sizes[is_target])), float(np.finfo(np.float32).tiny))
                return float(sizes[~is_target].max()) / own

            with without_checkpointing(self._model), watch.tracing_gradients(size) as flows:
                logits = self._row.run(self._row.tokens, eager=True)
                source = int(self._gradient_sizes(logits, (target,)).argmax())
            for flow in flows:
                crosses_here = flow.out and flow.into and max(flow.out) <= allowed < max(flow.into)
                if flow.module is not None and crosses_here:
                    kind, effect = kind_of(flow.module), max(flow.into)
                    leaks.append(LayerLeak(flow.name, class_name(flow.module), kind, source, target, effect))
        return tuple(leaks[:1])

    def _probe_control(self) -> Outcome:
        """Run the last segment unpacked, and again with its first half changed: without a boundary this must show."""
        is_long_enough = self._boundaries.lengths[-1] > 1
        start = self._boundaries.offsets[self._boundaries.num_segments - 1] if is_long_enough else 0
        with self._mode_for_alone():
            base, other = (
                self._row.run_alone(self._tokens_from(start, changed=changed), eager=True).detach()
                for changed in (False, True)
            )
        self._alone = base if is_long_enough else None
        effect = float(token_effects(base, other)[len(base) // 2 :].max())
        # Enough to stand out from what moves by rounding with boundaries, which on most models is nothing.
        allowed = max(self._row.gradient_rounding(), NOISE_MARGIN * self._rounding)
        if effect > allowed:
            detail = "Where no boundary is between them, the first half of a segment does move the second half."
            return PASSED, effect, allowed, detail
        return FAILED, effect, allowed, "Even without a boundary nothing moves: the probes see nothing on this model."

    def _measure_influence(self) -> None:
        base = self._row.run(self._row.tokens, bounded=False).detach()
        for source in range(self._boundaries.num_segments):
            self._influence_before[source] = self._effects_of(source, base)
            self._influence[source] = self._effects_of(source)

    def _tokens_from(self, start: int, *, changed: bool = False) -> np.ndarray:
        """Give the row's last tokens, with another first half if asked for."""
        places = np.arange(self._boundaries.total_tokens)
        is_changed = changed & (places >= start) & (places < (start + len(places)) // 2)
        return self._row.with_changed(is_changed)[start:]

    def _mode_for_alone(self) -> AbstractContextManager[None]:
        # Random numbers of train mode differ with the length of a row.
        return mode(self._model, training=self._training and not self._draws_random_numbers)

    def _probe_alone(self) -> Outcome:
        lengths = self._boundaries.lengths
        last, shortest = len(lengths) - 1, int(np.argmin(lengths))
        with self._mode_for_alone():
            packed = self._base
            if self._draws_random_numbers:
                self._notes.append("The model draws random numbers in train mode: it was run alone in eval mode.")
                packed = self._row.run(self._row.tokens).detach()
            outcome = self._compare_alone(last, packed, self._alone)
            # Of one token nothing is left after those with close choices.
            if self._agree(outcome[0] != PASSED or shortest == last or has_choices(self._model, self._row)):
                return outcome
            try:
                short = self._compare_alone(shortest, packed, None)
            # Not every model takes a sample of one token, which trains nothing.
            except Exception as error:
                self._note(f"Segment {shortest} could not be run alone: {sentence_of(error)}")
                return outcome
        if short[0] != PASSED:
            return short
        _, effect, allowed, detail = max(outcome, short, key=lambda one: (one[2], one[1]))
        if allowed <= self._row.rounding():
            detail = f"Segments {shortest} and {last} give what the same tokens give run unpacked."
        return PASSED, effect, allowed, detail

    def _compare_alone(self, segment: int, packed: torch.Tensor, alone: torch.Tensor | None) -> Outcome:
        is_in = self._row.is_in(segment)
        tokens = self._row.tokens[is_in]
        alone = self._row.run_alone(tokens).detach() if alone is None else alone
        effects = token_effects(alone, packed[torch.from_numpy(is_in)])
        effect, allowed = largest(effects, self._model, self._row), self._row.rounding()
        if self._agree(effect > allowed):
            return judge_layers_alone(self._row, segment, tokens, effect)
        return PASSED, effect, allowed, f"Segment {segment} gives the logits of the same tokens run unpacked."

    # ---- shared

    def _attempt(self, name: str, probe: Callable[[], Outcome] | None) -> ProbeResult:
        if probe is None:
            return ProbeResult(name, OFF, np.nan, np.nan, "The caller turned it off.")
        try:
            return ProbeResult(name, *probe())
        except Exception as error:
            return ProbeResult(name, NOT_RUN, np.nan, np.nan, sentence_of(error))

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
            model=f"{class_name(base_model())} with adapters" if base_model else class_name(self._model),
            dtype=str(row.compute_dtype).removeprefix("torch.") if row else "unknown dtype",
            attn_implementation=str(getattr(configs[-1], "_attn_implementation", None) if configs else None),
            notes=(*self._notes, *length_notes(self._model)),
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
