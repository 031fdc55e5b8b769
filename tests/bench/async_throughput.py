"""Asynchronous throughput against its bound: real processes whose engine and trainer only sleep.

    python tests/bench/async_throughput.py [--case NAME ...] [--steps N] [--json FILE]

Every figure is a `miles run` over `sleeping.py`: driver, rollout worker, sessions, router, buffer,
publishes and ledger are the product's; what would need an accelerator is a timer. Rollouts alone
(an instant trainer, no bound on lag or buffer) and the trainer alone (an instant engine) are
measured first; the bound is the slower of the two. Then the same engine and trainer run
asynchronously by sample and by group, and synchronously.

Throughput is groups trained a second from the step `--warmup` on, without the last ones, for which
a run that ends has nothing left to start. Exits 0 when every log-normal case of spread 1 reaches
0.95 of its bound, and, with lengths spread tenfold, trajectories in flight stay within one group of
the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.records.record import read

HERE = Path(__file__).resolve().parent
LIMIT = 0.95
GROUPS, SAMPLES, CONCURRENCY = 16, 8, 64
DRAIN = 5
"""Last steps of a run, for which nothing new is started at their beginning."""
COMMON = (
    "experiment=grpo", f"plugins=[{HERE / 'sleeping.py'}]", "engine=sleeping", "trainer=sleeping",
    "evaluator=null", "tracker=[jsonl]", "selector.admit=[none]", "max_new_tokens=8",
    f"groups_per_step={GROUPS}", f"samples_per_group={SAMPLES}", f"concurrency={CONCURRENCY}",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An engine, a trainer, and how old tokens may be. With a mean of 0.5 s, rollouts of this
    concurrency bring a step's groups in a second."""

    kind: str = "lognormal"
    spread: float = 1.0
    mean_s: float = 0.5
    step_s: float = 1.0
    max_lag: int = 4
    limit: float | None = None

    @property
    def engine(self) -> tuple[str, ...]:
        return (
            f"engine.kind={self.kind}", f"engine.spread={self.spread}",
            f"engine.mean_s={self.mean_s}",
        )  # fmt: skip


CASES = {
    "sigma1": Case(limit=LIMIT),
    "sigma1 slow trainer": Case(step_s=1.6, limit=LIMIT),
    "sigma1 fast trainer": Case(step_s=0.6, limit=LIMIT),
    "sigma0.5": Case(spread=0.5),
    "sigma1.5": Case(spread=1.5, max_lag=8),
    "pareto2": Case(kind="pareto", spread=2.0, max_lag=8),
    "tenfold": Case(kind="uniform", mean_s=1.0, step_s=1.2),
}


class Bench:
    """Runs, each once however often it is asked for."""

    def __init__(self, root: Path, *, steps: int, warmup: int) -> None:
        self._root = root
        self._steps = steps
        self._warmup = warmup
        self._known: dict[tuple[str, ...], dict[str, float]] = {}

    def run(self, name: str, *words: str, steps: int | None = None) -> dict[str, float]:
        """Groups a second and what else the steps say."""
        if words in self._known:
            return self._known[words]
        directory = f"{name.replace(' ', '-')}-{len(self._known)}"
        count = steps or self._steps
        command = [sys.executable, "-m", "miles", "run", *COMMON, *words, f"steps={count}"]
        command += [f"run.dir={self._root}", f"run.name={directory}"]
        if not (self._root / directory / "report.html").exists():
            subprocess.run(command, check=True, stdout=sys.stderr)
        rows = read(self._root / directory).steps
        synchronous = "max_lag=0" in words  # every step of which is like every other
        rows = rows[1:-1] if synchronous else rows[min(self._warmup, count // 4) : -DRAIN]
        took = sum(row["time/step_s"] for row in rows)
        trained = sum(row["groups/trained"] for row in rows)
        found = {
            "groups_per_s": trained / took,
            "step_s": took / len(rows),
            "wait_s": sum(row["time/wait_s"] for row in rows) / len(rows),
            "publish_s": sum(row["time/publish_s"] for row in rows) / len(rows),
            "overhead_s": sum(row["time/overhead_s"] for row in rows) / len(rows),
            "stale_share": sum(row.get("groups/dropped/stale", 0) for row in rows) / trained,
            "staleness": sum(row["staleness/mean"] for row in rows) / len(rows),
            "places_least": min(row["samples/running"] for row in rows),
            "length_bias": float(rows[-1].get("length/bias", 0.0)),
            **occupancy(self._root / directory, rows[0]["version"], rows[-1]["version"]),
        }
        self._known[words] = found
        print(f"{name}: {found['groups_per_s']:.2f} groups/s; load {os.getloadavg()[0]:.1f}",
              file=sys.stderr, flush=True)  # fmt: skip
        return found


def occupancy(directory: Path, first: int, last: int) -> dict[str, float]:
    """Requests that the engine held between two publishes: their mean, and the share of the time
    that they were more than one group below the limit."""
    held: Counter[int] = Counter()
    for line in (directory / "occupancy.jsonl").read_text().splitlines():
        row = json.loads(line)
        if first < row["version"] <= last:
            held.update({int(k): v for k, v in row["held_us"].items()})
    whole = max(held.total(), 1)
    low = sum(v for k, v in held.items() if k < CONCURRENCY - SAMPLES)
    return {
        "in_flight_mean": sum(k * v for k, v in held.items()) / whole,
        "in_flight_low_share": low / whole,
        "in_flight_most": max(held, default=0),
    }


def measure(bench: Bench, name: str, case: Case) -> dict[str, Any]:
    """Both sides alone, then together in three schedules."""
    lag, step = f"max_lag={case.max_lag}", f"trainer.step_s={case.step_s}"
    unbound = ("max_lag=64", "capacity_factor=64", "trainer.step_s=0")
    rollouts = bench.run(f"{name}: rollouts alone", *case.engine, *unbound)
    trainer = bench.run("trainer alone", "engine.kind=instant", step, "max_lag=4", steps=24)
    bound = min(rollouts["groups_per_s"], trainer["groups_per_s"])
    found: dict[str, Any] = {"rollouts": rollouts, "trainer": trainer, "bound": bound}
    found["sample"] = bench.run(f"{name}: by sample", *case.engine, lag, step)
    by_group = (*case.engine, lag, step, "granularity=group")
    found["group"] = bench.run(f"{name}: by group", *by_group, steps=24)
    sync = (*case.engine, step, "max_lag=0")
    found["sync"] = bench.run(f"{name}: synchronous", *sync, steps=10)
    by_sample = (*sync, "granularity=sample")
    found["sync_sample"] = bench.run(f"{name}: synchronous by sample", *by_sample, steps=10)
    for schedule in ("sample", "group", "sync", "sync_sample"):
        found[schedule] = {**found[schedule], "of_bound": found[schedule]["groups_per_s"] / bound}
    found["over_sync"] = found["sample"]["groups_per_s"] / found["sync"]["groups_per_s"]
    found["over_sync_sample"] = (
        found["sample"]["groups_per_s"] / found["sync_sample"]["groups_per_s"]
    )
    found["over_group"] = found["sample"]["groups_per_s"] / found["group"]["groups_per_s"]
    return found


def tell(name: str, case: Case, found: dict[str, Any]) -> bool:
    """One line; whether its limits hold."""
    sample = found["sample"]
    good = case.limit is None or sample["of_bound"] >= case.limit
    line = (
        f"{name}: step {case.step_s} s, max_lag {case.max_lag}; alone: rollouts "
        f"{found['rollouts']['groups_per_s']:.2f}, trainer {found['trainer']['groups_per_s']:.2f} "
        f"groups/s; asynchronous {sample['groups_per_s']:.2f} = {sample['of_bound']:.3f} of the "
        f"bound, by group {found['group']['of_bound']:.3f}, synchronous "
        f"{found['sync']['of_bound']:.3f}; {found['over_sync']:.2f} times synchronous "
        f"({found['over_sync_sample']:.2f} if that frees places by sample), "
        f"{found['over_group']:.2f} times by group; stale {sample['stale_share']:.1%}"
    )
    print(f"{'good' if good else 'BAD '}  {line}")
    if case.kind == "uniform":
        low, mean = sample["in_flight_low_share"], sample["in_flight_mean"]
        least, most = sample["places_least"], sample["in_flight_most"]
        within = least > CONCURRENCY - SAMPLES and most <= CONCURRENCY
        line = (
            f"in flight: never fewer than {least:.0f} of {CONCURRENCY} places taken; at the engine "
            f"{mean:.1f} requests on average (by group {found['group']['in_flight_mean']:.1f}), at "
            f"most {most}, more than one group below the limit in {low:.2%} of the time: the way "
            "of a group to the engine"
        )
        print(f"{'good' if within else 'BAD '}  {line}")
        good = good and within
    return good


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="all without it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--keep", type=Path, help="directory for the runs; those there are reused")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args(argv)
    results, good = {}, True
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        bench = Bench(args.keep or Path(folder), steps=args.steps, warmup=args.warmup)
        for name in args.case or CASES:
            results[name] = measure(bench, name, CASES[name])
            good = tell(name, CASES[name], results[name]) and good
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
