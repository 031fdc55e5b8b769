"""Runs an agent's command beside the event loop: its output is kept up to a limit, and it is ended
with its children however the wait for it ends.

What the command is told, and what it is worth, is the environment's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from miles import EpisodeError

__all__ = ["Ended", "run_command"]

_LAUNCHER = Path(__file__).with_name("launcher.py")
_KEPT = 65536  # bytes of each stream, the last ones
_STOP_S = 15.0  # for the launcher to end everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a command did."""

    code: int
    """Its exit code; 127 when it could not be started."""
    stdout: str
    """The last 64 kB."""
    stderr: str
    """The last 64 kB."""


async def run_command(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: str, stdin: bytes
) -> Ended:
    """Run to its end. Cancelling ends the command and everything it started. Raises `EpisodeError`
    when this machine cannot start a process."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid())),
            *argv,
            env=dict(env),
            cwd=cwd,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:  # no process, descriptor or memory is left, or its folder is gone
        raise EpisodeError(f"environment harness: cannot start the agent: {error}") from error
    try:
        out, err, _, code = await asyncio.gather(
            _last(process.stdout), _last(process.stderr), _feed(process, stdin), process.wait()
        )
    except BaseException:
        await asyncio.shield(_stop(process))
        raise
    return Ended(code=code, stdout=out, stderr=err)


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    stream = process.stdin
    if stream is None:
        return
    try:
        stream.write(data)
        await stream.drain()
        stream.close()
    except (BrokenPipeError, ConnectionResetError):
        return  # it did not want to read


async def _last(stream: asyncio.StreamReader | None) -> str:
    kept = bytearray()
    while stream is not None and (piece := await stream.read(_KEPT)):
        kept += piece
        del kept[:-_KEPT]
    return kept.decode(errors="replace")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ask the launcher to end everything; kill it when it does not."""
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)  # an agent may have stopped its parent
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        with suppress(TimeoutError):  # what outlives it may hold its pipes
            async with asyncio.timeout(1.0):
                await process.wait()
