"""The operators with a backward pass by hand: what torch checks of such operators, and gradients by differences."""

import pytest
import torch

from trl_packing.ops.kda import _decayed_products
from trl_packing.ops.walk import carry_states, delta_walk

WAVES = {"in-place": ([], 4), "one-wave": ([4], 0), "three-waves": ([4, 2, 1], 3), "equal-waves": ([2, 2, 2], 4)}
each_walk = pytest.mark.parametrize(("waves", "num_states"), WAVES.values(), ids=WAVES)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _carry_inputs(num_states):
    torch.manual_seed(0)
    return _random(num_states, 2, 3, 4), _random(num_states, 2, 1, 4)


def _walk_inputs(waves, num_states):
    torch.manual_seed(0)
    num_chunks = sum(waves) if waves else num_states + 1
    reads, writes = _random(num_states, 2, 4, 3), _random(num_states, 2, 4, 3)
    return _random(num_chunks, 2, 4, 2), reads, writes, _random(num_states, 2, 3, 1)


def _product_inputs():
    torch.manual_seed(0)
    cumulated = -torch.rand(2, 2, 8, 3, dtype=torch.float64).cumsum(2)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [2, 2, 3, 4, 4, 4, -1, -1]])
    return _random(2, 2, 2, 8, 3), _random(2, 2, 8, 3), cumulated.requires_grad_(), segments


@each_walk
def test_carrying_states_step_by_step(waves, num_states):
    written, carries = _carry_inputs(num_states)
    states: list[torch.Tensor] = []
    start = previous = 0
    for size in waves[1:] if waves else [1] * num_states:
        for row in range(size):
            taken = states[previous + row] * carries[start + row] if start else 0
            states.append(written[start + row] + taken)
        previous, start = start, start + size
    if states:
        torch.testing.assert_close(carry_states(written, carries, waves), torch.stack(states))


@each_walk
def test_gradients_of_carrying_states(waves, num_states):
    inputs = _carry_inputs(num_states)
    if num_states:
        assert torch.autograd.gradcheck(lambda *x: carry_states(*x, waves), inputs)
    torch.library.opcheck(carry_states, (*inputs, waves))


@each_walk
def test_gradients_of_the_delta_walk(waves, num_states):
    inputs = _walk_inputs(waves, num_states)
    if num_states:
        assert torch.autograd.gradcheck(lambda *x: delta_walk(*x, waves), inputs)
    torch.library.opcheck(delta_walk, (*inputs, waves))


def test_gradients_of_the_decayed_products():
    inputs = _product_inputs()
    assert torch.autograd.gradcheck(_decayed_products, inputs)
    torch.library.opcheck(_decayed_products, inputs)


def test_decayed_products_by_the_definition():
    rows, columns, cumulated, segments = _product_inputs()
    between = cumulated[:, :, :, None] - cumulated[:, :, None]  # [M, H, C, C, K]
    seen = (segments[:, :, None] == segments[:, None]).tril()[:, None, :, :, None]
    decays = between.masked_fill(~seen, -torch.inf).exp()
    expected = (rows[:, :, :, :, None] * columns[:, None, :, None] * decays[:, None]).sum(-1)
    torch.testing.assert_close(_decayed_products(rows, columns, cumulated, segments), expected)
