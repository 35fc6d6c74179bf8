"""
Mamba-1 scan (Mamba, Falcon-Mamba, Jamba, Zamba) that keeps the segments of a packed row apart.

Shapes: T tokens in the row, D channels, N state width, M chunks of Q slots.

`naive_selective_scan` is the definition for one segment, `selective_scan` the form for a whole row. Its arguments are
those of transformers' `mamba_selective_scan`, plus the boundaries. No kernel of mamba-ssm takes boundaries here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .gated_delta_rule import refuse_cache
from .layout import ChunkLayout, chunk_layout, computation_dtype, cumsum_in_segments, exp_where, without_autocast
from .walk import carry_states

# The scan takes one step per slot of a chunk, for all chunks at once, and one per wave.
_CHUNK_SIZE = 64


def naive_selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
) -> torch.Tensor:
    """
    Run the Mamba-1 scan over one segment, token by token.

    Args:
        hidden_states (`torch.Tensor`):
            Shape `[batch, D, T]`.
        dt (`torch.Tensor`):
            Step of each token and channel, shape `[batch, D, T]`.
        A (`torch.Tensor`):
            Decay rates, negative, shape `[D, N]`.
        B (`torch.Tensor`):
            What a token writes to the state, shape `[batch, N, T]`.
        C (`torch.Tensor`):
            What a token reads of the state, shape `[batch, N, T]`.
        D (`torch.Tensor`, *optional*):
            Weight of the token itself, shape `[D]`.
        z (`torch.Tensor`, *optional*):
            Gate, shape `[batch, D, T]`: the output is multiplied by `silu(z)`.
        delta_bias (`torch.Tensor`, *optional*):
            Added to `dt`, shape `[D]`.
        delta_softplus (`bool`, *optional*, defaults to `False`):
            Whether `dt` goes through softplus, after the bias.

    Returns:
        `torch.Tensor`: Shape `[batch, D, T]` in the dtype of `hidden_states`, computed in at least float32.
    """
    with without_autocast(hidden_states):
        x, dt, write, read = _prepare(hidden_states, dt, B, C, delta_bias, delta_softplus)
        A = A.to(x.dtype)
        state = x.new_zeros(x.shape[0], *A.shape)
        outputs = []
        for t in range(x.shape[1]):
            state = state * (dt[:, t, :, None] * A).exp() + (dt[:, t] * x[:, t])[..., None] * write[:, t, None]
            outputs.append((state * read[:, t, None]).sum(-1))
        return _finish(torch.stack(outputs, dim=1), x, D, z).to(hidden_states.dtype)


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    lengths: tuple[int, ...] | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Run the Mamba-1 scan over every segment of a packed row on its own.

    Args:
        hidden_states (`torch.Tensor`):
            Shape `[1, D, T]`.
        dt (`torch.Tensor`):
            Step of each token and channel, shape `[1, D, T]`.
        A (`torch.Tensor`):
            Decay rates, negative, shape `[D, N]`.
        B (`torch.Tensor`):
            What a token writes to the state, shape `[1, N, T]`.
        C (`torch.Tensor`):
            What a token reads of the state, shape `[1, N, T]`.
        D (`torch.Tensor`, *optional*):
            Weight of the token itself, shape `[D]`.
        z (`torch.Tensor`, *optional*):
            Gate, shape `[1, D, T]`: the output is multiplied by `silu(z)`.
        delta_bias (`torch.Tensor`, *optional*):
            Added to `dt`, shape `[D]`.
        delta_softplus (`bool`, *optional*, defaults to `False`):
            Whether `dt` goes through softplus, after the bias.
        return_last_state (`bool`, *optional*, defaults to `False`):
            Whether a cache wants the last state. Refused, because a packed row has none.
        lengths (`tuple[int, ...]`, *optional*):
            Tokens in each segment, on the host. The fast form.
        seq_idx (`torch.Tensor`, *optional*):
            Segment number of each token, integer of shape `[1, T]`, equal numbers adjacent. Used where `lengths` is
            not given and under torch.compile; it is never read back to the host.

    Returns:
        `torch.Tensor`: Shape `[1, D, T]` in the dtype of `hidden_states`, computed in at least float32.

    Raises:
        [`PackingError`]: If the batch size is not 1, the boundaries are missing or do not fit the row, or a state is
            asked for.
    """
    refuse_cache(None, return_last_state)
    layout = chunk_layout(lengths, seq_idx, hidden_states.transpose(1, 2), _CHUNK_SIZE)
    with without_autocast(hidden_states):
        x, dt, write, read = _prepare(hidden_states, dt, B, C, delta_bias, delta_softplus)
        # [1, T, ...] -> [M, Q, ...]
        moved, steps, write, read = (layout.to_chunks(tensor) for tensor in (dt * x, dt, write, read))
        output = _chunked(layout, moved, steps, A.to(x.dtype), write, read)
        return _finish(layout.to_row(output), x, D, z).to(hidden_states.dtype)


def _chunked(
    layout: ChunkLayout,
    moved: torch.Tensor,
    steps: torch.Tensor,
    A: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
) -> torch.Tensor:
    # First the states inside all chunks at once, slot by slot, as if no chunk took over any. Segments start from zero.
    segments = layout.segments
    joined = F.pad(segments[:, 1:] == segments[:, :-1], (1, 0)).T[..., None, None]
    decays = exp_where(joined, steps.transpose(0, 1)[..., None] * A)  # [Q, M, D, N]
    written = (moved[..., None] * write[:, :, None]).transpose(0, 1)
    states = carry_states(written, decays, []).transpose(0, 1)  # [M, Q, D, N]
    output = (states @ read[..., None])[..., 0]

    since_start = cumsum_in_segments(steps.transpose(1, 2), segments).transpose(1, 2)
    since_start = exp_where(layout.continues[..., None, None], since_start[..., None] * A)
    written, carries = layout.handing_on(states[:, -1]), layout.handing_on(since_start[:, -1])
    first = layout.num_first
    taken_over = carry_states(written, carries, layout.waves)
    from_states = (since_start[first:] * taken_over[:, None]) @ read[first:, ..., None]
    return output + F.pad(from_states[..., 0], (0, 0, 0, 0, first, 0))


def _prepare(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bring all inputs to `[batch, T, ...]` in the dtype of the computation, and the steps to their final size."""
    dtype = computation_dtype(hidden_states)
    x, dt, write, read = (tensor.to(dtype).transpose(1, 2) for tensor in (hidden_states, dt, B, C))
    if delta_bias is not None:
        dt = dt + delta_bias.to(dtype)
    return x, F.softplus(dt) if delta_softplus else dt, write, read


def _finish(output: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None) -> torch.Tensor:
    if D is not None:
        output = output + x * D.to(x.dtype)
    output = output.transpose(1, 2)
    return output if z is None else output * F.silu(z.to(x.dtype))
