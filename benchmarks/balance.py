"""
How long ranks wait for each other: a simulation at 8, 64 and 512 ranks, and a timed run of real processes.

    python benchmarks/balance.py             the simulation
    python benchmarks/balance.py --timed 4   then 4 gloo processes that work through real rows

Idle is 1 - mean / max over ranks that meet after every micro-step (FSDP), with the costs of Llama-8B: a row's tokens
plus 2.04e-5 times the sum of its squared segment lengths. "before" is TRL's bfd (windows of 1,000 samples) and our
plan in its own order; "after" is the plan as `RankedBatchSampler` deals it out. The exit code is 1 if a limit is
broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from distributions import draw

from trl_packing import PackPlan, RankedBatchSampler, plan_packs
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
# Share of each row left free for balancing.
HEADROOM = 0.01
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


@dataclass
class Result:
    """Idle shares of one case and the cost of balancing it."""

    lengths: str
    budget: int
    ranks: int
    accumulation: int
    window: int
    trl: float
    before: float
    after: float
    fill: float
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


def simulate(name: str, budget: int, ranks: int, accumulation: int, window: int) -> Result:
    """Deal out some steps of one case and compare with TRL's rows."""
    num_steps = max(24 // (accumulation * max(ranks // 64, 1)), window, 2)
    num_steps -= num_steps % window
    lengths = samples_for(name, budget, int(1.05 * ranks * accumulation * num_steps) + 8)
    plan = plan_packs(lengths, budget, headroom=HEADROOM)
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
        trl=in_order(trl_plan(lengths, budget), ranks, num_steps * accumulation),
        before=before,
        after=after,
        fill=plan.fill_rate,
        step_variance=step_variance(sampler, num_steps),
        ms_per_step=1e3 * seconds / num_steps,
    )


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

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    # As many multiplications in matrices as `train_row` does.
    config = SimpleNamespace(hidden_size=128, intermediate_size=128, vocab_size=128, num_attention_heads=4)
    plan = plan_packs(np.minimum(draw("longtail", 75 * num_ranks), 2_048), 2_048, headroom=HEADROOM)
    settings = {"num_epochs": 1, "num_ranks": num_ranks, "rank": rank, "gradient_accumulation_steps": 4}
    runs: dict[str, list[tuple[list[float], float]]] = {"none": [], "cost": []}
    for balance in ("none", "cost") * 3:
        sampler = RankedBatchSampler(
            lambda _: plan,
            **settings,
            balance=balance,
            row_cost=RowCost.from_config(config),  # type: ignore[arg-type]
        )
        work = []
        dist.barrier()
        begin = time.perf_counter()
        for row in sampler:
            start = time.process_time()
            if row:
                train_row(plan.lengths[row].tolist(), 128)
            work.append(time.process_time() - start)
            dist.barrier()
        runs[balance].append((work, time.perf_counter() - begin))
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


def timed(num_ranks: int) -> dict[str, Any]:
    """
    Run real processes that meet after every micro-step, without and with balance.

    More ranks than processor cores hide waiting from the clock: another rank computes meanwhile. So idle comes from
    the CPU seconds that each rank's row took, the least of three runs. Beside it stand what the slowest ranks took,
    which is the clock's time where every rank has a core, and the clock.
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
        work = np.array([np.min([run[0] for run in report[balance]], axis=0) for report in reports]).T
        found[balance] = {
            "idle": float(1 - work.sum() / (num_ranks * work.max(axis=1).sum())),
            "slowest_seconds": float(work.max(axis=1).sum()),
            "seconds": min(run[1] for report in reports for run in report[balance]),
            "micro_steps": len(work),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], help="numbers of ranks to simulate")
    parser.add_argument("--timed", type=int, default=0, help="processes of the timed run")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    args = parser.parse_args()

    print(
        f"{'lengths':12} {'budget':>7} {'ranks':>5} {'GA':>2} {'window':>6} | idle: TRL  before  after | fill  ",
        end="",
    )
    print("variance of steps  ms per step")
    results, broken = [], []
    for name, budget, accumulation in CASES:
        for ranks in args.ranks:
            for window in (1, 4) if accumulation > 1 else (1,):
                result = simulate(name, budget, ranks, accumulation, window)
                results.append(result)
                if result.after > LIMITS.get((name, budget, accumulation, window), 1.0):
                    broken.append(f"{name} {budget}, {ranks} ranks, accumulation {accumulation}, window {window}")
                print(
                    f"{name:12} {budget:7} {ranks:5} {accumulation:2} {window:6} | {result.trl:9.1%} "
                    f"{result.before:7.1%} {result.after:6.1%} | {result.fill:.1%} {result.step_variance:10.2f} "
                    f"{result.ms_per_step:17.1f}",
                    flush=True,
                )
    run = timed(args.timed) if args.timed else {}
    for balance, numbers in run.items():
        print(
            f"{args.timed} processes, balance {balance}, {numbers['micro_steps']} micro-steps: "
            f"idle {numbers['idle']:.1%} of CPU seconds, {numbers['slowest_seconds']:.2f} s on the slowest ranks, "
            f"{numbers['seconds']:.1f} s on the clock"
        )
    if run and run["cost"]["idle"] >= run["none"]["idle"]:
        broken.append("the timed run")
    print(*(f"Broken: {name}." for name in broken), "" if broken else "All limits hold.")
    if args.json:
        args.json.write_text(json.dumps({"simulated": [asdict(result) for result in results], "timed": run}, indent=2))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
