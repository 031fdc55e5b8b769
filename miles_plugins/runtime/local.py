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
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles import Connection, Context, Handle, Spec, WorkerError, error_from_wire


class Local:
    """Start trainer and engine workers as processes of this machine."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        start_timeout_s: float = 180.0
        """Seconds a worker may take to import and build its parts."""
        silent_after_s: float = 120.0
        """A worker that sends no heartbeat for so long while a call is open counts as hung."""
        stop_timeout_s: float = 5.0
        """Seconds between asking a worker to end and killing it with its children."""

    def __init__(self, config: Config, context: Context) -> None:
        self.config = config
        self._context = context
        self._processes: list[_Process] = []

    async def start(
        self, name: str, parts: Sequence[Spec], context: Context, *, world: int = 1
    ) -> Handle:
        logs = context.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        ranks = []
        for rank in range(world):
            full = name if world == 1 else f"{name}-{rank}"
            process = _Process(full, logs / f"{full}.log", self.config, loopback=world > 1)
            self._processes.append(process)
            ranks.append(process)
        handle = _LocalHandle(name, ranks)
        for process in ranks:
            await process.connect()
        await self.rebuild(handle, parts, context)
        return handle

    async def rebuild(self, handle: Handle, parts: Sequence[Spec], context: Context) -> None:
        if not isinstance(handle, _LocalHandle):
            raise TypeError(f"{handle.name} was not started by this runtime")
        master = f"127.0.0.1:{_free_port()}" if handle.world > 1 else ""
        around = replace(context, world=handle.world, master=master)
        await asyncio.gather(
            *(
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
                    timeout=self.config.start_timeout_s,
                )
                for rank, process in enumerate(handle.ranks)
            )
        )

    async def stop(self) -> None:
        processes, self._processes = self._processes, []
        await asyncio.gather(*(p.stop() for p in processes))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _LocalHandle:
    def __init__(self, name: str, ranks: list[_Process]) -> None:
        self.name = name
        self.ranks = ranks
        self.world = len(ranks)

    async def call(
        self, target: str, *args: Any, rank: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        return await self.ranks[rank].call(target, *args, timeout=timeout, **kwargs)

    async def call_all(
        self, target: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        if self.world == 1:
            return [await self.ranks[0].call(target, *args, timeout=timeout, **kwargs)]
        calls = [r.call(target, *args, timeout=timeout, **kwargs) for r in self.ranks]
        return list(await asyncio.gather(*calls))


class _Process:
    """One worker process and the calls that are open in it."""

    def __init__(self, name: str, log: Path, config: Local.Config, *, loopback: bool) -> None:
        self.name = name
        self._log = log
        self._config = config
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._last_seen = time.monotonic()
        self._stopping = self._lost = False
        self._watch: asyncio.Task[None] | None = None
        self._connection = Connection(self._on_frame, self._on_lost)
        ours, theirs = socket.socketpair()
        self._sock = ours
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        if loopback:
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        command = [sys.executable, "-m", "miles.worker", "--name", name]
        command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        with log.open("ab") as output, theirs:
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
        await loop.create_connection(lambda: self._connection, sock=self._sock)
        self._watch = loop.create_task(self._watch_silence(), name=f"watch {self.name}")

    async def call(
        self, target: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        if self._stopping or self._lost:
            raise self._dead(f"cannot call {target}")
        self._next += 1
        number = self._next
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._connection.send([number, target, args, kwargs])
        self._open[number] = future
        try:
            if timeout is None:
                return await future
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise WorkerError(
                f"{self.name}: {target} did not answer within {timeout:g} s; see {self._log}"
            ) from None
        finally:
            self._open.pop(number, None)

    def _on_frame(self, frame: Any) -> None:
        self._last_seen = time.monotonic()
        kind, number, *rest = frame
        if kind == "beat":
            return
        future = self._open.get(number)
        if future is None or future.done():
            return
        if kind == "ok":
            future.set_result(rest[0])
        else:
            future.set_exception(error_from_wire(rest[0], self.name))

    def _on_lost(self) -> None:
        self._lost = True
        self._fail_all("ended")

    def _fail_all(self, what: str) -> None:
        waiting = [future for future in self._open.values() if not future.done()]
        if not waiting:
            return
        seen = self._dead(what)  # once: finding out how the process ended may take a moment
        for future in waiting:
            error = WorkerError(str(seen))
            for note in getattr(seen, "__notes__", ()):
                error.add_note(note)
            future.set_exception(error)

    def _dead(self, what: str) -> WorkerError:
        try:
            code = self._process.wait(timeout=0 if self._stopping else 0.5)
        except subprocess.TimeoutExpired:
            code = None
        state = "is still running" if code is None else f"exit code {code}"
        error = WorkerError(f"{self.name}: the worker process {what} ({state}); see {self._log}")
        if self._log.exists() and (tail := _tail(self._log)):
            error.add_note(f"last lines of {self._log.name}:\n{tail}")
        return error

    async def _watch_silence(self) -> None:
        every = min(5.0, self._config.silent_after_s / 4)
        while True:
            await asyncio.sleep(every)
            silent = time.monotonic() - self._last_seen
            if self._open and silent > self._config.silent_after_s:
                self._fail_all(f"sent nothing for {silent:.0f} s")

    async def stop(self) -> None:
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
        self._connection.close()
        deadline = time.monotonic() + self._config.stop_timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the session: its children too
        self._process.wait()
        self._fail_all("was stopped")


def _tail(log: Path, lines: int = 15) -> str:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 8192))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
