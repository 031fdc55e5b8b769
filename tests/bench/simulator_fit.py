"""Measures how well the simulator predicts the embedded engine: fitted on two settings, held
against others.

Real runs of attempts with log-normal lengths (`lengths_env.py`); the models are fitted to two of
them by `miles simulate --fit`, and the median step of two lags, two concurrencies and two
granularities is predicted. Every setting is run several times, in turns, so that what else the
machine does meets all of them alike. Exits 0 when every prediction is within 15 %.
    python tests/bench/simulator_fit.py [--steps 24] [--rounds 3] [--keep DIR]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
COMMON = (
    "experiment=grpo", f"plugins=[{HERE / 'lengths_env.py'}]", "environment=lengths",
    "groups_per_step=8", "samples_per_group=4", "max_new_tokens=200", "engine.rows=65",
    "engine.max_len=256", "model.max_len=256", "evaluator=null", "selector.admit=[none]",
    "tracker=[jsonl]", "checkpoint_every=0",
)  # fmt: skip
FIT = {
    "fit-sync": ("max_lag=0", "concurrency=64"),
    "fit-lag2": ("max_lag=2", "concurrency=32", "granularity=sample"),
}
PREDICT = {
    "lag1": ("max_lag=1", "concurrency=32", "granularity=sample"),
    "lag4": ("max_lag=4", "concurrency=32", "granularity=sample"),
    "concurrency16": ("max_lag=2", "concurrency=16", "granularity=sample"),
    "concurrency64": ("max_lag=2", "concurrency=64", "granularity=sample"),
    "group": ("max_lag=2", "concurrency=32", "granularity=group"),
    "group64": ("max_lag=2", "concurrency=64", "granularity=group"),
}
MODELS = (
    "simulate.environment.turn_tokens="
    "{kind: lognormal, mean: 48, spread: 0.8, low: 1, high: 200}",
    "simulate.engine.max_requests=64",
)  # fmt: skip
LIMIT = 0.15


def _run(root: Path, name: str, settings: Sequence[str]) -> None:
    if (root / name / "done").exists():
        return
    print(f"{name}: load {os.getloadavg()[0]:.1f}", flush=True)
    words = [*COMMON, *settings, f"run.dir={root}", f"run.name={name}"]
    subprocess.run([sys.executable, "-m", "miles", "run", *words], check=True)
    (root / name / "done").touch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="directory for the runs; those there are reused")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = args.keep or Path(folder)
        for turn in range(args.rounds):
            for name, settings in {**FIT, **PREDICT}.items():
                _run(root, f"{name}.{turn}", [*settings, f"steps={args.steps}"])
        fit, predict = (
            [str(root / f"{name}.{turn}") for name in names for turn in range(args.rounds)]
            for names in (FIT, PREDICT)
        )
        command = [
            sys.executable, "-m", "miles", "simulate", "experiment=grpo", "selector.admit=[none]",
            *MODELS, "--fit", *fit, "--predict", *predict,
        ]  # fmt: skip
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(said)
    worst = float(re.search(r"largest error of a prediction: ([\d.]+)%", said)[1]) / 100
    print(f"worst {worst:.1%} of {len(PREDICT)}; limit {LIMIT:.0%}; load {os.getloadavg()[0]:.1f}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
