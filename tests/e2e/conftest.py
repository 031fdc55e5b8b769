"""Ways to run miles as a user does, and the runs that several end-to-end tests look at.

A run starts two worker processes that import torch, which takes seconds: tests that only read a
run's directory share one, and never change it.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from miles.cli import main

MILES = Path(sys.executable).parent / "miles"

TINY = (
    "stages.sft.steps=3",
    "stages.grpo.steps=3",
    "stages.sft.groups_per_step=8",
    "stages.grpo.groups_per_step=4",
    "stages.grpo.samples_per_group=4",
    "stages.grpo.selector.admit=[]",
    "evaluator.tasks=8",
    "engine.max_len=128",
    "tracker=[jsonl]",
)
"""The default run, made short."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Everything it said."""
        return self.out + self.err


@dataclass(frozen=True)
class Ran:
    """A run and its directory."""

    directory: Path
    ended: Ended = field(repr=False)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Metrics of steps and evaluations, in the order they were written."""
        lines = map(json.loads, (self.directory / "metrics.jsonl").read_text().splitlines())
        rest = ("moment", "at", "set", "evaluator")
        return [
            {name: value for name, value in line.items() if name not in rest}
            for line in lines
            if line["moment"] in ("step_finished", "evaluated")
        ]

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        """Metrics by step; a step twice is a fault."""
        rows = [row for row in self.rows if "time/step_s" in row]
        found = {row["step"]: row for row in rows}
        assert len(found) == len(rows), "a step is there twice"
        return found

    @property
    def checkpoints(self) -> list[Path]:
        """In order of their steps."""
        return sorted((self.directory / "checkpoints").glob("step_*"))


def single_thread() -> dict[str, str]:
    """The environment for child processes: one thread, nothing looked up on a hub."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


def _command(*arguments: str | Path, cwd: Path | None = None, timeout: float = 240) -> Ended:
    done = subprocess.run(
        [str(MILES), *map(str, arguments)],
        cwd=cwd,
        env=single_thread(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def command() -> Callable[..., Ended]:
    """The installed `miles` in a process of its own: `command("run", "steps=3", cwd=folder)`."""
    return _command


@pytest.fixture(scope="session")
def tiny_overrides() -> tuple[str, ...]:
    """What makes the default run short."""
    return TINY


@pytest.fixture
def miles(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Call `miles.cli.main` in this process, from an empty folder: `miles("check", "steps=3")`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(*arguments: str | Path) -> Ended:
        capfd.readouterr()
        code = main([str(a) for a in arguments])
        said = capfd.readouterr()
        return Ended(code, said.out, said.err)

    return call


@pytest.fixture(scope="session")
def new_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ran]:
    """Start a run in a folder of its own and wait for it: `new_run("steps=3")`."""

    def start(*overrides: str, name: str = "run", code: int = 0) -> Ran:
        folder = tmp_path_factory.mktemp("runs")
        ended = _command("run", f"run.dir={folder}", f"run.name={name}", *overrides)
        assert ended.code == code, ended.text
        return Ran(folder / name, ended)

    return start


@pytest.fixture(scope="session")
def tiny(new_run: Callable[..., Ran], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Both stages of the default run, three steps each, a checkpoint every step, every tracker:
    one for all processes of pytest, the first that asks runs it."""

    def run() -> Ran:
        return new_run(
            *TINY,
            "tracker=[console,jsonl,tensorboard,wandb]",
            "tracker.wandb.mode=offline",
            "checkpoint_every=1",
            "keep_checkpoints=0",
        )

    if "PYTEST_XDIST_WORKER" not in os.environ:
        return run()
    shared = tmp_path_factory.getbasetemp().parent  # of this session, above each process' own
    with (shared / "tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (said := shared / "tiny.json").is_file():
            ran = run()
            said.write_text(json.dumps([str(ran.directory), asdict(ran.ended)]))
        directory, ended = json.loads(said.read_text())
        return Ran(Path(directory), Ended(**ended))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Put a text file into the test's folder."""

    def put(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return put
