"""`miles run` with no arguments, timed from outside and held against what it promises.

    python tests/bench/default_run.py [--dir DIR] [--json FILE] [override ...]

Limits, on two cores: at most 180 s in all, imports included; greedy held-out accuracy of at least
0.95 at the end; the RL stage itself raises sampled reward by at least 0.35 (mean of its last ten
steps over mean of its first three); mismatch below 1e-4 at every RL step; every metric name in
the table. The command runs in an empty folder, so that nothing but its own defaults decides, and
what is overridden here: `max_lag=2 seed=1` must reach the same.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.metrics import faults
from miles.records.record import Record, read

WALL_S = 180.0
ACCURACY = 0.95
RISE = 0.35
MISMATCH = 1e-4


def judge(record: Record) -> dict[str, Any]:
    """The figures that a run's record gives."""
    rl = record.of("grpo")
    rewards = [row["reward/mean"] for row in rl]
    scores = [
        value
        for row in record.evaluations
        for name, value in row.items()
        if name.startswith("eval/") and name.endswith("/score")
    ]
    about = ("moment", "at", "set", "evaluator")
    rows = [
        {name: value for name, value in row.items() if name not in about}
        for row in (*record.steps, *record.evaluations)
    ]
    return {
        "rl_steps": len(rl),
        "evaluations": scores,
        "accuracy": scores[-1],
        "reward_first": statistics.fmean(rewards[:3]),
        "reward_last": statistics.fmean(rewards[-10:]),
        "rise": statistics.fmean(rewards[-10:]) - statistics.fmean(rewards[:3]),
        "mismatch_max": max(row["mismatch/logprob_abs_max"] for row in rl),
        "unmeasured_steps": sum(row.get("mismatch/tokens", 0) <= 0 for row in rl),
        "metric_faults": sorted({fault for row in rows for fault in faults(row)}),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="run in this empty folder and keep it")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument("overrides", nargs="*", help="overrides for `miles run`")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        where = args.dir or Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        command = [sys.executable, "-m", "miles", "run", *args.overrides]
        done = subprocess.run(command, cwd=where, stdout=sys.stderr, check=False)
        wall = time.monotonic() - begin
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = sorted((where / "runs").glob("*/metrics.jsonl"))
        if done.returncode or len(found) != 1:
            print(
                f"miles run ended with {done.returncode} and left {len(found)} runs",
                file=sys.stderr,
            )
            return 1
        result = judge(read(found[0].parent))
    result |= {
        "wall_s": wall,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_rss_kib": used.ru_maxrss,
    }
    checks = {
        f"wall {wall:.1f} s, at most {WALL_S:.0f}": wall <= WALL_S,
        f"accuracy {result['accuracy']:.3f}, at least {ACCURACY}": result["accuracy"] >= ACCURACY,
        f"reward rose {result['rise']:.3f}, at least {RISE}": result["rise"] >= RISE,
        f"mismatch {result['mismatch_max']:.1e}, below {MISMATCH:.0e}": (
            result["mismatch_max"] < MISMATCH and not result["unmeasured_steps"]
        ),
        f"{len(result['metric_faults'])} metric faults, none allowed": not result["metric_faults"],
    }
    for line, good in checks.items():
        print(f"{'good' if good else 'BAD '}  {line}")
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
