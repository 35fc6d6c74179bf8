"""
The leak check: does any segment of a packed row influence another one, on this very model?

Four probes on one small packed row:

- perturbation: some segments' tokens are changed; the logits of those that keep theirs must not move. Three patterns
  of change try every pair of four segments, in both directions.
- gradient: no segment's logits may have a gradient at the input embeddings of those before it, in two backward passes.
- control: where no boundary is in between, such a change must move what follows, otherwise the probes see nothing.
- alone: the last and the shortest segment's logits must equal those of the same tokens run as an unpacked sample.

"Must not move" means exactly 0. Where something moves all the same, `layers.py` judges every layer on its own: what
remains within the rounding of the model's own precision, such as an expert layer whose groups of tokens changed, is
rounding, and everything above is a leak of that layer.

Shapes: T tokens in the row, N segments, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..boundaries import Boundaries
from ..errors import PackingError
from .probes import Probes
from .report import IsolationReport, LayerLeak, ProbeResult
from .row import default_lengths, unwrapped
from .state import kept_state, mode

__all__ = ["IsolationReport", "LayerLeak", "ProbeResult", "check_isolation"]


def check_isolation(
    model: nn.Module,
    *,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    gradients: bool = True,
    control: bool = True,
    influence: bool = False,
    training: bool = True,
    position_ids_start: int = 0,
    host_offsets: bool = False,
    repeats_offsets: bool = False,
) -> IsolationReport:
    """
    Prove on one small packed row that no segment influences another, or say where one does.

    The model runs as in training (`use_cache=False`, the caller's autocast) but without dropout. Weights, gradients,
    random generators, buffers, train/eval flags, hooks and `config.use_cache` are left exactly as they were. An exact
    model costs 4 forward and 2 backward passes over the row, 2 forward passes over its last segment and 1 over its
    shortest; expert layers, whose rounding has to be told from a leak, up to 6 more. Where parameters are sharded over
    ranks, all ranks have to take part.

    Args:
        model (`nn.Module`):
            Model to check, as it is trained: adapters on, device, dtype and attention set.
        lengths (`Sequence[int]`, *optional*):
            Tokens per segment of the row, at least 3 segments. The default has one segment that is longer than the
            model's chunks and windows, one of a single token, and 143 tokens in all for most models.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the row's random tokens.
        gradients (`bool`, *optional*, defaults to `True`):
            Whether to run the gradient probe. With reentrant gradient checkpointing it runs with checkpointing off.
        control (`bool`, *optional*, defaults to `True`):
            Whether to run the negative control.
        influence (`bool`, *optional*, defaults to `False`):
            Whether to measure the effect of every segment by itself, with and without boundaries, for the picture: 9
            more forward passes.
        training (`bool`, *optional*, defaults to `True`):
            Whether to run in train mode, else in eval mode, where models may take other paths.
        position_ids_start (`int`, *optional*, defaults to `0`):
            Position of each segment's first token, as the collator passes it.
        host_offsets (`bool`, *optional*, defaults to `False`):
            Whether to pass `cu_seqlens_cpu`, as the collator does.
        repeats_offsets (`bool`, *optional*, defaults to `False`):
            Whether to repeat the last offset and to give `max_length_q` as an upper bound only, as rows of
            `row_shape: fixed` do.

    Returns:
        [`IsolationReport`]: Leaks, and probes that could not run, are in the report; nothing is raised for them.

    Raises:
        [`PackingError`]: If there are fewer than 3 segments or a length is below 1.

    Example:

    ```python
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from trl_packing import check_isolation
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    >>> report = check_isolation(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)))
    >>> report.ok, report.max_leak, report.layers
    (True, 0.0, ())

    ```
    """
    model = unwrapped(model)
    boundaries = Boundaries.from_lengths(default_lengths(model) if lengths is None else lengths)
    if repeats_offsets:
        boundaries = Boundaries(
            boundaries.lengths, num_offsets=boundaries.num_segments + 4, max_seqlen=boundaries.total_tokens
        )
    if boundaries.num_segments < 3:
        raise PackingError(
            f"The check needs at least 3 segments, but `lengths` has {boundaries.num_segments}. Leave `lengths` "
            "out for the default row."
        )
    with kept_state(model) as random_state, mode(model, training=training):
        probes = Probes(
            model,
            boundaries,
            random_state,
            training=training,
            seed=seed,
            position_ids_start=position_ids_start,
            host_offsets=host_offsets,
        )
        return probes.report(gradients=gradients, control=control, influence=influence)
