"""
Equal work for the ranks of one micro-step, and the room that rows must leave for it.

R ranks. Full rows differ in cost by the squares of their segments. A row that holds one long sample can only get as
cheap as the others if it holds fewer tokens, and the others must then have room for those.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from typing import Any, TypeAlias

import numpy as np

from .cost import FloatArray
from .packing import PackPlan

IntArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

# Rows whose cost is within this share of the mean are even enough.
_EVEN = 0.002
# What an exchange looks at: the longest segments of the costliest row, those of another row, the cheapest other rows.
_NUM_GIVEN, _NUM_TAKEN, _NUM_PARTNERS = 16, 48, 8


def least_headroom(lengths: IntArray, costs: FloatArray, token_budget: int) -> float:
    """
    Say how much of full rows must stay free so that rows of equal cost are possible.

    Args:
        lengths (`np.ndarray`):
            Tokens of each fragment, int64 of shape `[F]`.
        costs (`np.ndarray`):
            Cost of each fragment, float64 of shape `[F]`, at least its tokens.
        token_budget (`int`):
            Most tokens in a row.

    Returns:
        `float`: Share of the budget, in [0, 1). 0 where one fragment alone costs more than a mean row: no room in the
            others makes that row cheaper.
    """
    num_rows = -(-int(lengths.sum()) // token_budget)
    # The costliest fragments are in a row each, and full rows cost their tokens and at least that.
    excess = np.sort(costs - lengths)[::-1][:num_rows]
    target = max(costs.sum() / lengths.sum() * token_budget, costs.max())
    return float(np.maximum(token_budget + excess - target, 0).sum() / (num_rows * token_budget))


def equal_rows(plan: PackPlan, costs: FloatArray, rows: list[IntArray]) -> list[IntArray]:
    """
    Deal the fragments of the rows of one micro-step anew, so that the rows cost the same.

    Args:
        plan ([`PackPlan`]):
            Whose budget and lengths count.
        costs (`np.ndarray`):
            Cost of each fragment, float64 of shape `[F]`.
        rows (`list[np.ndarray]`):
            Fragment numbers of each rank's row, possibly none.

    Returns:
        `list[np.ndarray]`: The same fragments in as many rows, within the budget. The costliest row costs no more than
            before.
    """
    tokens = [int(plan.lengths[row].sum()) for row in rows]
    budget = plan.token_budget or max(tokens)
    fragments = np.concatenate(rows)
    most = plan.max_segments or fragments.size
    fragments = fragments[np.argsort(-plan.lengths[fragments], kind="stable")]
    lengths = plan.lengths[fragments].tolist()
    owners = _longest_first(lengths, costs[fragments].tolist(), len(rows), budget, most)
    if owners is not None:
        places = np.array(owners)
        heaviest = np.bincount(places, weights=costs[fragments], minlength=len(rows)).max()
        if heaviest < max(costs[row].sum() for row in rows):
            rows = [fragments[places == rank] for rank in range(len(rows))]
    return _exchanged(rows, plan.lengths, costs, budget, most)


def _longest_first(
    lengths: list[int], costs: list[float], num_rows: int, token_budget: int, max_segments: int
) -> list[int] | None:
    """
    Give each fragment, longest first, to the row with the lowest cost that has room for it.

    Returns the row of each fragment, or None if one fits nowhere. A row that is too full for the current fragment
    waits until fragments are short enough, so each step costs the logarithm of the rows.
    """
    rows: list[tuple[float, int]] = [(0.0, row) for row in range(num_rows)]
    waiting: list[tuple[int, float, int]] = []
    free = [token_budget] * num_rows
    room = [max_segments] * num_rows
    owners: list[int] = []
    for length, cost in zip(lengths, costs, strict=True):
        while waiting and -waiting[0][0] >= length:
            _, row_cost, row = heappop(waiting)
            heappush(rows, (row_cost, row))
        while rows and free[rows[0][1]] < length:
            row_cost, row = heappop(rows)
            heappush(waiting, (-free[row], row_cost, row))
        if not rows:
            return None
        row_cost, row = rows[0]
        owners.append(row)
        free[row] -= length
        room[row] -= 1
        if room[row]:
            heapreplace(rows, (row_cost + cost, row))
        else:
            heappop(rows)
    return owners


def _exchanged(
    rows: list[IntArray], lengths: IntArray, costs: FloatArray, token_budget: int, max_segments: int
) -> list[IntArray]:
    """
    Let the costliest row swap a segment for one or two of a cheap row, until that no longer helps.

    Two segments cost less than one of their joint length, so this evens out rows that are full.
    """
    rows = list(rows)
    totals = np.array([costs[row].sum() for row in rows])
    enough = totals.mean() * (1 + _EVEN)
    while True:
        heavy = int(np.argmax(totals))
        if totals[heavy] <= enough:
            return rows
        for light in np.argsort(totals, kind="stable")[:_NUM_PARTNERS].tolist():
            pair = _exchange(rows[heavy], rows[light], lengths, costs, token_budget, max_segments)
            if pair is not None:
                break
        else:
            return rows
        rows[heavy], rows[light] = pair
        totals[[heavy, light]] = [costs[row].sum() for row in pair]


def _exchange(
    heavy: IntArray, light: IntArray, lengths: IntArray, costs: FloatArray, token_budget: int, max_segments: int
) -> tuple[IntArray, IntArray] | None:
    """The two rows after the swap that leaves the costlier of them cheapest, None if none helps."""
    heavy, light = (row[np.argsort(-lengths[row], kind="stable")] for row in (heavy, light))
    num_taken = min(light.size, _NUM_TAKEN)
    # The number after the last stands for no second segment.
    first, second = np.triu_indices(num_taken + 1, 1)
    if heavy.size >= max_segments:
        first, second = first[second == num_taken], second[second == num_taken]

    def gained(values: Any) -> Any:
        taken = np.append(values[light[:num_taken]], 0)
        return (taken[first] + taken[second])[None] - values[heavy[:_NUM_GIVEN], None]

    tokens, cost = gained(lengths), gained(costs)
    fits = (lengths[heavy].sum() + tokens <= token_budget) & (lengths[light].sum() - tokens <= token_budget)
    heavy_cost = costs[heavy].sum()
    worst = np.where(fits, np.maximum(heavy_cost + cost, costs[light].sum() - cost), np.inf)
    if not worst.size or worst.min() >= heavy_cost * (1 - 1e-4):
        return None
    given, taken = np.unravel_index(np.argmin(worst), worst.shape)
    moved = [place for place in (first[taken], second[taken]) if place < num_taken]
    return (
        np.append(np.delete(heavy, given), light[moved]),
        np.append(np.delete(light, moved), heavy[given]),
    )
