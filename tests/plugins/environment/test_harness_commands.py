"""Agents' commands that do not want to be ended."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from miles_plugins.environment.harness.commands import run_command

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
