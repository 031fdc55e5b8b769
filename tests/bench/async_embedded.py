"""The embedded engine and a tiny model: asynchronous steps a second against synchronous.

    python tests/bench/async_embedded.py [--kind KIND] [--rounds N] [--steps N] [--lag K]

Real runs of the embedded engine and the `fsdp` trainer, each in its process with one thread, so
that two cores can be busy at once. Two kinds of attempts: `short` ones, as in the default run's RL
stage (at most 8 tokens, all alike), and `spread` ones with log-normal lengths (`lengths_env.py`),
where a synchronous step waits for its longest. Schedules take turns, because others may use the
machine; the best round of each counts. What the processes burn of the cores is told beside it: no
schedule gains where both cores are busy anyway.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clock

from miles.records.record import read

HERE = Path(__file__).resolve().parent
COMMON = ("experiment=grpo", "evaluator=null", "tracker=[jsonl]", "selector.admit=[none]")
KINDS = {
    "short": (
        f"plugins=[{HERE / 'clock.py'}]", "groups_per_step=32", "samples_per_group=8",
        "max_new_tokens=8", "engine.rows=256", "engine.max_len=64",
    ),
    "spread": (
        f"plugins=[{HERE / 'clock.py'},{HERE / 'lengths_env.py'}]", "environment=lengths",
        "groups_per_step=16", "samples_per_group=8", "max_new_tokens=200", "engine.rows=64",
        "engine.max_len=256", "model.max_len=256", "concurrency=64",
    ),
}  # fmt: skip
WARMUP, DRAIN = 6, 4


def play(root: Path, name: str, words: Sequence[str], steps: int) -> dict[str, float]:
    """One run: steps a second, waiting a step, staleness, and CPU seconds a step."""
    command = [sys.executable, "-m", "miles", "run", *COMMON, *words, f"steps={steps}"]
    command += [f"run.dir={root}", f"run.name={name}"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    rows = read(root / name).steps[WARMUP:-DRAIN]
    costs = clock.costs(clock.read(root / name))[WARMUP : -DRAIN - 1]
    count = len(rows)
    whole = sum(row["time/step_s"] for row in rows)
    return {
        "steps_per_s": count / whole,
        **{
            f"{what}_s": sum(row[f"time/{what}_s"] for row in rows) / count
            for what in ("wait", "train", "publish", "overhead")
        },
        "engine_idle_s": sum(row["engine/idle_s"] for row in rows) / count,
        "staleness": sum(row["staleness/mean"] for row in rows) / count,
        "stale_groups": sum(row.get("groups/dropped/stale", 0) for row in rows) / count,
        "cpu_s": sum(cost["total"] for cost in costs) / len(costs),
        "cores": sum(cost["total"] for cost in costs) / sum(cost["wall"] for cost in costs),
        "load": os.getloadavg()[0],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print; there is no limit to hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="all without it")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lag", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args(argv)
    schedules = {"synchronous": "max_lag=0", "asynchronous": f"max_lag={args.lag}"}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        for kind in args.kind or KINDS:
            words = KINDS[kind]
            found: dict[str, list[dict[str, float]]] = {name: [] for name in schedules}
            for index in range(args.rounds):
                for name, lag in schedules.items():
                    run = f"{kind}-{name}-{index}"
                    found[name].append(play(Path(folder), run, (*words, lag), args.steps))
            best = {n: max(each, key=lambda r: r["steps_per_s"]) for n, each in found.items()}
            rates = {name: one["steps_per_s"] for name, one in best.items()}
            ratio = rates["asynchronous"] / rates["synchronous"]
            print(
                f"{kind}: {rates['asynchronous']:.2f} steps/s asynchronous (max_lag {args.lag}), "
                f"{rates['synchronous']:.2f} synchronous: {ratio:.2f} times; cores busy "
                f"{best['asynchronous']['cores']:.2f} and {best['synchronous']['cores']:.2f}",
                flush=True,
            )
            results[kind] = {"ratio": ratio, "best": best, "rounds": found}
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
