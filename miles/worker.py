"""The one entry of every worker process: `python -m miles.worker --fd N --name NAME`.

A worker receives names and plain configs over an inherited socket, loads the same plugins as its
driver, builds the parts through the same factories, and answers calls (`miles.wire.calls`). It ends
when its driver does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles import checkpoint
from miles.errors import PluginVersionError, WeightSyncError, WorkerError
from miles.identity import process_identity
from miles.plugins import Registry, compare_provenance
from miles.protocols import Context, Spec
from miles.stacks import answer_with_stacks, own_stacks
from miles.threads import take_turns
from miles.wire.calls import Answerer
from miles.wire.frames import Connection
from miles.workers.rollouts import Rollouts

__all__ = ["main"]

HEARTBEAT_S = 1.0
END_S = 3.0  # for what episodes left open
REPLACE_S = 15.0  # the same, before others take its place: an engine may hold a whole GPU
FOR_OTHERS = ("model", "precision", "tito", "sandbox", "environment")  # fields of a `Context`


PEERS_MAY = ("engine.generate", "engine.stream", "engine.score", "engine.abort", "engine.version",
             "engine.health")  # fmt: skip


FOR_THE_DRIVER = ("build", "listen", "load_snapshot", "identity", "meeting", "stacks")
"""As `worker.<name>`."""


class Worker:
    """Parts by name, and the calls on them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: dict[str, Any] = {}
        self._registry: Registry | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="call")
        self._lost = asyncio.Event()
        self._answerer = Answerer(self._method, executor=self._thread, on_lost=self._lost.set)
        self._peers: weakref.WeakSet[Answerer] = weakref.WeakSet()
        self._door: asyncio.Server | None = None
        self._meeting: socket.socket | None = None

    async def serve(self, sock: socket.socket) -> None:
        """Answer calls until the driver closes the socket."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self._answerer.connection, sock=sock)
        beat = loop.create_task(self._heartbeat())
        await self._lost.wait()
        beat.cancel()
        await self._end_parts(END_S)

    async def _end_parts(self, limit: float) -> None:
        """Close what episodes left open (boxes, servers) and what an engine holds, in `limit`
        seconds."""
        ends = []
        if (rollouts := self.parts.pop("rollouts", None)) is not None:
            ends.append(rollouts.end())
        engine = self.parts.pop("engine", None)
        if (close := getattr(engine, "close", None)) is not None:
            ends.append(close())
        if ends:
            await asyncio.wait({asyncio.create_task(end) for end in ends}, timeout=limit)

    async def _let_go(self, limit: float) -> None:
        """Wait for calls that were given up: until they end they hold the part that they were asked
        of, and its memory with it."""
        answerers = (self._answerer, *self._peers)
        if left := [task for one in answerers for task in one.given_up()]:
            await asyncio.wait(left, timeout=limit)

    async def _heartbeat(self) -> None:
        while True:
            self._answerer.connection.send(["beat", time.time()])
            await asyncio.sleep(HEARTBEAT_S)

    async def listen(self, host: str, token: str) -> list[Any]:
        """Let other workers that know `token` ask the engine here; (host, port) to dial."""
        if self._door is None:
            loop = asyncio.get_running_loop()
            self._door = await loop.create_server(lambda: self._peer(token), host, 0)
        name = self._door.sockets[0].getsockname()
        return [name[0], name[1]]

    async def identity(self) -> str:
        """Which process this is, as `miles.process_identity` says it."""
        return process_identity()

    async def stacks(self) -> str:
        """What its threads are at, in words; their stacks are in its log then."""
        return own_stacks()

    async def meeting(self, host: str) -> list[int]:
        """Hold a port of `host` for the ranks to meet at, until the next time: the port, and the
        descriptor of the socket, bound and not listening yet. Nobody else can take it before this
        rank listens there."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
        if self._meeting is not None:
            self._meeting.close()
        self._meeting = sock
        return [sock.getsockname()[1], sock.fileno()]

    async def load_snapshot(self, directory: str, version: int, sealed: bool) -> int:
        """Have the engine serve the weights of a checkpoint, every file checked against its
        manifest first when it is `sealed` by one; the version it then says. Raises
        `CheckpointError`, `WeightSyncError`."""
        where = Path(directory)
        if sealed:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, checkpoint.verify, where)
        engine = self.parts["engine"]
        if (load := getattr(engine, "load_directory", None)) is None:
            raise WeightSyncError(
                f"{self.name}: engine {type(engine).__name__} cannot read a checkpoint (it has no "
                "load_directory)"
            )
        await load(version, where / "model" if sealed else where)
        return int(await engine.version())

    def _peer(self, token: str) -> Connection:
        answerer = Answerer(
            self._engine_method, executor=self._thread, on_lost=lambda: None, token=token
        )
        self._peers.add(answerer)
        return answerer.connection

    def _engine_method(self, target: str) -> Any:
        if target not in PEERS_MAY:
            raise WorkerError(f"{self.name}: other workers may not call {target}")
        return self._method(target)

    def _method(self, target: str) -> Any:
        part, _, name = target.partition(".")
        if part == "worker" and name in FOR_THE_DRIVER:
            return getattr(self, name)
        if part not in self.parts or name.startswith("_"):
            raise WorkerError(f"{self.name}: no part {part!r} (has: {', '.join(self.parts)})")
        return getattr(self.parts[part], name)

    async def build(
        self,
        parts: list[Spec],
        plugins: Mapping[str, Any],
        context: Mapping[str, Any],
    ) -> list[str]:
        """Build `parts` in order, replacing what was built before; the names of what there is
        now."""
        await self._end_parts(REPLACE_S)
        await self._let_go(REPLACE_S)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._build, parts, plugins, context)

    def _build(
        self, parts: list[Spec], plugins: Mapping[str, Any], context: Mapping[str, Any]
    ) -> list[str]:
        if self._registry is None:
            self._registry = Registry.load(**plugins.get("selection", {}))
            theirs = plugins.get("provenance", {})
            mine = self._registry.provenance()
            if theirs and (lines := compare_provenance(theirs, mine)):
                raise PluginVersionError(
                    f"{self.name}: plugins differ from the driver's: {'; '.join(lines)}"
                )
        self.parts.clear()
        gc.unfreeze()  # or what was built before would stay for ever, where it holds on to itself
        gc.collect()
        around = Context(
            directory=Path(context["directory"]),
            plugins=plugins,
            rewards=self._registry.rewards(),
            tools=self._registry.tools(),
            agents=self._registry.agents(),
            **{k: context[k] for k in ("seed", "settings", "rank", "world", "master")},
        )
        for spec in parts:  # before any part is built: libraries read them once
            os.environ.update(self._registry.variables(spec))
        for spec in parts:
            part = self._registry.build(spec, around)
            self.parts[spec.part or spec.kind] = part
            if spec.kind in FOR_OTHERS and not spec.part:
                around = replace(around, **{spec.kind: part})
        if "environment" in self.parts:
            self.parts["rollouts"] = Rollouts(self.parts, around)
            gc.set_threshold(50_000, 20, 50)  # as in the driver: attempts make many objects
        gc.freeze()  # what is imported by now stays: the collector need not walk it again and again
        if (transport := self.parts.get("transport")) is not None:
            if "trainer" in self.parts:
                self.parts["sender"] = transport.sender(self.parts["trainer"])
            if "engine" in self.parts:
                self.parts["receiver"] = transport.receiver(self.parts["engine"])
        return list(self.parts)


def _die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the driver is gone, however it went (Linux; elsewhere the
    socket tells)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def main() -> None:
    """Parse the command line and serve."""
    answer_with_stacks()  # first: who started this process held the signal back until here
    parser = argparse.ArgumentParser(
        prog="miles.worker", description="internal: started by a runtime"
    )
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    _die_with_parent(args.parent)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("miles", "miles_plugins"):  # libraries tell every request
        logging.getLogger(name).setLevel(logging.INFO)
    take_turns()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    sock = socket.socket(fileno=args.fd)
    sock.setblocking(False)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Worker(args.name).serve(sock))
    sys.stdout.flush()
    os._exit(0)  # a call may still sit in a thread; nothing here is worth waiting for


if __name__ == "__main__":
    main()
