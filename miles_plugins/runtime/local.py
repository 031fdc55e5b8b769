"""Processes on this machine: each with a name, a log file, a heartbeat, and a socket that nobody
else can reach.

Does not restart anything: a dead worker is a `WorkerError`, and the run decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles import (
    Caller,
    Context,
    Handle,
    Spec,
    WorkerError,
    call_ranks,
    log_tail,
    stacks_held,
    stacks_of,
    whereabouts,
)


class Local:
    """Start trainer and engine workers as processes of this machine."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        start_timeout_s: float = 180.0
        """Seconds a worker may take to import and build its parts."""
        stop_timeout_s: float = 5.0
        """Seconds between asking a worker to end and killing it with its children."""

    def __init__(self, config: Config, context: Context) -> None:
        self.config = config
        self._context = context
        self._processes: list[_Process] = []
        self._meetings: tempfile.TemporaryDirectory[str] | None = None
        self._met = 0

    async def start(
        self, name: str, parts: Sequence[Spec], context: Context, *, world: int = 1
    ) -> Handle:
        logs = context.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        ranks = []
        silent = context.settings.silent_after_s
        for rank in range(world):
            full = name if world == 1 else f"{name}-{rank}"
            log = logs / f"{full}.log"
            process = _Process(full, log, self.config, silent_after_s=silent)
            self._processes.append(process)
            ranks.append(process)
        handle = _LocalHandle(name, ranks)
        try:
            for process in ranks:
                await process.connect()
            await self.rebuild(handle, parts, context)
        except BaseException:  # or it would keep its device until the run ends
            await self.end(handle)
            raise
        return handle

    async def rebuild(self, handle: Handle, parts: Sequence[Spec], context: Context) -> None:
        if not isinstance(handle, _LocalHandle):
            raise TypeError(f"{handle.name} was not started by this runtime")
        master = self._meeting_place() if handle.world > 1 else ""
        around = replace(context, world=handle.world, master=master)
        limit = self.config.start_timeout_s
        await call_ranks(
            handle.ranks,
            [
                process.call(
                    "worker.build",
                    list(parts),
                    dict(context.plugins),
                    {
                        "directory": str(around.directory),
                        "seed": around.seed,
                        "settings": around.settings,
                        "rank": rank,
                        "world": around.world,
                        "master": around.master,
                    },
                    timeout=limit,
                )
                for rank, process in enumerate(handle.ranks)
            ],
            limit,
        )

    async def end(self, handle: Handle) -> None:
        if not isinstance(handle, _LocalHandle):
            raise TypeError(f"{handle.name} was not started by this runtime")
        self._processes = [p for p in self._processes if p not in handle.ranks]
        await asyncio.gather(*(p.stop(grace_s=0.0) for p in handle.ranks))

    async def stop(self) -> None:
        processes, self._processes = self._processes, []
        await asyncio.gather(*(p.stop() for p in processes))
        if self._meetings is not None:
            self._meetings.cleanup()
            self._meetings = None

    def _meeting_place(self) -> str:
        """A file that nobody has met at yet. A port found free here could be taken by others before
        rank 0 listens there."""
        if self._meetings is None:
            self._meetings = tempfile.TemporaryDirectory(
                prefix="miles-ranks-", ignore_cleanup_errors=True
            )
        self._met += 1
        return f"file://{self._meetings.name}/{self._met}"


class _LocalHandle:
    def __init__(self, name: str, ranks: list[_Process]) -> None:
        self.name = name
        self.ranks = ranks
        self.world = len(ranks)

    def call(
        self, target: str, *args: Any, rank: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> Coroutine[Any, Any, Any]:
        return self.ranks[rank].call(target, *args, timeout=timeout, **kwargs)

    def owed(self) -> list[tuple[str, float]]:
        return [each for process in self.ranks for each in process.caller.owed()]

    async def call_all(
        self, target: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        if self.world == 1:
            return [await self.ranks[0].call(target, *args, timeout=timeout, **kwargs)]
        calls = [r.call(target, *args, timeout=timeout, **kwargs) for r in self.ranks]
        return await call_ranks(self.ranks, calls, timeout)

    async def where(self) -> str:
        return await whereabouts(self.ranks)

    def stream(self, target: str, *args: Any, rank: int = 0) -> AsyncIterator[Any]:
        return self.ranks[rank].caller.stream(target, args)

    @property
    def lost(self) -> bool:
        return any(process.caller.lost for process in self.ranks)


class _Process:
    """One worker process and the calls that are open in it."""

    def __init__(
        self, name: str, log: Path, config: Local.Config, *, silent_after_s: float
    ) -> None:
        self.name = name
        self.caller = Caller(name, self._dead, self._signalled)
        self._log = log
        self._config = config
        self._silent_after_s = silent_after_s
        self._stopping = False
        self._watch: asyncio.Task[None] | None = None
        ours, theirs = socket.socketpair()
        self._sock = ours
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this machine
        command = [sys.executable, "-P", "-m", "miles.worker", "--name", name]
        command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        with log.open("ab") as output, theirs, stacks_held():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
            )

    async def connect(self) -> None:
        self._sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.caller.connection, sock=self._sock)
        self._watch = loop.create_task(
            self.caller.watch_silence(self._silent_after_s), name=f"watch {self.name}"
        )

    async def call(
        self, target: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        if self._stopping:
            raise self._dead(f"cannot call {target}")
        try:
            return await self.caller.call(target, args, kwargs, timeout)
        except TimeoutError:
            raise WorkerError(
                f"{self.name}: {target} did not answer within {timeout:g} s, {await self.where()}; "
                f"see {self._log}"
            ) from None

    async def where(self) -> str:
        return await self.caller.where()

    async def _signalled(self) -> str:
        return await stacks_of(self._process, self._log)

    def _dead(self, what: str) -> WorkerError:
        try:
            code = self._process.wait(timeout=0 if self._stopping else 0.5)
        except subprocess.TimeoutExpired:
            code = None
        state = "is still running" if code is None else f"exit code {code}"
        error = WorkerError(f"{self.name}: the worker process {what} ({state}); see {self._log}")
        if tail := log_tail(self._log):
            error.add_note(f"last lines of {self._log.name}:\n{tail}")
        return error

    async def stop(self, *, grace_s: float | None = None) -> None:
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
        self.caller.connection.close()
        grace_s = self._config.stop_timeout_s if grace_s is None else grace_s
        deadline = time.monotonic() + grace_s
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the session: its children too
        self._process.wait()
        self.caller.fail("was stopped")
