"""The pack plan: every sample exactly once, no row over budget, every lost token counted, the same plan everywhere."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from trl_packing import PackingError, plan_packs
from trl_packing.packing import Bins, plan_batches, split_bins

ORDERS = ["shuffled", "best_fit"]


def random_lengths(num: int, seed: int = 0, longest: int = 4096) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(np.rint(np.exp(rng.normal(np.log(180), 1, num))), 1, longest).astype(np.int64)


def textbook_best_fit(lengths: np.ndarray, budget: int) -> int:
    """Best-fit decreasing as it is defined: one sample at a time, into the fullest row with room."""
    free: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [row for row, space in enumerate(free) if space >= length]
        if not fitting:
            free.append(budget)
            fitting = [len(free) - 1]
        free[min(fitting, key=free.__getitem__)] -= length
    return len(free)


def cluster(plan) -> float:
    """1 for rows filled at random, larger where samples of like length share rows (BASELINES.md)."""
    z = np.log(plan.lengths)
    z = (z - z.mean()) / z.std()
    return float((plan.sum_over_bins(z) ** 2 / plan.bins.sizes).mean())


def assert_partition(plan) -> None:
    assert sorted(plan.bins.flat.tolist()) == list(range(plan.num_fragments))
    assert (plan.bins.sizes > 0).all()
    if plan.token_budget:
        assert plan.bin_tokens.max() <= plan.token_budget
    if plan.max_segments:
        assert plan.bins.sizes.max() <= plan.max_segments


# ---- what every plan keeps


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(6))
def test_every_sample_is_in_exactly_one_row_and_no_row_is_over_budget(order, seed):
    rng = np.random.default_rng(seed)
    budget = int(rng.integers(1, 600))
    lengths = rng.integers(1, budget + 1, size=int(rng.integers(1, 800)))
    max_segments = [None, 1, 3][seed % 3]
    plan = plan_packs(lengths, budget, order=order, seed=seed, max_segments=max_segments)
    assert_partition(plan)
    assert plan.num_bins <= lengths.size
    assert plan.num_planned_tokens == plan.num_tokens == lengths.sum()
    assert np.array_equal(plan.fragments, np.stack([np.arange(lengths.size), np.zeros_like(lengths), lengths], axis=1))


@pytest.mark.parametrize("lengths", [[7], [1], [1, 1, 1, 1], [8], [8, 8], [1, 8, 1], [5, 3], [5, 4]], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_small_plans_are_right(lengths, order):
    plan = plan_packs(lengths, 8, order=order)
    assert_partition(plan)
    assert plan.num_bins == textbook_best_fit(np.array(lengths), 8)
    assert plan.fill_rate == sum(lengths) / (8 * plan.num_bins)


@pytest.mark.parametrize("order", ORDERS)
def test_lengths_beyond_16_bits_are_sorted_right(order):
    lengths = np.random.default_rng(0).integers(1, 131_073, size=500)
    plan = plan_packs(lengths, 131_072, order=order)
    assert_partition(plan)
    if order == "best_fit":
        assert plan.num_bins == textbook_best_fit(lengths, 131_072)


@pytest.mark.parametrize("seed", range(8))
def test_best_fit_has_as_many_rows_as_the_textbook_loop(seed):
    rng = np.random.default_rng(seed)
    budget = int(rng.integers(10, 300))
    lengths = rng.integers(1, int(rng.integers(2, budget + 1)), size=int(rng.integers(50, 600)))
    assert plan_packs(lengths, budget, order="best_fit").num_bins == textbook_best_fit(lengths, budget)


@pytest.mark.parametrize("budget", [4_096, 8_192, 32_768])
def test_best_fit_rows_are_within_a_thousandth_of_the_lower_bound(budget):
    lengths = random_lengths(20_000)
    plan = plan_packs(lengths, budget, order="best_fit")
    assert plan.num_bins <= 1.001 * -(-lengths.sum() // budget) + 1


def test_shuffled_rows_are_full_and_of_random_composition():
    lengths = random_lengths(20_000)
    shuffled, best_fit = plan_packs(lengths, 4_096), plan_packs(lengths, 4_096, order="best_fit")
    assert shuffled.fill_rate > 0.998
    assert 0.8 < cluster(shuffled) < 1.2
    assert cluster(best_fit) > 5


def test_long_rows_do_not_collect_the_short_samples():
    # Plain best fit closes long rows with every short sample that comes: 1.28 here.
    rng = np.random.default_rng(0)
    medians, sigmas = np.array([[120, 900, 3_000], [0.8, 0.7, 0.6]])[:, rng.choice(3, 40_000, p=[0.5, 0.35, 0.15])]
    lengths = np.clip(medians * np.exp(sigmas * rng.normal(size=40_000)), 8, 16_384).astype(np.int64)
    assert cluster(plan_packs(lengths, 32_768)) < 1.1


def test_rows_come_in_random_order():
    # Best fit opens rows from the longest sample on, so that in its own order the first steps would see those only.
    plan = plan_packs(random_lengths(5_000), 4_096, order="best_fit")
    assert abs(np.corrcoef(np.arange(plan.num_bins), plan.bins.sizes)[0, 1]) < 0.3


# ---- the same everywhere


@pytest.mark.parametrize(
    ("order", "bins"),
    [
        ("shuffled", [[1, 8, 4], [2, 6], [0, 3, 7], [5]]),
        ("best_fit", [[2, 3], [4, 5], [0, 8, 6], [7, 1]]),
    ],
)
def test_a_plan_is_the_same_on_every_machine(order, bins):
    # Literals, so that a numpy whose generator differs is noticed: resuming on it would repeat and lose samples.
    plan = plan_packs([5, 1, 7, 3, 6, 4, 2, 2, 3], 10, order=order, seed=3, epoch=2)
    assert [row.tolist() for row in plan.bins] == bins


@pytest.mark.parametrize("order", ORDERS)
def test_another_epoch_or_seed_groups_anew_with_the_same_fragments(order):
    lengths = random_lengths(500, longest=700)
    plans = [
        plan_packs(lengths, 512, order=order, overlong="split", seed=seed, epoch=epoch)
        for seed, epoch in [(0, 0), (0, 0), (0, 1), (1, 0)]
    ]
    assert plans[0].bins == plans[1].bins
    assert all(plan.bins != plans[0].bins for plan in plans[2:])
    assert all(np.array_equal(plan.fragments, plans[0].fragments) for plan in plans)


def test_the_callers_lengths_are_neither_changed_nor_kept():
    for longest in (8, 9):
        lengths = np.array([5, longest, 2])
        plan = plan_packs(lengths, 8)
        assert lengths.tolist() == [5, longest, 2]
        lengths[:] = 1
        assert plan.lengths.tolist() == [5, 8, 2]


def test_planning_needs_no_torch():
    code = "import sys, trl_packing.sampler, trl_packing.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_loads_nothing_large():
    large = "{'torch', 'transformers', 'trl', 'datasets', 'numpy'}"
    code = f"import sys, trl_packing; sys.exit(' '.join({large} & set(sys.modules)) or 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- overlong samples


@pytest.mark.parametrize(
    ("overlong", "fragments", "counts"),
    [
        ("truncate", [(0, 0, 10), (1, 0, 4096), (2, 0, 20)], {"num_cut_samples": 1, "num_cut_tokens": 4_904}),
        (
            "split",
            [(0, 0, 10), (1, 0, 4096), (1, 4096, 4096), (1, 8192, 808), (2, 0, 20)],
            {"num_split_samples": 1},
        ),
        ("drop", [(0, 0, 10), (2, 0, 20)], {"num_dropped_samples": 1, "num_dropped_tokens": 9_000}),
    ],
    ids=["truncate", "split", "drop"],
)
@pytest.mark.parametrize("order", ORDERS)
def test_every_token_of_an_overlong_sample_is_accounted_for(overlong, fragments, counts, order):
    plan = plan_packs([10, 9_000, 20], 4_096, overlong=overlong, order=order)
    assert_partition(plan)
    assert [tuple(fragment) for fragment in plan.fragments.tolist()] == fragments
    names = ["num_cut_samples", "num_cut_tokens", "num_split_samples", "num_dropped_samples", "num_dropped_tokens"]
    assert {name: getattr(plan, name) for name in names} == dict.fromkeys(names, 0) | counts
    assert plan.num_tokens == plan.num_planned_tokens + plan.num_cut_tokens + plan.num_dropped_tokens == 9_030


def test_overlong_error_names_the_sample_and_its_length():
    with pytest.raises(PackingError, match=r"sample 1 has 9000.*overlong"):
        plan_packs([10, 9_000, 20], 4_096, overlong="error")
    assert plan_packs([10, 4_096], 4_096, overlong="error").num_fragments == 2


def test_keep_end_keeps_the_end():
    plan = plan_packs([3, 9, 5], 8, max_length=4, truncation="keep_end")
    assert plan.fragments.tolist() == [[0, 0, 3], [1, 5, 4], [2, 1, 4]]
    assert (plan.num_cut_samples, plan.num_cut_tokens) == (2, 6)


def test_max_length_is_per_sample_and_rows_still_fill_to_the_budget():
    plan = plan_packs([9, 9, 9, 9], 8, max_length=4)
    assert plan.lengths.tolist() == [4, 4, 4, 4]
    assert plan.num_bins == 2


# ---- samples without a trained label


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
def test_excluded_samples_are_left_out_and_counted_apart(overlong):
    exclude = np.array([False, True, False, True])
    plan = plan_packs([10, 9_000, 5_000, 0], 4_096, overlong=overlong, exclude=exclude)
    assert set(plan.fragments[:, 0].tolist()) <= {0, 2}
    assert (plan.num_masked_samples, plan.num_masked_tokens) == (2, 9_000)
    lost = plan.num_cut_tokens + plan.num_dropped_tokens + plan.num_masked_tokens
    assert plan.num_planned_tokens + lost == plan.num_tokens == 14_010


def test_nothing_left_to_train_on_is_an_error():
    with pytest.raises(PackingError, match="2 have no trained label and 1 are overlong"):
        plan_packs([5, 5, 50], 8, overlong="drop", exclude=np.array([True, True, False]))
    with pytest.raises(PackingError, match="of 0 samples"):
        plan_packs([], 8)


# ---- headroom


@pytest.mark.parametrize("order", ORDERS)
def test_headroom_stays_free_unless_one_fragment_needs_it(order):
    lengths = np.append(random_lengths(3_000, longest=1_000), [1_000, 995])
    plan = plan_packs(lengths, 1_000, order=order, headroom=0.02)
    assert_partition(plan)
    alone = plan.bins.sizes == 1
    assert plan.bin_tokens[~alone].max() <= 980
    assert plan.bin_tokens[alone].max() == 1_000


# ---- splitting bins


def test_split_bins_reaches_every_number_of_rows_up_to_one_per_fragment():
    plan = plan_packs(random_lengths(60, longest=300), 300)
    for num_bins in range(plan.num_bins, plan.num_fragments + 1):
        split = split_bins(plan, num_bins)
        assert split.num_bins == num_bins
        assert_partition(split)
        assert np.array_equal(split.bins.flat, plan.bins.flat)
        assert set(plan.bins.offsets) <= set(split.bins.offsets)


def test_split_bins_halves_the_fullest_bin():
    plan = replace(plan_packs([2, 2, 2, 2, 2, 5], 9), bins=Bins.from_arrays([[0], [1, 2, 3, 4], [5]]))
    assert [row.tolist() for row in split_bins(plan, 4).bins] == [[0], [1, 2], [3, 4], [5]]


@pytest.mark.parametrize("num_bins", [1, 7])
def test_split_bins_refuses_what_is_impossible(num_bins):
    plan = plan_packs([4, 4, 4, 4, 4, 4], 8)
    with pytest.raises(PackingError, match="3 bins and 6 fragments cannot be split into"):
        split_bins(plan, num_bins)


def test_without_leaves_out_fragments_and_empty_rows_only():
    plan = plan_packs([4, 4, 4, 4], 8)
    first, second = (row.tolist() for row in plan.bins)
    left = plan.without([*first, second[0]])
    assert [row.tolist() for row in left.bins] == [[second[1]]]
    assert left.num_planned_tokens == 4
    assert plan.without(range(4)).num_bins == 0
    assert plan.without(range(4)).fill_rate == 1.0


# ---- batches of a given order


def test_batches_are_consecutive_samples_of_the_order():
    plan = plan_batches([4, 3, 2, 6, 1], 2, order=[4, 2, 0, 1, 3])
    assert [row.tolist() for row in plan.bins] == [[4, 2], [0, 1], [3]]
    assert (plan.token_budget, plan.fill_rate) == (0, 1.0)


def test_batches_skip_excluded_samples_and_keep_split_ones_in_sequence():
    exclude = np.array([False, True, False, False])
    plan = plan_batches([4, 3, 7, 2], 2, order=[2, 1, 3, 0], max_length=3, overlong="split", exclude=exclude)
    spans = [[tuple(plan.fragments[number]) for number in row] for row in plan.bins]
    assert spans == [[(2, 0, 3), (2, 3, 3)], [(2, 6, 1), (3, 0, 2)], [(0, 0, 3), (0, 3, 1)]]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, -1], [0, 1, 2, 2]], ids=str)
def test_an_order_that_loses_or_doubles_samples_is_refused(order):
    with pytest.raises(PackingError, match="each of the 3 sample numbers once"):
        plan_batches([4, 3, 2], 2, order=order)


# ---- wrong arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [3, 0, 2]}, r"`lengths\[1\]` is 0.*dataset.filter"),
        ({"lengths": [3, 0, 2], "exclude": np.array([True, False, False])}, r"`lengths\[1\]` is 0"),
        ({"lengths": [[3, 1]]}, r"`lengths` must be a flat sequence of integers, but its shape is \[1, 2\]"),
        ({"lengths": [3.5]}, "its dtype is float64"),
        ({"token_budget": 0}, "`token_budget` must be an integer of at least 1, but it is 0"),
        ({"token_budget": 8.0}, "`token_budget` must be an integer"),
        ({"max_length": 0}, "`max_length`"),
        ({"max_length": 9}, "`max_length` is 9 and `token_budget` is 8"),
        ({"max_segments": 0}, "`max_segments`"),
        ({"order": "random"}, "`order` must be one of shuffled, best_fit, but it is 'random'"),
        ({"overlong": "cut"}, "`overlong` must be one of truncate, split, drop, error"),
        ({"truncation": "keep_middle"}, "`truncation` must be one of keep_start, keep_end"),
        ({"seed": -1}, "must not be negative, but they are -1 and 0"),
        ({"headroom": 1.0}, r"`headroom` is a share in \[0, 1\)"),
        ({"exclude": np.array([0, 1, 0])}, "its dtype is int64"),
        ({"exclude": np.array([True])}, r"its shape is \[1\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_are_named(changes, message):
    arguments = {"lengths": [3, 4, 2], "token_budget": 8} | changes
    with pytest.raises(PackingError, match=message):
        plan_packs(**arguments)


def test_bins_are_a_sequence_of_int64_arrays():
    bins = Bins.from_arrays([[1, 2], [0]])
    assert (len(bins), bins[-1].tolist(), bins[0].dtype) == (2, [0], np.int64)
    assert [row.tolist() for row in bins[:1]] == [[1, 2]]
    assert repr(bins) == "Bins(2 bins of 3 fragments)"
    with pytest.raises(IndexError):
        bins[2]
