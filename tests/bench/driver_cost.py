"""What the driver process costs: its CPU as a share of an RL step, and per trajectory in
supervised steps.

    python tests/bench/driver_cost.py [--json FILE] [override ...]

Runs the first steps of both stages of the default run (`--sft-steps`, `--rl-steps`) with a plugin
that reads the CPU clock of every process after each step. Engine and trainer are other processes,
so what the driver burns is loop, buffer, sessions, tokenizer, rewards, algorithm, metrics, ledger
and trackers. Rewards could be left out by the limits' wording; they are counted all the same.

Limits: at most 10 % of an RL step (driver CPU over CPU of all processes), and at most 100 µs a
trajectory in supervised steps. Figures are medians over steps after the first `--warmup` of a
stage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import clock

HERE = Path(__file__).resolve().parent
RL_SHARE = 0.10
SUPERVISED_S = 100e-6


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sft-steps", type=int, default=120)
    parser.add_argument("--rl-steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument("overrides", nargs="*", help="more overrides for `miles run`")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        command = [sys.executable, "-m", "miles.cli", "run", f"run.dir={folder}", "run.name=run"]
        command += [f"plugins=[{HERE / 'clock.py'}]"]
        command += [f"stages.sft.steps={args.sft_steps}", f"stages.grpo.steps={args.rl_steps}"]
        subprocess.run([*command, *args.overrides], check=True, stdout=sys.stderr)
        lines = clock.read(Path(folder) / "run")
    supervised = clock.costs([x for x in lines if x["stage"] == "sft"])[args.warmup :]
    rl = clock.costs([x for x in lines if x["stage"] == "grpo"])[args.warmup :]
    share = statistics.median(x["driver"] / x["total"] for x in rl)
    each = statistics.median(x["driver"] / x["trajectories"] for x in supervised)
    result = {
        "rl_share": {"median": share, "limit": RL_SHARE, "steps": len(rl)},
        "supervised_s_a_trajectory": {
            "median": each,
            "limit": SUPERVISED_S,
            "steps": len(supervised),
        },
        "rl_step": {k: statistics.median(x[k] for x in rl) for k in ("driver", "workers", "wall")},
        "supervised_step": {
            k: statistics.median(x[k] for x in supervised) for k in ("driver", "workers", "wall")
        },
    }
    print(f"RL step: driver {share:.1%} of all CPU (at most {RL_SHARE:.0%})")
    print(f"supervised: driver {each * 1e6:.0f} µs a trajectory (at most {SUPERVISED_S * 1e6:.0f})")
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if share <= RL_SHARE and each <= SUPERVISED_S else 1


if __name__ == "__main__":
    sys.exit(main())
