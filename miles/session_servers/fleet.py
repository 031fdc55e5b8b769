"""`miles sessions serve workers=N`: several session servers as processes behind one address.

Each has its own part of the sessions and its own journal. One that dies is started again on its
journal; all of them end with this process, however it ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles.errors import WorkerError
from miles.plugins import Registry
from miles.serving.daemon import asked_to_stop
from miles.session.server import make_front, serve
from miles.session_servers.command import planned, refuse_another_number, serve_alone
from miles.settings import Settings
from miles.stacks import answer_with_stacks
from miles.threads import take_turns

__all__ = ["main", "serve_fleet"]

_START_S = 120.0
_STOP_S = 30.0
_RESTARTS = 3  # of one server, before all are given up
_SAYS = "sessions are served at "


class _Worker:
    """One server process: started, asked where it is, started again."""

    def __init__(self, name: str, order: str) -> None:
        self.name, self.address = name, ""
        self._order = order
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises `WorkerError` when it does not say where it is."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "miles.session_servers.fleet",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        if process.stdin is None or process.stdout is None:
            raise WorkerError(f"{self.name}: it has no pipes")
        process.stdin.write(self._order.encode() + b"\n")
        try:
            async with asyncio.timeout(_START_S):
                line = (await process.stdout.readline()).decode().strip()
        except TimeoutError:
            line = ""
        if not line.startswith(_SAYS):
            await self.stop()
            raise WorkerError(f"{self.name}: it did not start; what it said is above")
        self.address = line.removeprefix(_SAYS)

    async def ended(self) -> int:
        """Its exit status, once there is one."""
        if self._process is None:
            return 0
        if self._process.stdout is not None:
            await self._process.stdout.read()  # a pipe that is full would stop it
        return await self._process.wait()

    async def stop(self) -> None:
        """Close its input, which it ends with; kill it when it does not."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self.ended()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def watch(self) -> None:
        """Start it again when it dies. Raises `WorkerError` when that does not help."""
        for count in range(_RESTARTS + 1):
            status = await self.ended()
            print(f"miles: {self.name} ended with {status}", file=sys.stderr, flush=True)
            if count < _RESTARTS:
                await self.start()
        raise WorkerError(f"{self.name}: it died {_RESTARTS + 1} times")


async def serve_fleet(
    overrides: Sequence[str],
    *,
    workers: int,
    directory: Path,
    token: str,
    settings: Settings,
    registry: Any,
    folders: Sequence[str],
) -> int:
    """Serve from several processes until SIGINT or SIGTERM.

    Raises `ConfigError` when the directory holds the sessions of another number of servers, whose
    ids would now belong elsewhere, and `WorkerError` when a server cannot be kept up.
    """
    refuse_another_number(directory, workers)
    fleet = []
    for index in range(workers):
        own = directory / f"server-{index}"
        own.mkdir(exist_ok=True)
        _give(own / "admin_token", token)
        words = [*overrides, f"run.dir={directory}", f"run.name={own.name}", "host=127.0.0.1"]
        order = {
            "overrides": [*words, "port=0"],
            "folders": list(folders),
            "selection": registry.selection,
        }
        fleet.append(_Worker(f"session server {index}", json.dumps(order)))
    try:
        await asyncio.gather(*(worker.start() for worker in fleet))
        app = make_front(lambda: [worker.address for worker in fleet])
        async with serve(app, settings.session.host, settings.session.port) as address:
            print(f"{_SAYS}{address}", flush=True)
            print(f"{workers} processes; the token is in {directory / 'admin_token'}", flush=True)
            await _until_stopped(fleet)
    finally:
        await asyncio.gather(*(worker.stop() for worker in fleet))
    return 0


async def _until_stopped(fleet: Sequence[_Worker]) -> None:
    stop = asyncio.create_task(asked_to_stop(), name="signals")
    watches = [asyncio.create_task(w.watch(), name=f"watch {w.name}") for w in fleet]
    try:
        await asyncio.wait({stop, *watches}, return_when=asyncio.FIRST_COMPLETED)
        for task in watches:
            if task.done():
                task.result()
    finally:
        for task in (stop, *watches):
            task.cancel()
        await asyncio.gather(stop, *watches, return_exceptions=True)


def _give(path: Path, token: str) -> None:
    path.touch(mode=0o600)
    path.write_text(token, encoding="utf-8")


# ---------------------------------------------------------------- in a server process


def main() -> int:
    """What a server process runs: its order is the first line of its input, the end of which is
    its own."""
    answer_with_stacks()
    take_turns()
    order = json.loads(sys.stdin.readline())
    registry = Registry.load(**order["selection"])
    plan = planned(order["overrides"], registry=registry, folders=order["folders"])

    async def until_end_of_input() -> None:
        await asyncio.to_thread(sys.stdin.read)

    with suppress(KeyboardInterrupt):  # the front hears the same and ends all
        asyncio.run(serve_alone(plan.stages[0], plan.registry, until=until_end_of_input))
    return 0


if __name__ == "__main__":
    sys.exit(main())
