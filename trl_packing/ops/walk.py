"""
The walks over the waves of a row: the one part of a scan that must go step by step.

Shapes: M chunks, of which L hand a state on. As many take one over: what the i-th of the one hands on, the i-th of the
other takes over. The chunks that take over none come first.

The walks are operators of their own, with the backward pass written by hand, so that a compiled graph holds one node
for them however long the row is, and serves rows of any length. `waves` are the chunks per wave of the row; empty
means that every chunk is a wave of its own, as in a row that is cut where it lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


# This module's annotations are read by torch to give the operators their schemas.
@torch.library.custom_op("trl_packing::carry_states", mutates_args=())
def carry_states(written: Tensor, carries: Tensor, waves: list[int]) -> Tensor:
    """
    Carry states from wave to wave: a chunk hands on what it has written plus what it took over, decayed.

    Args:
        written (`torch.Tensor`):
            What each chunk that hands a state on adds to it, shape `[L, ...]`.
        carries (`torch.Tensor`):
            Decay of the state across each of these chunks, of a shape `[L, ...]` that broadcasts to the state's.
        waves (`list[int]`):
            Chunks per wave.

    Returns:
        `torch.Tensor`: The states handed on, shape `[L, ...]`.
    """
    states = written.clone(memory_format=torch.contiguous_format)
    for step in _steps(waves, 0, len(written)):
        if step.took is not None:
            states[step.hands].addcmul_(states[step.took], carries[step.hands])
    return states


@torch.library.custom_op("trl_packing::carry_states_backward", mutates_args=())
def _carry_states_backward(
    grad_states: Tensor, carries: Tensor, states: Tensor, waves: list[int]
) -> tuple[Tensor, Tensor]:
    grads, grad_carries = grad_states.clone(memory_format=torch.contiguous_format), torch.zeros_like(carries)
    for step in reversed(_steps(waves, 0, len(states))):
        if step.took is not None:
            grad, carry = grads[step.hands], carries[step.hands]
            grads[step.took].addcmul_(grad, carry)
            grad_carries[step.hands] = (grad * states[step.took]).sum_to_size(carry.shape)
    return grads, grad_carries


@torch.library.custom_op("trl_packing::delta_walk", mutates_args=())
def delta_walk(
    values: Tensor, reads: Tensor, writes: Tensor, carries: Tensor, waves: list[int]
) -> tuple[Tensor, Tensor]:
    """
    Walk the delta rule over the waves: a chunk's updates are corrected by the state it takes over, then written to it.

    Args:
        values (`torch.Tensor`):
            Updates of each chunk as if it took over nothing, shape `[M, H, C, V]`.
        reads (`torch.Tensor`):
            What the state corrects of them, for the chunks that take one over, shape `[L, H, C, K]`.
        writes (`torch.Tensor`):
            What they add to the state, for the chunks that hand one on, shape `[L, H, C, K]`.
        carries (`torch.Tensor`):
            Decay of the state across the chunks that hand one on, shape `[L, H, 1 or K, 1]`.
        waves (`list[int]`):
            Chunks per wave.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The updates, shape `[M, H, C, V]`, and the states handed on, shape
            `[L, H, K, V]`.
    """
    updates = values.clone(memory_format=torch.contiguous_format)
    states = values.new_empty(_states_shape(values, writes))
    for step in _steps(waves, len(values), len(writes)):
        state = torch.matmul(writes[step.hands].mT, updates[step.rows], out=states[step.hands])
        if step.took is not None:
            state.addcmul_(states[step.took], carries[step.hands])
        updates[step.takers] -= reads[step.hands] @ state
    return updates, states


@torch.library.custom_op("trl_packing::delta_walk_backward", mutates_args=())
def _delta_walk_backward(
    grad_updates: Tensor,
    grad_states: Tensor,
    reads: Tensor,
    writes: Tensor,
    carries: Tensor,
    updates: Tensor,
    states: Tensor,
    waves: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_values = grad_updates.clone(memory_format=torch.contiguous_format)
    grads = grad_states.clone(memory_format=torch.contiguous_format)
    grad_reads, grad_writes, grad_carries = (torch.zeros_like(tensor) for tensor in (reads, writes, carries))
    for step in reversed(_steps(waves, len(updates), len(writes))):
        grad, carry = grads[step.hands], carries[step.hands]
        grad -= reads[step.hands].mT @ grad_values[step.takers]
        grad_reads[step.hands] = -(grad_values[step.takers] @ states[step.hands].mT)
        grad_writes[step.hands] = updates[step.rows] @ grad.mT
        grad_values[step.rows] += writes[step.hands] @ grad
        if step.took is not None:
            grads[step.took].addcmul_(grad, carry)
            grad_carries[step.hands] = (grad * states[step.took]).sum_to_size(carry.shape)
    return grad_values, grad_reads, grad_writes, grad_carries


class _Step(NamedTuple):
    """The chunks of one wave that hand a state on, and those of the next that take it over."""

    hands: slice  # among the L states
    took: slice | None  # the states that the same chunks took over, None in the first wave
    rows: slice  # among the M chunks
    takers: slice  # among the M chunks


def _steps(waves: list[int], num_chunks: int, num_states: int) -> list[_Step]:
    first = num_chunks - num_states
    steps: list[_Step] = []
    start = took = row = 0
    for size in waves[1:] if waves else [1] * num_states:
        hands, takers = slice(start, start + size), slice(first + start, first + start + size)
        steps.append(_Step(hands, slice(took, took + size) if steps else None, slice(row, row + size), takers))
        took, row, start = start, first + start, start + size
    return steps


def _states_shape(values: Tensor, writes: Tensor) -> tuple[int, ...]:
    return (writes.shape[0], writes.shape[1], writes.shape[3], values.shape[3])


@carry_states.register_fake
def _(written: Tensor, carries: Tensor, waves: list[int]) -> Tensor:
    return torch.empty_like(written, memory_format=torch.contiguous_format)


@_carry_states_backward.register_fake
def _(grad_states: Tensor, carries: Tensor, states: Tensor, waves: list[int]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad_states, memory_format=torch.contiguous_format), torch.empty_like(carries)


@delta_walk.register_fake
def _(values: Tensor, reads: Tensor, writes: Tensor, carries: Tensor, waves: list[int]) -> tuple[Tensor, Tensor]:
    updates = torch.empty_like(values, memory_format=torch.contiguous_format)
    return updates, values.new_empty(_states_shape(values, writes))


@_delta_walk_backward.register_fake
def _(
    grad_updates: Tensor,
    grad_states: Tensor,
    reads: Tensor,
    writes: Tensor,
    carries: Tensor,
    updates: Tensor,
    states: Tensor,
    waves: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_values = torch.empty_like(grad_updates, memory_format=torch.contiguous_format)
    return grad_values, torch.empty_like(reads), torch.empty_like(writes), torch.empty_like(carries)


def _save_for_carry(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, carries, ctx.waves = inputs
    ctx.save_for_backward(carries, output)


def _differentiate_carry(ctx: Any, grad_states: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_carry_states_backward(grad_states, *ctx.saved_tensors, ctx.waves), None


def _save_for_walk(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, *factors, ctx.waves = inputs
    ctx.save_for_backward(*factors, *output)


def _differentiate_walk(ctx: Any, grad_updates: Tensor, grad_states: Tensor) -> tuple[Tensor | None, ...]:
    return *_delta_walk_backward(grad_updates, grad_states, *ctx.saved_tensors, ctx.waves), None


carry_states.register_autograd(_differentiate_carry, setup_context=_save_for_carry)
delta_walk.register_autograd(_differentiate_walk, setup_context=_save_for_walk)
