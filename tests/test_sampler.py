"""Rows to ranks: everything exactly once, the same steps for every rank, equal work, and resuming without loss."""

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from trl_packing import PackingError, RankedBatchSampler, plan_packs
from trl_packing.balance import equal_rows, least_headroom
from trl_packing.cost import PairWork, RowCost
from trl_packing.packing import plan_batches

# Llama-8B (BASELINES.md): attention equals the linear work at 49k tokens.
LLAMA_8B = RowCost((PairWork("full", float("inf"), 2 * 2.04e-5),))
STEEP = RowCost((PairWork("full", float("inf"), 0.02),))


def mixed_lengths(num: int, longest: int = 1_000, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(np.rint(np.exp(rng.normal(np.log(100), 1, num))), 1, longest).astype(np.int64)


def samplers(lengths, num_ranks: int, budget: int = 1_000, epochs: int = 1, headroom: float = 0.0, **settings):
    """One sampler per rank, each with plans of its own, as in separate processes."""
    settings = {"row_cost": STEEP, "num_epochs": epochs, "num_ranks": num_ranks} | settings
    return [
        RankedBatchSampler(
            lambda epoch: plan_packs(lengths, budget, epoch=epoch, headroom=headroom), rank=rank, **settings
        )
        for rank in range(num_ranks)
    ]


def trained(ranks, epoch: int = 0) -> list[list[list[int]]]:
    """Fragment numbers by micro-step and rank, and the check that all ranks take as many steps as they said."""
    for sampler in ranks:
        sampler.set_epoch(epoch)
    rows = [list(sampler) for sampler in ranks]
    assert {len(of_rank) for of_rank in rows} == {len(ranks[0])}
    return [list(micro_step) for micro_step in zip(*rows, strict=True)]


def fragments_of(micro_steps) -> list[int]:
    return sorted(fragment for micro_step in micro_steps for row in micro_step for fragment in row)


# ---- nothing lost, nothing twice


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("accumulation", "window"), [(1, 1), (2, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize("balance", ["cost", "tokens", "none"])
def test_every_fragment_is_trained_once_on_one_rank(num_ranks, accumulation, window, balance):
    settings = {"gradient_accumulation_steps": accumulation, "balance": balance, "window": window}
    ranks = samplers(mixed_lengths(500), num_ranks, epochs=2, **settings)
    for epoch in range(2):
        micro_steps = trained(ranks, epoch)
        assert fragments_of(micro_steps) == list(range(500))
        lengths = ranks[0].plan(epoch).lengths
        assert max(lengths[row].sum() for micro_step in micro_steps for row in micro_step) <= 1_000
        # Only the last micro-step may leave a rank without a row.
        assert all(row for micro_step in micro_steps[:-1] for row in micro_step)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("num_samples", [1, 2, 3, 9])
@pytest.mark.parametrize("balance", ["cost", "none"])
def test_fewer_samples_than_ranks_and_one_more_than_a_multiple(num_ranks, num_samples, balance):
    settings = {"gradient_accumulation_steps": 2, "balance": balance}
    micro_steps = trained(samplers(np.full(num_samples, 600), num_ranks, **settings))
    assert fragments_of(micro_steps) == list(range(num_samples))
    assert len(micro_steps) == -(-num_samples // num_ranks)


def test_samples_that_fit_one_row_are_shared_out_among_the_ranks():
    micro_steps = trained(samplers(np.array([10, 20, 30]), 4))
    assert sorted(map(len, micro_steps[0])) == [0, 1, 1, 1]


def test_max_segments_holds_after_balancing():
    plan = plan_packs(mixed_lengths(400), 1_000, max_segments=6)
    ranks = [RankedBatchSampler(lambda _: plan, num_epochs=1, num_ranks=4, rank=rank) for rank in range(4)]
    micro_steps = trained(ranks)
    assert fragments_of(micro_steps) == list(range(400))
    assert max(len(row) for micro_step in micro_steps for row in micro_step) == 6


def test_all_epochs_have_the_rows_of_the_one_that_needs_most():
    # Case 37: the Trainer reads the length once, so a longer epoch would lose its last rows.
    lengths = np.random.default_rng(0).integers(64, 2_049, size=400)
    ranks = samplers(lengths, 2, budget=4_096, epochs=6, balance="none")
    rows = [plan_packs(lengths, 4_096, epoch=epoch).num_bins for epoch in range(6)]
    assert len(set(rows)) > 1
    assert ranks[0].num_rows == max(rows)
    for epoch in range(6):
        micro_steps = trained(ranks, epoch)
        assert sum(bool(row) for micro_step in micro_steps for row in micro_step) == max(rows)
        assert fragments_of(micro_steps) == list(range(400))


# ---- what a step trains on


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("balance", ["cost", "tokens"])
def test_balancing_does_not_change_what_an_optimiser_step_trains_on(accumulation, balance):
    lengths = mixed_lengths(600)
    settings = {"gradient_accumulation_steps": accumulation, "headroom": 0.01}
    plain = trained(samplers(lengths, 4, balance="none", **settings))
    balanced = trained(samplers(lengths, 4, balance=balance, **settings))
    assert plain != balanced
    for start in range(0, len(plain), accumulation):
        step = slice(start, start + accumulation)
        assert fragments_of(plain[step]) == fragments_of(balanced[step])


def test_without_balance_rows_go_round_the_ranks_in_plan_order():
    plan = plan_batches(np.full(10, 5), 2, order=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    ranks = [RankedBatchSampler(lambda _: plan, num_epochs=1, num_ranks=2, rank=r, balance="none") for r in range(2)]
    assert trained(ranks) == [[[9, 8], [7, 6]], [[5, 4], [3, 2]], [[1, 0], []]]


def test_one_rank_trains_the_plan_as_it_is():
    sampler = samplers(mixed_lengths(200), 1, gradient_accumulation_steps=4)[0]
    assert list(sampler) == [row.tolist() for row in plan_packs(mixed_lengths(200), 1_000).bins]


def test_batches_keep_their_size_and_their_longest_row_when_balanced():
    lengths = mixed_lengths(64)
    plan = plan_batches(lengths, 4, order=np.arange(64))
    ranks = [
        RankedBatchSampler(lambda _: plan, num_epochs=1, num_ranks=4, rank=rank, row_cost=STEEP) for rank in range(4)
    ]
    for number, micro_step in enumerate(trained(ranks)):
        rows = plan.bins[4 * number : 4 * number + 4]
        assert [len(row) for row in micro_step] == [4, 4, 4, 4]
        assert max(lengths[row].sum() for row in micro_step) <= max(lengths[row].sum() for row in rows)


def test_a_window_exchanges_rows_between_its_own_steps_only():
    settings = {"gradient_accumulation_steps": 2, "headroom": 0.01}
    lengths = mixed_lengths(2_000)
    plain = trained(samplers(lengths, 4, balance="none", **settings))
    dealt = trained(samplers(lengths, 4, window=3, **settings))
    changed = 0
    for start in range(0, len(plain), 6):
        window = slice(start, start + 6)
        assert fragments_of(plain[window]) == fragments_of(dealt[window])
        changed += fragments_of(plain[window][:2]) != fragments_of(dealt[window][:2])
    assert changed > 3


# ---- equal work


@pytest.mark.parametrize("balance", ["cost", "tokens"])
@pytest.mark.parametrize("seed", range(4))
def test_balancing_never_makes_ranks_wait_longer(balance, seed):
    settings = {"balance": balance, "gradient_accumulation_steps": 1 + seed, "headroom": 0.01 * (seed % 2)}
    before, after = samplers(mixed_lengths(800, seed=seed), 8, **settings)[0].idle(0)
    assert 0 <= after < before < 1


def long_rows(name: str) -> np.ndarray:
    """The chat and long-tail mixes of BASELINES.md."""
    rng = np.random.default_rng(0)
    if name == "chat":
        median, sigma = np.array([[120, 900, 3_000], [0.8, 0.7, 0.6]])[:, rng.choice(3, 6_000, p=[0.5, 0.35, 0.15])]
        return np.clip(median * np.exp(sigma * rng.normal(size=6_000)), 8, 16_384).astype(np.int64)
    heavy = 2_000 * (1 + rng.pareto(1.1, 32_000))
    body = 300 * np.exp(rng.normal(size=32_000))
    return np.clip(np.where(rng.random(32_000) < 0.1, heavy, body), 8, 32_768).astype(np.int64)


@pytest.mark.parametrize(
    ("name", "accumulation", "window", "most_before", "most_after"),
    [("chat", 1, 1, 0.07, 0.015), ("longtail", 4, 1, 0.25, 0.06), ("longtail", 4, 4, 0.25, 0.02)],
)
def test_idle_time_at_64_ranks_stays_below_its_limit(name, accumulation, window, most_before, most_after):
    lengths = long_rows(name)
    headroom = least_headroom(lengths, LLAMA_8B.per_segment(lengths), 32_768)
    settings = {"gradient_accumulation_steps": accumulation, "window": window, "row_cost": LLAMA_8B}
    sampler = samplers(lengths, 64, budget=32_768, headroom=headroom, **settings)[0]
    assert sampler.plan(0).fill_rate > (0.993 if name == "chat" else 0.998)
    before, after = sampler.idle(0, max(2, window))
    assert before > most_before
    assert after <= most_after


def test_full_rows_are_evened_out_by_exchanging_segments():
    # Both rows are full. Their squares sum to 44 and 24, and to 26 and 42 with the 6 against 3 and 3.
    plan = plan_batches([6, 2, 2, 3, 3, 1, 1, 2], 8, order=range(8))
    costs = plan.lengths.astype(float) ** 2
    plan = replace(plan, token_budget=10)
    first, second = equal_rows(plan, costs, [np.array([0, 1, 2]), np.array([3, 4, 5, 6, 7])])
    assert sorted([*first, *second]) == list(range(8))
    assert plan.lengths[first].sum() == plan.lengths[second].sum() == 10
    assert max(costs[first].sum(), costs[second].sum()) < 44


@pytest.mark.parametrize("budget", [300, 1_000])
@pytest.mark.parametrize("max_segments", [None, 6])
def test_dealing_rows_anew_keeps_the_samples_and_the_limits(budget, max_segments):
    plan = plan_packs(mixed_lengths(900, longest=250), budget, max_segments=max_segments)
    costs = STEEP.per_segment(plan.lengths)
    for start in range(0, plan.num_bins, 7):
        rows = [*plan.bins[start : start + 7], np.empty(0, dtype=np.int64)]
        dealt = equal_rows(plan, costs, rows)
        assert len(dealt) == len(rows)
        assert sorted(np.concatenate(dealt)) == sorted(np.concatenate(rows))
        assert max(plan.lengths[row].sum() for row in dealt) <= budget
        assert max(row.size for row in dealt) <= (max_segments or 900)
        assert max(costs[row].sum() for row in dealt) <= max(costs[row].sum() for row in rows)


@pytest.mark.parametrize(
    ("lengths", "headroom"),
    [
        ([10] * 90, 0.0),
        ([10] * 900 + [20], None),
        # Alone in its row, the 30 costs more than a mean row already.
        ([1] * 900 + [30], 0.0),
    ],
    ids=["equal", "one_long", "too_long"],
)
def test_headroom_is_what_the_costliest_samples_need(lengths, headroom):
    lengths = np.array(lengths)
    costs = lengths + 0.1 * lengths.astype(float) ** 2
    found = least_headroom(lengths, costs, 30)
    if headroom is not None:
        assert found == headroom
        return
    # The row of the long one costs 30 + 0.1 * 400, a mean row about 30 + 3 * 0.1 * 100.
    mean = costs.sum() / lengths.sum() * 30
    assert found == pytest.approx((30 + 0.1 * 400 - mean) / (301 * 30))


def test_any_function_of_a_row_can_be_its_cost():
    lengths = mixed_lengths(300)
    by_function = samplers(lengths, 4, row_cost=lambda row: float((row + 0.01 * row.astype(float) ** 2).sum()))
    assert trained(by_function) == trained(samplers(lengths, 4))


def test_cost_and_tokens_balance_different_things():
    lengths = mixed_lengths(300)
    assert trained(samplers(lengths, 4)) != trained(samplers(lengths, 4, balance="tokens"))


# ---- the loader's contract


def test_the_schedule_and_the_trained_plan_tell_what_the_ranks_get():
    ranks = samplers(mixed_lengths(333), 4, gradient_accumulation_steps=2)
    plan, schedule = ranks[2].trained_plan(0), ranks[1].schedule(0)
    rows = [[plan.bins[number].tolist() if number >= 0 else [] for number in numbers] for numbers in schedule]
    assert rows == trained(ranks)
    assert plan.num_planned_tokens == ranks[0].plan(0).num_planned_tokens


def test_the_epoch_is_the_one_set_when_the_iteration_began():
    sampler = samplers(mixed_lengths(200), 1, epochs=2)[0]
    first_epoch = list(sampler)
    rows = iter(sampler)
    sampler.set_epoch(1)
    assert list(rows) == first_epoch
    assert list(sampler) != first_epoch


def test_there_is_no_batch_size_that_accelerate_would_cut_by():
    assert not hasattr(samplers(np.array([5]), 1)[0], "batch_size")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ranks": 2, "rank": 2}, "`rank` must be from 0 to 1, but it is 2"),
        ({"num_ranks": 0}, "`num_ranks` must be at least 1"),
        ({"num_epochs": 0}, "`num_epochs` must be at least 1"),
        ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be at least 1"),
        ({"balance": "flops"}, "`balance` must be one of cost, tokens, none, but it is 'flops'"),
        ({"window": 4}, "`window` is 4 and `gradient_accumulation_steps` is 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_are_named(settings, message):
    with pytest.raises(PackingError, match=message):
        RankedBatchSampler(lambda epoch: plan_packs([1], 1), **({"num_epochs": 1} | settings))


# ---- resuming


@pytest.mark.parametrize("epoch", [0, 2])
def test_skipping_batches_goes_on_with_the_same_rows(epoch):
    ranks = samplers(mixed_lengths(400), 2, epochs=3)
    whole = trained(ranks, epoch)
    again = samplers(mixed_lengths(400), 2, epochs=3)
    for sampler in again:
        sampler.set_epoch(epoch)
    rest = [list(islice(sampler, 5, None)) for sampler in again]
    assert [list(micro_step) for micro_step in zip(*rest, strict=True)] == whole[5:]


@pytest.mark.parametrize(("before", "after"), [((1, 2), (2, 2)), ((2, 2), (1, 3)), ((2, 1), (3, 4)), ((4, 3), (3, 1))])
@pytest.mark.parametrize(("balance", "window"), [("cost", 1), ("none", 1), ("cost", 2)])
@pytest.mark.parametrize("epoch", [0, 1])
def test_another_number_of_ranks_or_accumulation_trains_what_is_left(before, after, balance, window, epoch):
    def sampler(ranks, accumulation):
        settings = {"gradient_accumulation_steps": accumulation, "balance": balance, "epochs": 2}
        return samplers(mixed_lengths(600), ranks, window=window if accumulation > 1 else 1, **settings)

    num_steps = -(-len(sampler(*before)[0]) // before[1])
    for steps in {0, 1, 2, 3, num_steps - 1, num_steps} if window == 1 else {0, 2}:
        old, new, third = sampler(*before), sampler(*after), sampler(*before)
        # What the first run trained, up to the end of a step.
        seen = fragments_of(trained(old, epoch)[: before[1] * steps])
        done = old[0].num_fragments_trained(epoch, before[1] * steps)
        assert done == len(seen)
        for rank in new:
            rank.skip(epoch, done)
        rest = trained(new, epoch)
        assert sorted(seen + fragments_of(rest)) == list(range(600))
        assert all(any(micro_step) for micro_step in rest[new[0].num_fillers(epoch) :])
        # The other epoch is whole, and what is left can be interrupted again.
        assert fragments_of(trained(new, 1 - epoch)) == list(range(600))
        if window == 1:
            stop = min(-(-(new[0].num_fillers(epoch) + 1) // after[1]) * after[1], len(new[0]))
            again = new[0].num_fragments_trained(epoch, stop)
            seen += fragments_of(rest[:stop])
            assert again == len(seen)
            for rank in third:
                rank.skip(epoch, again)
            assert sorted(seen + fragments_of(trained(third, epoch))) == list(range(600))


def test_skipping_an_epoch_does_not_move_the_ends_of_its_steps():
    (sampler,) = samplers(mixed_lengths(600), 1, gradient_accumulation_steps=4)
    length = len(sampler)
    for num_fragments in range(0, 600, 37):
        sampler.skip(0, num_fragments)
        assert len(sampler) == len(list(sampler)) == length
        steps = [len(step) for step in sampler.steps(0)]
        assert steps[1:-1] == [4] * (len(steps) - 2)
        assert len(steps) < 2 or steps[-1] == (length % 4 or 4)


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_place_after_the_last_epoch_needs_no_plan(epochs):
    """The epoch after the last one may need more rows than those that are trained."""
    needs_more = 0
    for seed in range(16):
        lengths = np.random.default_rng(seed).integers(12, 120, 120)
        (sampler,) = samplers(lengths, 1, budget=128, epochs=epochs)
        needs_more += sampler.plan_for_epoch(epochs).num_bins > sampler.num_rows
        assert sampler.num_fragments_trained(epochs, 0) == 0
        assert sampler.num_fragments_trained(epochs - 1, len(sampler)) == 120
    assert needs_more


def test_equal_fingerprints_mean_equal_rows_and_a_difference_is_named():
    lengths = mixed_lengths(300)
    base = samplers(lengths, 2)[0].fingerprint()
    assert base == json.loads(json.dumps(samplers(lengths, 2)[1].fingerprint()))

    def differences(**changes) -> set[str]:
        other = samplers(**({"lengths": lengths, "num_ranks": 2} | changes))[0].fingerprint()
        return {name for name in base if base[name] != other[name]}

    assert differences(num_ranks=3) == {"num_ranks"}
    assert differences(balance="none") == {"balance", "cost"}
    assert differences(seed=1) == {"seed"}
    assert differences(row_cost=LLAMA_8B) == {"cost"}
    assert "token_budget" in differences(budget=1_100)
    assert differences(lengths=np.append(lengths[1:], lengths[0])) >= {"lengths", "bins"}
    assert differences(lengths=lengths[:-1]) >= {"num_fragments", "num_tokens", "lengths"}
    assert differences(gradient_accumulation_steps=2) == {"gradient_accumulation_steps"}
