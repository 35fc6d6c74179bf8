"""
Mamba-2 scan (Mamba-2, Bamba, Falcon-H1, Nemotron-H, Zamba2) that keeps the segments of a packed row apart.

Shapes: T tokens in the row, H heads of width P, G groups of R = H / G heads, N state width (B and C are per group),
M chunks of Q slots.

`naive_mamba2_scan` is the definition for one segment, `mamba2_scan` the form for a whole row. Its arguments are those
of transformers' `mamba2_chunk_scan` and of mamba-ssm's `mamba_chunk_scan_combined`, plus the boundaries. Inside a
chunk the scan is a masked matrix product (Dao and Gu, "Transformers are SSMs", 2024); `layout` says how chunks follow
one another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import PackingError
from .gated_delta_rule import refuse_cache
from .layout import ChunkLayout, chunk_layout, computation_dtype, cumsum_in_segments, exp_where, without_autocast
from .walk import carry_states

# Models ask for up to 256 slots, which suits a GPU kernel; the matrix inside a chunk grows with the square of it.
_MAX_CHUNK_SIZE = 64


def naive_mamba2_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """
    Run the Mamba-2 scan over one segment, token by token.

    Args:
        hidden_states (`torch.Tensor`):
            Shape `[batch, T, H, P]`.
        dt (`torch.Tensor`):
            Step of each token and head, shape `[batch, T, H]`.
        A (`torch.Tensor`):
            Decay rate of each head, negative, shape `[H]`.
        B (`torch.Tensor`):
            What a token writes to the state, shape `[batch, T, G, N]`.
        C (`torch.Tensor`):
            What a token reads of the state, shape `[batch, T, G, N]`.
        D (`torch.Tensor`, *optional*):
            Weight of the token itself, shape `[H]` or `[H, P]`.
        z (`torch.Tensor`, *optional*):
            Gate, shape `[batch, T, H, P]`: the output is multiplied by `silu(z)`.
        dt_bias (`torch.Tensor`, *optional*):
            Added to `dt`, shape `[H]`.
        dt_softplus (`bool`, *optional*, defaults to `False`):
            Whether `dt` goes through softplus, after the bias.
        dt_limit (`tuple[float, float]`, *optional*, defaults to `(0.0, inf)`):
            Smallest and largest step, after softplus.

    Returns:
        `torch.Tensor`: Shape `[batch, T, H, P]` in the dtype of `hidden_states`, computed in at least float32.
    """
    dtype = computation_dtype(hidden_states)
    with without_autocast(hidden_states):
        x, A = hidden_states.to(dtype), A.to(dtype)
        dt = _step_sizes(dt, dt_bias, dt_softplus, dt_limit, dtype)
        B, C = (tensor.to(dtype).repeat_interleave(_heads_per_group(x, tensor), dim=2) for tensor in (B, C))
        state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1])
        outputs = []
        for t in range(x.shape[1]):
            written = (x[:, t] * dt[:, t, :, None])[..., None] * B[:, t, :, None]
            state = state * (dt[:, t] * A).exp()[..., None, None] + written
            outputs.append((state * C[:, t, :, None]).sum(-1))
        return _with_skip_and_gate(torch.stack(outputs, dim=1), x, D, z).to(hidden_states.dtype)


def mamba2_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int = _MAX_CHUNK_SIZE,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    *,
    lengths: tuple[int, ...] | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Run the Mamba-2 scan over every segment of a packed row on its own.

    Args:
        hidden_states (`torch.Tensor`):
            Shape `[1, T, H, P]`.
        dt (`torch.Tensor`):
            Step of each token and head, shape `[1, T, H]`.
        A (`torch.Tensor`):
            Decay rate of each head, negative, shape `[H]`.
        B (`torch.Tensor`):
            What a token writes to the state, shape `[1, T, G, N]`, H a multiple of G.
        C (`torch.Tensor`):
            What a token reads of the state, shape `[1, T, G, N]`.
        chunk_size (`int`, *optional*, defaults to `64`):
            Most slots per chunk; never more than 64 are used. It changes cost and rounding only.
        D (`torch.Tensor`, *optional*):
            Weight of the token itself, shape `[H]` or `[H, P]`.
        z (`torch.Tensor`, *optional*):
            Gate, shape `[1, T, H, P]`: the output is multiplied by `silu(z)`.
        dt_bias (`torch.Tensor`, *optional*):
            Added to `dt`, shape `[H]`.
        initial_states (`torch.Tensor`, *optional*):
            State of a cache. Refused, because a packed row has none.
        dt_softplus (`bool`, *optional*, defaults to `False`):
            Whether `dt` goes through softplus, after the bias.
        dt_limit (`tuple[float, float]`, *optional*, defaults to `(0.0, inf)`):
            Smallest and largest step, after softplus.
        return_final_states (`bool`, *optional*, defaults to `False`):
            Whether a cache wants the last state. Refused.
        lengths (`tuple[int, ...]`, *optional*):
            Tokens in each segment, on the host. The fast form.
        seq_idx (`torch.Tensor`, *optional*):
            Segment number of each token, integer of shape `[1, T]`, equal numbers adjacent. Used where `lengths` is
            not given and under torch.compile; it is never read back to the host.

    Returns:
        `torch.Tensor`: Shape `[1, T, H, P]` in the dtype of `hidden_states`, computed in at least float32.

    Raises:
        [`PackingError`]: If the batch size is not 1, the boundaries are missing or do not fit the row, a state is
            passed or asked for, or H is not a multiple of G.
    """
    refuse_cache(initial_states, return_final_states)
    layout = chunk_layout(lengths, seq_idx, hidden_states, min(chunk_size, _MAX_CHUNK_SIZE))
    dtype = computation_dtype(hidden_states)
    with without_autocast(hidden_states):
        x = hidden_states.to(dtype)
        dt = _step_sizes(dt, dt_bias, dt_softplus, dt_limit, dtype)
        # [1, T, H or G, ...] -> [M, H or G, Q, ...]
        moved, decay, write, read = (
            layout.to_chunks(tensor).transpose(1, 2).contiguous()
            for tensor in (x * dt[..., None], dt * A.to(dtype), B.to(dtype), C.to(dtype))
        )
        output = _chunked(layout, moved, decay, write, read)
        return _with_skip_and_gate(layout.to_row(output.transpose(1, 2)), x, D, z).to(hidden_states.dtype)


def _chunked(
    layout: ChunkLayout, moved: torch.Tensor, decay: torch.Tensor, write: torch.Tensor, read: torch.Tensor
) -> torch.Tensor:
    num_groups = write.shape[1]
    num_repeats = _heads_per_group(moved.transpose(1, 2), write.transpose(1, 2))
    by_group = (num_groups, num_repeats)
    cumulated = cumsum_in_segments(decay, layout.segments)  # [M, H, Q]
    since = exp_where(layout.attends[:, None], cumulated[..., :, None] - cumulated[..., None, :])
    scores = (read @ write.mT)[:, :, None] * since.unflatten(1, by_group)  # [M, G, R, Q, Q]
    output = scores.flatten(1, 2) @ moved

    since_start = exp_where(layout.continues[:, None], cumulated)
    until_end = exp_where(layout.hands_over[:, None], cumulated[..., -1:] - cumulated)
    # A group's heads share what they read and write, so their states lie side by side: [M, G, N, R, P].
    moved = layout.handing_on(moved * until_end[..., None]).unflatten(1, by_group).transpose(2, 3)
    written = (layout.handing_on(write).mT @ moved.flatten(3)).unflatten(3, moved.shape[3:])
    carries = layout.handing_on(since_start[..., -1]).unflatten(1, by_group)[:, :, None, :, None]
    states = carry_states(written, carries, layout.waves)
    first = layout.num_first
    from_states = (read[first:] @ states.flatten(3)).unflatten(3, states.shape[3:])  # [M - first, G, Q, R, P]
    from_states = from_states.transpose(2, 3).flatten(1, 2) * since_start[first:, ..., None]
    return output + F.pad(from_states, (0, 0, 0, 0, 0, 0, first, 0))


def _step_sizes(
    dt: torch.Tensor,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    dtype: torch.dtype,
) -> torch.Tensor:
    dt = dt.to(dtype)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    return dt.clamp(min=dt_limit[0], max=dt_limit[1])


def _with_skip_and_gate(
    output: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None
) -> torch.Tensor:
    if D is not None:
        output = output + x * D.to(x.dtype).reshape(x.shape[2], -1)
    return output if z is None else output * F.silu(z.to(x.dtype))


def _heads_per_group(x: torch.Tensor, grouped: torch.Tensor) -> int:
    num_repeats: int = x.shape[2] // grouped.shape[2]
    rest = x.shape[2] % grouped.shape[2]
    if rest:
        raise PackingError(
            f"Heads must be a multiple of groups, but there are {x.shape[2]} heads and {grouped.shape[2]} groups."
        )
    return num_repeats
