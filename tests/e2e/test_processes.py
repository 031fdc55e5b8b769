"""No process outlives the driver, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MILES = Path(sys.executable).parent / "miles"


def _command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _below(pid):
    """Every living descendant of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry.name), *_below(int(entry.name))]
    return found


def _wait(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


@pytest.mark.slow
def test_what_lies_in_the_folder_of_a_run_passes_for_no_package(command, tiny_overrides, tmp_path):
    """People run where their own `datasets` is; `python -m` would import that one."""
    for name in ("json.py", "queue.py", "torch/__init__.py", "datasets/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise SystemExit('imported {name} of the folder')\n")
    ended = command("run", *tiny_overrides, "stages.grpo.steps=1", cwd=tmp_path)
    assert ended.code == 0, ended.text
    assert not list(tmp_path.rglob("__pycache__"))


@pytest.mark.slow
def test_killed_driver_leaves_no_worker_behind(tiny_overrides, tmp_path):
    """SIGKILL gives the driver no chance to say goodbye; the workers notice by themselves."""
    overrides = [*tiny_overrides, "stages.sft.steps=100000", f"run.dir={tmp_path}", "run.name=run"]
    driver = subprocess.Popen(
        [str(MILES), "run", *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        _wait(
            lambda: (
                (metrics.exists() and '"stage"' in metrics.read_text()) or driver.poll() is not None
            ),
            90,
            "no step was taken",
        )
        assert driver.poll() is None, "the run ended by itself"
        workers = [pid for pid in _below(driver.pid) if "miles.worker" in _command_line(pid)]
        assert len(workers) >= 2
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    _wait(lambda: not any(map(_alive, workers)), 5, "a worker outlived its driver")
