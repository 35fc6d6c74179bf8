"""
Everything that planning and dealing to ranks must hold, beside TRL in the same run, as one table.

    python benchmarks/plan.py                   about ten minutes, writes results/plan.json
    python benchmarks/plan.py --samples 100000  a quick look

"(no)" stands for what no plan can do. The exit code is 1 if another line does not hold. `packers.py` and `balance.py`
show each part in full.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from balance import LIMITS, LLAMA_8B, Result, goes_down, print_timed, simulate, timed_runs
from common import environment
from distributions import draw
from packers import MOST_CLUSTER, cluster, measure_rows, measure_scaling, measure_speed

from trl_packing import plan_packs
from trl_packing.balance import least_headroom

FULL = 0.998
# Where no plan can be that full and wait as little as it must, as the table proves.
APART = ("chat", 32_768)


class Table:
    """Lines of what must hold, what was seen, and whether it holds."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def add(self, name: str, target: str, seen: str, holds: bool | None) -> None:
        """Print and keep a line. `holds` is None for what no plan can do."""
        self.lines.append({"name": name, "target": target, "seen": seen, "holds": holds})
        verdict = {True: "yes", False: "NO", None: "(no)"}[holds]
        print(f"{verdict:4} {name:60} {target:>16}   {seen}", flush=True)


def add_planning(table: Table, num_samples: int) -> dict[str, Any]:
    """Speed against TRL's loop, scaling, memory."""
    limits: dict[str, bool] = {}
    speed = measure_speed(num_samples, limits)
    scaling = measure_scaling(num_samples, limits)
    for order, least in (("best_fit", 50), ("shuffled", 20)):
        seconds = speed[f"{order}_seconds"]
        times = speed["trl_seconds"] / seconds
        seen = f"{times:.0f}x ({seconds:.3f} s, TRL {speed['trl_seconds']:.2f} s)"
        table.add(f"{num_samples:,} samples, {order}, against TRL's loop", f">= {least}x", seen, times >= least)
    exact = limits["bins of exact best-fit decreasing"]
    table.add("best_fit has the bins of TRL's exact loop", "equal", "equal" if exact else "different", exact)
    times = scaling["times_the_tenth"]
    table.add("ten times the samples, best_fit", "<= 15x the time", f"{times:.1f}x", times <= 15)
    if scaling["MB"] is not None:
        table.add("memory of that", "<= 400 MB", f"{scaling['MB']:.0f} MB", scaling["MB"] <= 400)
    return {"speed": speed, "scaling": scaling}


def add_rows(table: Table, num_samples: int) -> list[dict[str, Any]]:
    """Rows in best fit; fill and cluster in random order, alone and with the room that balancing needs."""
    limits: dict[str, bool] = {}
    rows = measure_rows(num_samples, limits)
    few = [holds for name, holds in limits.items() if "lower bound" in name]
    seen = f"{sum(few)} of {len(few)} pairs of lengths and budget"
    table.add("best_fit: rows for all lengths but narrow, 4k to 128k", "1.001x + 1", seen, all(few))
    for name, most in MOST_CLUSTER.items():
        found = [row for row in rows if row["lengths"] == name]
        for row in found:
            lengths = draw(name, num_samples).clip(max=row["budget"])
            row["headroom"] = least_headroom(lengths, LLAMA_8B.per_segment(lengths), row["budget"])
            plan = plan_packs(lengths, row["budget"], headroom=row["headroom"])
            row["trained"], row["trained_cluster"] = plan.fill_rate, cluster(plan)
            # Where there are few rows, the last one shows.
            row["few_rows"] = plan.num_bins <= -(-lengths.sum() // row["budget"]) + 1
        for kind, what in (("shuffled", "random order"), ("trained", "with room for balancing")):
            apart = {row["budget"] for row in found if kind == "trained" and (name, row["budget"]) == APART}
            whole = all(row["few_rows"] or row[kind] >= FULL or row["budget"] in apart for row in found)
            seen = ", ".join(f"{row[kind]:.2%}" + " (see below)" * (row["budget"] in apart) for row in found)
            table.add(f"{name}: fill at 4k, 8k, 32k, 128k, {what}", f">= {FULL:.1%}", seen, whole)
            clusters = [row[f"{kind}_cluster"] for row in found]
            seen = ", ".join(f"{number:.2f}" for number in clusters)
            table.add(f"{name}: cluster, {what}", f"<= {most}", seen, max(clusters) <= most)
    return rows


def add_ranks(table: Table, ranks: list[int]) -> list[Result]:
    """Idle of the plan as it is trained, and the proof that full rows would have to wait longer."""
    results = []
    for (name, budget, accumulation, window), most in LIMITS.items():
        for num_ranks in ranks:
            found = simulate(name, budget, num_ranks, accumulation, window)
            results.append(found)
            how = f"accumulation {accumulation}{', stratified' if window > 1 else ''}"
            seen = f"{found.after:.2%} (TRL {found.trl:.1%}), fill {found.fill:.2%}"
            label = f"idle, {name} {budget // 1024}k, {how}, {num_ranks} ranks"
            table.add(label, f"<= {most:.1%}", seen, found.after <= most)
    # The most room that still leaves rows 99.8 % full.
    fuller = [simulate(*APART, num_ranks, 1, 1, headroom=0.0015) for num_ranks in ranks]
    bounds = [found.bound or 0.0 for found in fuller]
    seen = f"rows {fuller[-1].fill:.2%} full: idle {_percents(found.after for found in fuller)}, and at least "
    seen += f"{_percents(bounds)} however dealt"
    most = LIMITS[*APART, 1, 1]
    holds = None if max(bounds) > most else max(found.after for found in fuller) <= most
    table.add(f"both limits in one plan, chat 32k, {ranks} ranks", f"{FULL:.1%}, {most:.1%}", seen, holds)
    return results + fuller


def _percents(shares: Iterable[float]) -> str:
    return ", ".join(f"{share:.2%}" for share in shares)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="samples of the race with TRL")
    parser.add_argument("--fill-samples", type=int, default=200_000, help="samples for fill and cluster")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], help="numbers of ranks to simulate")
    parser.add_argument("--timed", type=int, default=4, help="processes of the timed run, 0 for none")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "plan.json")
    args = parser.parse_args()
    table = Table()
    found: dict[str, Any] = add_planning(table, args.samples)
    found["rows"] = add_rows(table, args.fill_samples)
    found["simulated"] = [asdict(result) for result in add_ranks(table, args.ranks)]
    found["timed"] = timed_runs(args.timed) if args.timed else []
    for run in found["timed"]:
        none, cost = run["none"], run["cost"]
        seen = f"{none['idle']:.1%} -> {cost['idle']:.1%} of CPU seconds, {none['waited']:.1%} -> "
        seen += f"{cost['waited']:.1%} of the clock waiting, {none['seconds']:.2f} -> {cost['seconds']:.2f} s"
        table.add(
            f"timed: {cost['ranks']} gloo processes, {cost['cores']} cores", "less waiting", seen, goes_down(run)
        )
        print_timed(run)
    broken = [line["name"] for line in table.lines if line["holds"] is False]
    print("No line is broken." if not broken else "", *(f"Broken: {name}." for name in broken))
    found = {"table": table.lines, "environment": environment(), **found}
    args.json.write_text(json.dumps(found, indent=2, default=float) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
