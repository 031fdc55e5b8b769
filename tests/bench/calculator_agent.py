"""`miles run experiment=calculator_agent`, timed from outside and held against what it promises.

    python tests/bench/calculator_agent.py [--harness] [--dir DIR] [--json FILE]

Limits, on two cores: at most 300 s in all, imports included; the RL stage raises the reward by at
least 0.3 (mean of its last five steps over mean of its first two); no token mismatch; mismatch of
log-probs below 1e-4; the report shows turns, tool errors, token mismatches, trained tokens and the
prefix-cache hit rate. `--harness` plays the RL stage through an agent of its own, over HTTP.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.records.record import Record, read

WALL_S = 300.0
RISE = 0.3
MISMATCH = 1e-4
SHOWN = ("turns", "tool errors", "token mismatches", "trained", "prefix-cache hits")


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
    last = rl[-5:]
    return {
        "evaluations": scores,
        "reward_first": statistics.fmean(rewards[:2]),
        "reward_last": statistics.fmean(rewards[-5:]),
        "rise": statistics.fmean(rewards[-5:]) - statistics.fmean(rewards[:2]),
        "turns": statistics.fmean(row["session/turns"] for row in last),
        "tool_errors": statistics.fmean(row["env/tools/errors"] for row in last),
        "token_mismatches": sum(row["session/token_mismatches"] for row in record.steps),
        "trained_tokens": sum(row["tokens/trained"] for row in rl),
        "prefix_hit_rate": statistics.fmean(row["router/prefix_hit_rate"] for row in last),
        "mismatch_max": max(row["mismatch/logprob_abs_max"] for row in rl),
        "rl_step_s": statistics.median(row["time/step_s"] for row in rl),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--harness", action="store_true", help="play through an outside agent")
    parser.add_argument("--dir", type=Path, help="run in this empty folder and keep it")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        where = args.dir or Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "miles", "run"]
        command += ["experiment=calculator_agent"]
        command += ["environment=harness"] if args.harness else []
        begin = time.monotonic()
        done = subprocess.run(command, cwd=where, stdout=sys.stderr, check=False)
        wall = time.monotonic() - begin
        found = sorted((where / "runs").glob("*/metrics.jsonl"))
        if done.returncode or len(found) != 1:
            print(f"miles run ended with {done.returncode}, leaving {len(found)}", file=sys.stderr)
            return 1
        result = {"wall_s": wall, **judge(read(found[0].parent))}
        page = (found[0].parent / "report.html").read_text()
    missing = [words for words in SHOWN if f"<small>{words}</small>" not in page]
    checks = {
        f"wall {wall:.1f} s, at most {WALL_S:.0f}": wall <= WALL_S,
        f"reward rose {result['rise']:.3f}, at least {RISE}": result["rise"] >= RISE,
        f"{result['token_mismatches']:.0f} token mismatches": not result["token_mismatches"],
        f"mismatch {result['mismatch_max']:.1e}": result["mismatch_max"] < MISMATCH,
        f"the report lacks {missing or 'nothing'}": not missing,
    }
    for line, good in checks.items():
        print(f"{'good' if good else 'BAD '}  {line}")
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
