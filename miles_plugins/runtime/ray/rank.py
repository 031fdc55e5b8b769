"""The driver's end of one worker: its actor, which keeps the process, and its connection, through
which it is called.

Where an actor goes, and what becomes of a dead one, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

from miles import Caller, ConfigError, MilesError, WorkerError, call_ranks, keep_alive, whereabouts
from miles_plugins.runtime.ray.cluster import Cluster
from miles_plugins.runtime.ray.layout import Node

__all__ = ["Rank", "RayHandle"]

_WORD_S = 1.0  # for the actor, or Ray, to say how a worker ended
_LOST_S = 0.2  # for the end of a connection to be seen here
_ANSWER_S = 5.0  # for an actor to do what takes no time


class Rank:
    """One rank of a component."""

    def __init__(
        self, name: str, title: str, actor: Any, node: Node, cluster: Cluster, *, log: str
    ) -> None:
        self.name = name
        self.title = title
        """Its name, rank and host, for errors."""
        self.actor = actor
        self.node = node
        self.host = node.address
        """Name and address of its host."""
        self.machine = ""
        """Tells its machine from others."""
        self.bind = ""
        """Address at which what is started beside the worker may listen."""
        self.devices: str | None = None
        """Its CUDA_VISIBLE_DEVICES."""
        self.caller = Caller(name, self.gone, self._signalled)
        self._cluster = cluster
        self._log = log
        self._stopping = False
        self._ended: Any = None
        self._watch: asyncio.Task[None] | None = None

    async def meet(self, token: str, *, timeout_s: float, silent_after_s: float) -> None:
        """Call the actor's address and show the token; then there is a worker process. Raises
        `WorkerError`, and `ConfigError` when the host lacks something."""
        found = await self.ask("ready", timeout_s=timeout_s)
        self.host = f"{found['host']} ({self.node.address})"
        self.caller.name = self.title = f"{self.title} on {self.host}"
        if found["fault"]:
            raise ConfigError(f"runtime ray: {self.title}: {found['fault']}")
        self.bind, self.devices = found["address"], found["devices"]
        self.machine = found["machine"]
        self._ended = self.actor.wait.remote().future()
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET6 if ":" in self.bind else socket.AF_INET)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(sock, (self.bind, found["port"]))
                await loop.sock_sendall(sock, token.encode())
            keep_alive(sock)
            await loop.create_connection(lambda: self.caller.connection, sock=sock)
        except (OSError, TimeoutError) as error:
            sock.close()
            raise WorkerError(
                f"{self.title}: {self.bind}:{found['port']} cannot be reached from the driver "
                f"({error or 'no answer'}); runtime.network chooses the network that hosts share"
            ) from None
        self._watch = loop.create_task(
            self.caller.watch_silence(silent_after_s), name=f"watch {self}"
        )

    async def ask(self, method: str, *args: Any, timeout_s: float = _ANSWER_S) -> Any:
        """Call the actor itself. Raises `WorkerError`."""
        from ray.exceptions import RayError

        try:
            async with asyncio.timeout(timeout_s):
                reference = getattr(self.actor, method).remote(*args)
                return await asyncio.wrap_future(reference.future())
        except TimeoutError:
            raise WorkerError(
                f"{self.title}: its actor did not answer {method} within {timeout_s:g} s"
            ) from None
        except RayError as error:
            raise WorkerError(f"{self.title}: {_cause(error)}") from None

    async def call(
        self, target: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """See `miles.Handle`."""
        if self._stopping:
            raise self.gone(f"cannot call {target}")
        try:
            return await self.caller.call(target, args, kwargs, timeout)
        except TimeoutError:
            raise WorkerError(
                f"{self.title}: {target} did not answer within {timeout:g} s, "
                f"{await self.where()}; see {self._log}"
            ) from None
        except WorkerError:
            raise  # it names the worker
        except MilesError as error:
            error.add_note(f"raised in {self.title}")
            raise

    async def where(self) -> str:
        """What the worker is at, in words."""
        return await self.caller.where()

    async def _signalled(self) -> str:
        """The same, by the stacks that its actor has it write."""
        try:
            words: str = await self.ask("stacks")
        except WorkerError:
            return "no stacks, since its actor does not answer"
        return words

    def gone(self, what: str) -> WorkerError:
        """The error of a worker that `what`, with how it ended and the end of its log."""
        state, tail = self._how_it_ended()
        error = WorkerError(f"{self.title}: the worker process {what} ({state}); see {self._log}")
        if tail:
            error.add_note(f"last lines of {self._log}:\n{tail}")
        return error

    def _how_it_ended(self) -> tuple[str, str]:
        """Words, and the end of its log. May wait a moment for Ray to know."""
        from ray.exceptions import RayError

        if self._ended is None:
            return "it never started", ""
        try:
            report: Mapping[str, Any] = self._ended.result(0 if self._stopping else _WORD_S)
        except TimeoutError:
            return "was stopped" if self._stopping else "its actor still says that it runs", ""
        except RayError as error:
            return _cause(error), ""
        if report["fault"]:
            return report["fault"], report["tail"]
        return f"exit code {report['code']}", report["tail"]

    async def stop(self, *, grace_s: float) -> None:
        """End the worker with its children, then its actor, however stuck they are."""
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
        self.caller.connection.close()
        with contextlib.suppress(WorkerError):  # the actor is gone, and its worker with it
            await self.ask("end", grace_s, timeout_s=grace_s + _ANSWER_S)
        with contextlib.suppress(TimeoutError):  # a head that is gone answers nothing
            async with asyncio.timeout(_ANSWER_S):
                await self._cluster.do(self._cluster.kill, self.actor)
        self.caller.fail("was stopped")

    def __str__(self) -> str:
        return self.title


def _cause(error: Exception) -> str:
    """What Ray says of a dead actor, without its ids and its advice."""
    lines = [line for line in str(error).splitlines() if line and not line[0].isspace()]
    return "its actor is gone: " + " ".join(lines).partition(" Some common causes")[0]


class RayHandle:
    """See `miles.Handle`."""

    def __init__(self, name: str, ranks: list[Rank]) -> None:
        self.name = name
        self.ranks = ranks

    @property
    def world(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    @property
    def bind(self) -> str:
        """Address of rank 0's host at which it may listen."""
        return self.ranks[0].bind

    @property
    def machines(self) -> list[str]:
        """Which machine each rank is on: workers of one share its memory."""
        return [rank.machine for rank in self.ranks]

    @property
    def lost(self) -> bool:
        """Whether the connection to a rank has ended."""
        return any(rank.caller.lost for rank in self.ranks)

    def owed(self) -> list[tuple[str, float]]:
        """See `miles.Handle`."""
        return [each for rank in self.ranks for each in rank.caller.owed()]

    async def call(
        self, target: str, *args: Any, rank: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """See `miles.Handle`."""
        return await self.ranks[rank].call(target, *args, timeout=timeout, **kwargs)

    async def call_all(
        self, target: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """See `miles.Handle`."""
        calls = [rank.call(target, *args, timeout=timeout, **kwargs) for rank in self.ranks]
        try:
            return await call_ranks(self.ranks, calls, timeout)
        except MilesError as error:
            await asyncio.sleep(_LOST_S)
            # of ranks that work together, the others fail because one is gone
            for rank in self.ranks:
                if rank.caller.lost:
                    raise rank.gone(f"ended during {target}") from error
            raise

    async def where(self) -> str:
        """See `miles.Handle`."""
        return await whereabouts(self.ranks)

    def stream(self, target: str, *args: Any, rank: int = 0) -> AsyncIterator[Any]:
        """See `miles.Handle`."""
        return self.ranks[rank].caller.stream(target, args)
