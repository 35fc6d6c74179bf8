"""
How long ranks wait for each other: a simulation at 8, 64 and 512 ranks, and a timed run of real processes.

    python benchmarks/balance.py             the simulation
    python benchmarks/balance.py --timed 4   then gloo processes that work through real rows
    python benchmarks/balance.py --headroom  what room in rows costs and brings, against the least idle possible

Idle is 1 - mean / max over ranks that meet after every micro-step (FSDP), with the costs of Llama-8B: a row's tokens
plus 2.04e-5 times the sum of its squared segment lengths. "before" is TRL's bfd (windows of 1,000 samples) and our
plan in its own order; "after" is the plan as `RankedBatchSampler` deals it out. The exit code is 1 if a limit is
broken.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from distributions import draw
from packers import cluster

from trl_packing import PackPlan, RankedBatchSampler, plan_packs
from trl_packing.balance import least_headroom
from trl_packing.cost import RowCost
from trl_packing.packing import Bins
from trl_packing.packing.fill import best_fit_decreasing

LLAMA_8B = RowCost.from_config(
    SimpleNamespace(
        model_type="llama",
        hidden_size=4_096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
    )
)
CASES = [
    ("lognormal", 4_096, 1),
    ("chat", 8_192, 1),
    ("chat", 32_768, 1),
    ("longtail", 32_768, 1),
    ("longtail", 32_768, 4),
    ("longtail128", 131_072, 4),
]
# Most idle share by lengths, budget, accumulation and window, at 64 ranks and at the other numbers of ranks.
LIMITS = {("chat", 32_768, 1, 1): 0.015, ("longtail", 32_768, 4, 1): 0.06, ("longtail", 32_768, 4, 4): 0.02}
# Times that the timed run takes turns.
ROUNDS = 5
# None stands for what `TrainPlan` leaves free.
HEADROOMS = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, None)


@dataclass
class Result:
    """Idle shares of one case and the cost of balancing it."""

    lengths: str
    budget: int
    ranks: int
    accumulation: int
    window: int
    headroom: float
    trl: float
    before: float
    after: float
    bound: float | None
    fill: float
    rows: int
    cluster: float
    step_variance: float
    ms_per_step: float


def trl_plan(lengths: np.ndarray[Any, Any], budget: int) -> PackPlan:
    """Best-fit decreasing in windows of 1,000 samples, as TRL packs, in shuffled order, as its rows are trained."""
    rng = np.random.default_rng(0)
    bins: list[np.ndarray[Any, Any]] = []
    for start in range(0, lengths.size, 1_000):
        flat, offsets = best_fit_decreasing(lengths[start : start + 1_000], budget, 2**62, rng)
        bins += [start + numbers for numbers in Bins(flat, offsets)]
    plan = plan_packs(lengths, budget)
    return PackPlan(plan.pieces, [bins[number] for number in rng.permutation(len(bins))], budget)


def samples_for(name: str, budget: int, rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw enough samples to fill that many rows."""
    mean = np.minimum(draw(name, 20_000, seed=1), budget).mean()
    return np.minimum(draw(name, int(rows * budget / mean) + 1_000), budget)


def step_variance(sampler: RankedBatchSampler, num_steps: int) -> float:
    """Variance between optimiser steps of the cost of a token, against the plan's own steps."""
    plan = sampler.plan(0)
    costs = LLAMA_8B.per_segment(plan.lengths)
    dealt = []
    for _, step in zip(range(num_steps), sampler.steps(0), strict=False):
        fragments = np.concatenate([row for micro_step in step for row in micro_step])
        dealt.append(costs[fragments].sum() / plan.lengths[fragments].sum())
    num_rows = num_steps * sampler.num_ranks * sampler.gradient_accumulation_steps
    own_costs = plan.sum_over_bins(costs)[:num_rows].reshape(num_steps, -1).sum(axis=1)
    own = own_costs / plan.bin_tokens[:num_rows].reshape(num_steps, -1).sum(axis=1)
    return float(np.var(dealt) / np.var(own))


def simulate(
    name: str, budget: int, ranks: int, accumulation: int, window: int, headroom: float | None = None
) -> Result:
    """Deal out some steps of one case and compare with TRL's rows. Without `headroom`, rows leave what is needed."""
    num_steps = max(24 * 64 // (accumulation * ranks), window, 2)
    num_steps -= num_steps % window
    lengths = samples_for(name, budget, int(1.05 * ranks * accumulation * num_steps) + 8)
    if headroom is None:
        headroom = least_headroom(lengths, LLAMA_8B.per_segment(lengths), budget)
    plan = plan_packs(lengths, budget, headroom=headroom)
    sampler = dealt(plan, ranks, accumulation, window)
    start = time.process_time()
    before, after = sampler.idle(0, num_steps)
    seconds = time.process_time() - start
    return Result(
        lengths=name,
        budget=budget,
        ranks=ranks,
        accumulation=accumulation,
        window=window,
        headroom=headroom,
        trl=in_order(trl_plan(lengths, budget), ranks, num_steps * accumulation),
        before=before,
        after=after,
        bound=least_idle(plan, ranks, num_steps) if accumulation == 1 else None,
        fill=plan.fill_rate,
        rows=plan.num_bins,
        cluster=cluster(plan),
        step_variance=step_variance(sampler, num_steps),
        ms_per_step=1e3 * seconds / num_steps,
    )


def least_idle(plan: PackPlan, ranks: int, num_steps: int) -> float:
    """
    Give a lower bound of the idle share for any dealing that leaves each step its samples.

    Some row must hold the step's costliest segment, another one the second, and so on. A row costs its tokens and at
    least that segment's squares, so if no row is to cost more than M, the rows have room for the sum of
    min(budget, M - squares) tokens. The bound is the least M with room for the step's tokens, against the mean.
    """
    costs = LLAMA_8B.per_segment(plan.lengths)
    means, most = [], []
    for step in range(num_steps):
        fragments = np.concatenate(plan.bins[step * ranks : (step + 1) * ranks])
        tokens, mean = plan.lengths[fragments].sum(), costs[fragments].sum() / ranks
        squares = np.sort(costs[fragments] - plan.lengths[fragments])[::-1][:ranks]
        low, high = max(mean, costs[fragments].max()), costs[fragments].sum()
        while high - low > 1e-5 * mean:
            middle = (low + high) / 2
            has_room = np.minimum(plan.token_budget, middle - squares).sum() >= tokens
            low, high = (low, middle) if has_room else (middle, high)
        means.append(mean)
        most.append(low)
    return float(1 - sum(means) / sum(most))


def dealt(plan: PackPlan, ranks: int, accumulation: int = 1, window: int = 1, **settings: Any) -> RankedBatchSampler:
    """The sampler of one rank for one epoch."""
    return RankedBatchSampler(
        lambda _: plan,
        num_epochs=1,
        num_ranks=ranks,
        gradient_accumulation_steps=accumulation,
        row_cost=LLAMA_8B,
        window=window,
        **settings,
    )


def in_order(plan: PackPlan, ranks: int, num_micro_steps: int) -> float:
    """Idle share of rows dealt in plan order."""
    costs = plan.sum_over_bins(LLAMA_8B.per_segment(plan.lengths))[: ranks * num_micro_steps].reshape(-1, ranks)
    return float(1 - costs.sum() / (ranks * costs.max(axis=1).sum()))


# ---- the timed run


def timed_worker(rank: int, num_ranks: int, port: int, results: Any) -> None:
    """Work through one rank's rows in step with the others, without and with balance, in turns."""
    import torch.distributed as dist

    if num_ranks <= num_cores() and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    # As many multiplications in matrices as `train_row` does.
    config = SimpleNamespace(hidden_size=128, intermediate_size=128, vocab_size=128, num_attention_heads=4)
    plan = plan_packs(np.minimum(draw("longtail", 300), 2_048), 2_048)
    settings = {"num_epochs": 1, "num_ranks": num_ranks, "rank": rank, "gradient_accumulation_steps": 4}
    runs: dict[str, list[tuple[list[float], float, float]]] = {"none": [], "cost": []}
    for balance in ("none", "cost") * ROUNDS:
        sampler = RankedBatchSampler(
            lambda _: plan,
            **settings,
            balance=balance,
            row_cost=RowCost.from_config(config),  # type: ignore[arg-type]
        )
        work, waited = [], 0.0
        dist.barrier()
        begin = time.perf_counter()
        for row in sampler:
            start = time.process_time()
            if row:
                train_row(plan.lengths[row].tolist(), 128)
            work.append(time.process_time() - start)
            start = time.perf_counter()
            dist.barrier()
            waited += time.perf_counter() - start
        seconds = time.perf_counter() - begin
        runs[balance].append((work, seconds, waited / seconds))
    results.put(runs)
    dist.barrier()
    dist.destroy_process_group()


def train_row(lengths: list[int], width: int) -> None:
    """One layer's forward and backward: eight matrices over all tokens, attention by segment."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.randn(width, width) / width**0.5
    hidden = torch.randn(sum(lengths), width, requires_grad=True)
    for _ in range(8):
        hidden = hidden @ matrix
    total = torch.zeros(())
    for segment in hidden.split(lengths):
        query = segment.view(-1, 4, width // 4).transpose(0, 1)[None]
        total = total + torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum()
    total.backward()  # type: ignore[no-untyped-call]


def num_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def timed(num_ranks: int) -> dict[str, Any]:
    """
    Run real processes that meet after every micro-step, without and with balance, in turns, and take medians.

    The clock shows waiting where every rank has a core of its own. With more ranks than cores another rank computes
    meanwhile, so idle then comes from the CPU seconds that each rank's row took: 1 - mean / max over ranks.
    """
    import socket

    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    workers = [
        context.Process(target=timed_worker, args=(rank, num_ranks, port, results)) for rank in range(num_ranks)
    ]
    for worker in workers:
        worker.start()
    reports = [results.get(timeout=900) for _ in workers]
    for worker in workers:
        worker.join()
    found: dict[str, Any] = {}
    for balance in ("none", "cost"):
        work = np.array([np.median([run[0] for run in report[balance]], axis=0) for report in reports]).T
        found[balance] = {
            "ranks": num_ranks,
            "cores": num_cores(),
            "micro_steps": len(work),
            "idle": float(1 - work.sum() / (num_ranks * work.max(axis=1).sum())),
            "slowest_seconds": float(work.max(axis=1).sum()),
            "seconds": float(np.median([run[1] for report in reports for run in report[balance]])),
            "waited": float(np.median([run[2] for report in reports for run in report[balance]])),
        }
    return found


def timed_runs(num_ranks: int) -> list[dict[str, Any]]:
    """The timed run, and a second one of as many ranks as there are cores if that is fewer."""
    return [timed(ranks) for ranks in sorted({num_ranks, min(num_ranks, max(num_cores(), 2))}, reverse=True)]


def goes_down(run: dict[str, Any]) -> bool:
    """Whether balance lets real ranks wait less, by the clock if it can show that."""
    measure = "waited" if run["none"]["ranks"] <= run["none"]["cores"] else "idle"
    return bool(run["cost"][measure] < run["none"][measure])


def print_timed(run: dict[str, Any]) -> None:
    """Two lines for one timed run."""
    for balance, numbers in run.items():
        print(
            f"{numbers['ranks']} processes on {numbers['cores']} cores, balance {balance}, {numbers['micro_steps']} "
            f"micro-steps: idle {numbers['idle']:.1%} of CPU seconds, {numbers['slowest_seconds']:.2f} s on the "
            f"slowest ranks; {numbers['seconds']:.2f} s on the clock, {numbers['waited']:.1%} of it waiting"
        )


def print_headroom(ranks: list[int]) -> None:
    """What room in rows costs (fill, rows) and brings (idle), beside the least idle that any dealing can reach."""
    print("lengths      budget ranks GA headroom |    fill    rows cluster | idle: before   after  bound | sum lost")
    for name in ("lognormal", "chat", "longtail"):
        for budget in (4_096, 32_768):
            for num_ranks in ranks:
                for accumulation in (1, 4):
                    for headroom in HEADROOMS:
                        found = simulate(name, budget, num_ranks, accumulation, 1, headroom)
                        bound = "      " if found.bound is None else f"{found.bound:6.2%}"
                        chosen = "*" if headroom is None else " "
                        print(
                            f"{name:10} {budget:8} {num_ranks:5} {accumulation:2} {found.headroom:8.3%}{chosen}| "
                            f"{found.fill:7.2%} {found.rows:7} {found.cluster:7.2f} | {found.before:12.2%} "
                            f"{found.after:7.2%} {bound} | {1 - found.fill + found.after:8.2%}",
                            flush=True,
                        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], help="numbers of ranks to simulate")
    parser.add_argument("--timed", type=int, default=0, help="processes of the timed run")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--headroom", action="store_true", help="print the table of headrooms instead")
    args = parser.parse_args()
    if args.headroom:
        print_headroom(args.ranks)
        return 0

    print(
        f"{'lengths':12} {'budget':>7} {'ranks':>5} {'GA':>2} {'window':>6} | idle: TRL  before  after  bound | "
        "fill  variance of steps  ms per step"
    )
    results, broken = [], []
    for name, budget, accumulation in CASES:
        for ranks in args.ranks:
            for window in (1, 4) if accumulation > 1 else (1,):
                result = simulate(name, budget, ranks, accumulation, window)
                results.append(result)
                if result.after > LIMITS.get((name, budget, accumulation, window), 1.0):
                    broken.append(f"{name} {budget}, {ranks} ranks, accumulation {accumulation}, window {window}")
                bound = "" if result.bound is None else f"{result.bound:.1%}"
                print(
                    f"{name:12} {budget:7} {ranks:5} {accumulation:2} {window:6} | {result.trl:9.1%} "
                    f"{result.before:7.1%} {result.after:6.1%} {bound:>6} | {result.fill:.2%} "
                    f"{result.step_variance:9.2f} {result.ms_per_step:17.1f}",
                    flush=True,
                )
    runs = timed_runs(args.timed) if args.timed else []
    for run in runs:
        print_timed(run)
        if not goes_down(run):
            broken.append(f"the timed run of {run['cost']['ranks']} processes")
    print(*(f"Broken: {name}." for name in broken), "" if broken else "All limits hold.")
    if args.json:
        args.json.write_text(
            json.dumps({"simulated": [asdict(result) for result in results], "timed": runs}, indent=2)
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
