"""Workers that die or hang in the middle of a run, which goes on."""

from __future__ import annotations

import json
import os
import re
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
    "silent_after_s=10",
    "run.name=run",
]


COLOCATED = ("placement=colocated", "trainer.sleep_to=host")
"""The trainer sleeps while engines sample, as on a GPU."""


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
    ("lost", "number", "more"),
    [
        (["engine"], signal.SIGKILL, ()),
        (["rollout"], signal.SIGKILL, ()),
        (["engine", "rollout"], signal.SIGKILL, ()),
        (["engine"], signal.SIGSTOP, ()),
        (["engine"], signal.SIGKILL, COLOCATED),
        (["engine"], signal.SIGSTOP, COLOCATED),
    ],
)
def test_run_goes_on_after_a_worker(
    tmp_path: Path, lost: list[str], number: int, more: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "miles", "run", *OVERRIDES, *more, f"run.dir={tmp_path}"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for_step(tmp_path, 12, run)
        before = workers(run.pid)
        for worker in lost:
            os.kill(before[worker], number)
        output, _ = run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == 0, output
    assert all(f"{worker} is started again" in output for worker in lost)
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


# ---------------------------------------------------------------- a trainer that hangs


SHORT = [
    "experiment=grpo", "environment=arithmetic", "steps=1000", "groups_per_step=2",
    "samples_per_group=2", "selector.admit=[none]", "evaluator=null", "engine.max_len=64",
    "engine.rows=8", "max_new_tokens=4", "checkpoint_every=4", "tracker=[jsonl]", "run.name=run",
]  # fmt: skip


STOP = """
import os, pathlib, signal
import miles

PID = pathlib.Path(__file__).with_name("pid")

@miles.hookimpl
def miles_prepared(groups, batch):
    if PID.exists():
        os.kill(int(PID.read_text()), signal.SIGSTOP)
        PID.unlink()
"""
"""Stops a process just before a trainer step, where a publish has a deadline of its own."""
IN_A_PUBLISH = ("miles_prepared(groups, batch)", "miles_checkpoint_saved(step, directory)")
"""What to replace in it to stop the process just before a publish."""


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "miles", "run", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def last_step(directory: Path) -> int:
    return max((x["step"] for x in lines(directory) if x["moment"] == "step_finished"), default=0)


def saved(directory: Path) -> int:
    return max(int(p.name[5:]) for p in (directory / "run" / "checkpoints").glob("step_*"))


def test_trainer_that_hangs_is_named_and_interrupts_keep_their_grace(tmp_path: Path) -> None:
    """SIGSTOP of the trainer: a run that is told to stop gives up after its grace, one that is left
    alone ends by the step's deadline, and each is resumed; at last, with a trainer that works,
    SIGTERM writes a checkpoint."""
    (plugin := tmp_path / "stop.py").write_text(STOP)
    words = [*SHORT, f"plugins=[{plugin}]", f"run.dir={tmp_path}"]
    run = started(*words, "interrupt_grace_s=2")
    try:
        wait_for_step(tmp_path, 6, run)
        os.kill(workers(run.pid)["trainer"], signal.SIGSTOP)
        run.terminate()
        began = time.monotonic()
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 130, output
        assert time.monotonic() - began < 30
        said = "interrupted: not ended after 2 s (interrupt_grace_s), stopping at once; the newest"
        assert said in output and f"step_{saved(tmp_path):06d}" in output
        before = saved(tmp_path)
        run = started(f"resume={tmp_path / 'run'}", "step_timeout_s=5")
        wait_for_step(tmp_path, before + 5, run)
        (new := tmp_path / "new").write_text(str(workers(run.pid)["trainer"]))
        new.rename(tmp_path / "pid")
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 1, output
        assert "miles: trainer: trainer.step did not answer within 5 s" in output
        assert "step_timeout_s is 5" in output and "Traceback" not in output
        assert saved(tmp_path) > before
        run = started(f"resume={tmp_path / 'run'}", "step_timeout_s=1800")
        wait_for_step(tmp_path, saved(tmp_path) + 5, run)
        run.terminate()
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 130, output
        assert saved(tmp_path) == last_step(tmp_path)
    finally:
        run.kill()


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (
            "publish_timeout_s=4",
            r"publishing version \d+ took longer than publish_timeout_s \(4 s\), waiting for "
            r"trainer \(sender\.fill, 4 s; no stacks within 2 s, as of a ",
        ),
        (
            "publish_timeout_s=600",
            r"trainer: the worker process sent nothing for \d+ s \(silent_after_s is 8\) and owes "
            r"sender\.fill, \d+ s, no stacks within 2 s, as of a process that has not begun",
        ),
    ],
)
def test_trainer_that_hangs_in_a_publish_is_named_with_what_it_owes(
    tmp_path: Path, limit: str, said: str
) -> None:
    """The publish's own limit ends it, whatever a step may take; so does silence, which did not say
    what was waited for."""
    (plugin := tmp_path / "stop.py").write_text(STOP.replace(*IN_A_PUBLISH))
    words = [*SHORT, "checkpoint_every=1", "silent_after_s=8", "step_timeout_s=1800", limit]
    run = started(*words, f"plugins=[{plugin}]", f"run.dir={tmp_path}")
    try:
        wait_for_step(tmp_path, 4, run)
        (new := tmp_path / "new").write_text(str(workers(run.pid)["trainer"]))
        new.rename(tmp_path / "pid")
        output, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 1, output
    assert re.search(f"miles: {said}", output), output
    assert (
        "nothing newer is saved: the trainer does not answer within 8 s (silent_after_s); the"
        in output
    )


@pytest.mark.timeout(600)
def test_killed_for_real_nothing_is_lost(tmp_path: Path) -> None:
    """The short form of `tests/bench/real_kills.py --kills 20`."""
    bench = Path(__file__).parents[1] / "bench" / "real_kills.py"
    words = ["--kills", "4", "--each", "--steps", "12", "--dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(bench), *words], capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed: 4 (driver 1, trainer 1, engine 1, rollout 1)" in done.stdout
    same = re.search(r"last weights as undisturbed, bit for bit: (\d+) of (\d+)", done.stdout)
    assert same is not None and same[1] == same[2] != "0"
