"""Agents' commands that do not want to be ended or cannot be started, and what they leave."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from miles import EpisodeError
from miles_plugins.environment.harness.commands import run_command
from miles_plugins.environment.harness.folders import attempt_folder

STOPS_ITS_PARENT = """
import os, signal, sys, time
if not os.fork():
    os.setsid()
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(99)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGSTOP)
time.sleep(99)
"""

KILLS_ITS_PARENT = """
import os, signal, sys, time
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(99)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(99)
"""


def test_an_agent_that_kills_its_launcher_leaves_no_daemon(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    agent = [sys.executable, "-S", "-c", KILLS_ITS_PARENT, str(file)]
    ended = asyncio.run(run_command(agent, env=dict(os.environ), cwd=str(tmp_path), stdin=b""))
    assert ended.code == 128 + 9
    assert not Path("/proc", file.read_text()).exists()


def test_an_agent_that_stops_its_launcher_is_ended_with_its_daemons(tmp_path: Path) -> None:
    file = tmp_path / "pid"

    async def run() -> None:
        async with asyncio.timeout(2.0):
            agent = [sys.executable, "-S", "-c", STOPS_ITS_PARENT, str(file)]
            await run_command(agent, env=dict(os.environ), cwd=str(tmp_path), stdin=b"")

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert time.monotonic() - began < 10
    assert not Path("/proc", file.read_text()).exists()


def test_an_agent_that_cannot_be_started_ends_its_attempt_alone(tmp_path: Path, no_descriptors):
    async def run() -> None:
        with no_descriptors():
            await run_command(["true"], env={}, cwd=str(tmp_path), stdin=b"")

    with pytest.raises(EpisodeError, match=r"cannot start the agent: \[Errno 24\] Too many open"):
        asyncio.run(run())


def test_a_folder_that_cannot_be_made_ends_its_attempt_alone(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    said = r"cannot make a folder for the agent: .*No such file"
    with pytest.raises(EpisodeError, match=said), attempt_folder(b"{}"):
        pass


def test_leftovers_that_cannot_be_deleted_are_named_and_end_nothing(tmp_path, monkeypatch, caplog):
    unlink = os.unlink

    def refuse(path, *args, **more):
        if os.path.basename(os.fspath(path)) == "roots":
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path, *args, **more)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING), attempt_folder(b"{}") as folder:
        (folder / "work" / "roots").write_text("")
        monkeypatch.setattr(os, "unlink", refuse)
    assert f"what an agent left in {folder} cannot all be deleted" in caplog.text
    assert [p.name for p in (folder / "work").iterdir()] == ["roots"]
    assert not (folder / "task.json").exists()


LOCKS = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from miles_plugins.environment.harness.folders import attempt_folder
if os.geteuid() == 0:  # for whom nothing is locked
    os.setgid(65534)
    os.setuid(65534)
with attempt_folder(b"{}") as folder:
    inner = folder / "work" / "cache" / "module"
    inner.mkdir(parents=True)
    (inner / "file").write_text("")
    os.symlink(sys.argv[1], inner / "away")
    for each in (inner, inner.parent, folder / "work"):
        each.chmod(0o000)
print(os.listdir(sys.argv[1]))
"""


def test_folders_that_an_agent_locked_are_deleted_all_the_same():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        said = subprocess.run([sys.executable, "-c", LOCKS, folder], capture_output=True, text=True)
        assert (said.stdout, said.stderr) == ("[]\n", "")
        assert os.stat(folder).st_mode & 0o777 == 0o777  # a link leads nowhere
