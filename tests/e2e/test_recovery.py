"""Workers that die or hang in the middle of a run, which goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

OVERRIDES = [
    "stages.sft.steps=5",
    "stages.grpo.steps=60",
    "stages.grpo.selector.admit=[none]",
    "stages.grpo.groups_per_step=4",
    "checkpoint_every=0",
    "run.name=run",
]


def workers(driver: int) -> dict[str, int]:
    """Pid of every worker of this driver, by name."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if parent == driver and b"--name" in words:
            found[words[words.index(b"--name") + 1].decode()] = int(entry.name)
    return found


def lines(directory: Path) -> list[dict[str, Any]]:
    path = directory / "run" / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(x) for x in path.read_text().splitlines() if x.endswith("}")]


def wait_for_step(directory: Path, step: int, run: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if any(x["moment"] == "step_finished" and x["step"] >= step for x in lines(directory)):
            return
        assert run.poll() is None, run.communicate()
        time.sleep(0.1)
    raise AssertionError(f"step {step} did not come")


@pytest.mark.parametrize(
    ("worker", "number"),
    [("engine", signal.SIGKILL), ("rollout", signal.SIGKILL), ("engine", signal.SIGSTOP)],
)
def test_run_goes_on_after_a_worker(tmp_path: Path, worker: str, number: int) -> None:
    command = [sys.executable, "-m", "miles", "run", *OVERRIDES, f"run.dir={tmp_path}"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for_step(tmp_path, 12, run)
        before = workers(run.pid)
        os.kill(before[worker], number)
        output, _ = run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == 0, output
    assert f"{worker} is started again" in output
    steps = [x["step"] for x in lines(tmp_path) if x["moment"] == "step_finished"]
    assert steps == list(range(1, 66))
    ledger = [json.loads(x) for x in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    fates = [ids for line in ledger for fate, ids in line.items() if isinstance(ids, list)]
    ended = [group for ids in fates for group in ids]
    assert len(ended) == len(set(ended)) == ledger[-1]["started"]  # each once, none lost
    assert not [pid for pid in before.values() if Path(f"/proc/{pid}").exists()]


def test_supervised_stage_goes_on_after_its_rollout_worker(tmp_path: Path) -> None:
    """Which holds the engine that replays, and has to be told the version again."""
    command = [sys.executable, "-m", "miles", "run", *OVERRIDES, f"run.dir={tmp_path}"]
    command += ["stages.sft.steps=60", "stages.grpo.steps=1", "starved_after_s=20"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for_step(tmp_path, 8, run)
        os.kill(workers(run.pid)["rollout"], signal.SIGKILL)
        output, _ = run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == 0, output
    assert "rollout is started again" in output
    steps = [x["step"] for x in lines(tmp_path) if x["moment"] == "step_finished"]
    assert steps == list(range(1, 62))


def test_run_whose_engine_keeps_dying_ends_with_one_error_and_a_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "miles", "run", *OVERRIDES, f"run.dir={tmp_path}"]
    command.append("max_restarts=0")
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for_step(tmp_path, 12, run)
        os.kill(workers(run.pid)["engine"], signal.SIGKILL)
        output, _ = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 1, output
    assert "miles: engine: the worker process" in output and "exit code -9" in output
    assert "max_restarts is 0, and they are used up" in output
    assert sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
