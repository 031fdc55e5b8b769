"""The default experiment with the real SGLang on a CPU, as `arithmetic_sglang.yaml` has it: a few
steps, the log-probs of engine and trainer compared, and the server killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

MILES = Path(sys.executable).parent / "miles"
SHORT = (
    "experiment=arithmetic_sglang",
    "engine.environment={OMP_NUM_THREADS: '1'}",
    "stages.sft.steps=3",
    "stages.sft.groups_per_step=8",
    "stages.grpo.groups_per_step=4",
    "stages.grpo.samples_per_group=4",
    "evaluator.tasks=8",
    "tracker=[jsonl]",
    "run.name=run",
)


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _servers(directory: Path) -> list[int]:
    """Processes whose command line names this run's model."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        named = str(directory / "engines").encode()
        if b"sglang.launch_server" in words and any(word.startswith(named) for word in words):
            found.append(int(entry.name))
    return found


def _own(directory: Path) -> int:
    """The server itself, which its guard started."""
    guarded = {
        pid: b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _servers(directory)
    }
    return next(pid for pid, guard in guarded.items() if not guard)


def test_default_run_learns_on_sglang_and_survives_a_server_that_is_killed(sglang_python, tmp_path):
    directory, steps = tmp_path / "run", 6
    words = [*SHORT, f"engine.python={sglang_python}", f"run.dir={tmp_path}"]
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the folder was imported')\n")
    run = subprocess.Popen(
        [str(MILES), "run", *words, f"stages.grpo.steps={steps}"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        metrics, killed = directory / "metrics.jsonl", False
        while run.poll() is None and not killed:
            trained = [
                m for m in _lines(metrics) if m.get("stage") == "grpo" and "time/step_s" in m
            ]
            if trained:
                os.kill(_own(directory), signal.SIGKILL)
                killed = True
            time.sleep(0.1)
        said, _ = run.communicate(timeout=800)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, said
    assert killed
    rows = [m for m in _lines(metrics) if m["moment"] == "step_finished"]
    assert [row["step"] for row in rows] == list(range(1, 3 + steps + 1))
    measured = [row for row in rows if "mismatch/logprob_abs_mean" in row]
    assert len(measured) >= steps - 1
    assert max(row["mismatch/logprob_abs_mean"] for row in measured) < 1e-4
    assert max(row["mismatch/logprob_abs_max"] for row in measured) < 1e-3
    assert not any(row.get("session/token_mismatches") for row in rows)
    log = (directory / "logs" / "engine.log").read_text()
    assert "Traceback" not in log, log
    record = json.loads((directory / "engines" / "sglang-0.json").read_text())
    assert record["environment"]["SGLANG_USE_CPU_ENGINE"] == "1"
    end = time.monotonic() + 10
    while _servers(directory):
        assert time.monotonic() < end, "a server outlived its run"
        time.sleep(0.2)
