"""Calls over a connection: numbered questions, their answers, streams of items, and cancels.

Both ends are here. What a frame may hold is `miles.wire.frames`; which process is at the other end,
and what becomes of it, is a runtime's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Protocol

from miles.errors import WorkerError
from miles.wire.frames import Connection, error_from_wire, error_to_wire

__all__ = ["Answerer", "Caller", "Peer", "call_ranks", "keep_alive", "whereabouts"]

_NAMES = 3  # of ranks that are at the same
_MOST_ITEMS = 65536  # of one stream that nobody has read yet
_ASK_S = 1.0  # for a worker to say what it is at
_HELLO_LIMIT = 1024  # bytes of a frame before the other end has shown its token


def keep_alive(sock: socket.socket) -> None:
    """Send at once, and have the kernel end a connection whose other host is gone without a word,
    or takes no data, within two minutes (Linux; elsewhere in its own time)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 120_000),
    ):  # fmt: skip
        if (number := getattr(socket, option, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, number, value)


class Caller:
    """The asking end. `dead(what)` makes the error for calls that can no longer be answered, and
    `signalled()` has one that no longer answers say by a signal what it is at."""

    def __init__(
        self,
        name: str,
        dead: Callable[[str], WorkerError],
        signalled: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self.name = name
        self.connection = Connection(self._on_frame, self._on_lost)
        self.lost = False
        """The connection has ended."""
        self.last_seen = time.monotonic()
        """When the last frame came, heartbeats included."""
        self._dead = dead
        self._signalled = signalled
        self._open: dict[int, asyncio.Future[Any] | asyncio.Queue[Any]] = {}
        self._asked: dict[int, tuple[str, float]] = {}  # what, and when
        self._next = 0

    def owed(self) -> list[tuple[str, float]]:
        """(target, seconds since it was called) of every call that has no answer yet."""
        now = time.monotonic()
        return [(target, now - since) for target, since in self._asked.values()]

    async def where(self) -> str:
        """What the other end, a worker, is at, in words: as it says where its event loop is free,
        otherwise as a signal has it say, which can harm one that works."""
        with contextlib.suppress(TimeoutError, WorkerError):
            words: str = await self.call("worker.stacks", (), {}, _ASK_S)
            return words
        return "" if self._signalled is None else await self._signalled()

    async def watch_silence(self, silent_after_s: float) -> None:
        """Fail open calls when nothing came for so long, heartbeats included, and name the oldest.
        Ends only when cancelled."""
        while True:
            await asyncio.sleep(min(5.0, silent_after_s / 4))
            silent = time.monotonic() - self.last_seen
            if not self._open or silent <= silent_after_s:
                continue
            where = "" if self._signalled is None else f", {await self.where()}"
            if self._open and time.monotonic() - self.last_seen >= silent:
                (target, seconds), *more = self.owed()
                rest = f" and {len(more)} more" if more else ""
                self.fail(
                    f"sent nothing for {silent:.0f} s (silent_after_s is {silent_after_s:g}) and "
                    f"owes {target}, {seconds:.0f} s{rest}{where}"
                )

    async def call(
        self, target: str, args: Sequence[Any], kwargs: dict[str, Any], timeout: float | None
    ) -> Any:
        """The answer of `part.method`. Raises what it raised; `WorkerError` when the other end is
        gone; `TimeoutError` after `timeout` seconds. What is given up here is cancelled there."""
        loop = self.connection.loop or asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        number = self._ask(target, args, kwargs, future)
        try:
            if timeout is None:
                return await future
            async with asyncio.timeout(timeout):
                return await future
        except (asyncio.CancelledError, TimeoutError):
            self._cancel(number)
            raise
        finally:
            self._open.pop(number, None)
            self._asked.pop(number, None)

    async def stream(self, target: str, args: Sequence[Any]) -> AsyncIterator[Any]:
        """The items of an async generator method as they come; leaving early cancels it there."""
        queue: asyncio.Queue[Any] = asyncio.Queue(_MOST_ITEMS)
        number = self._ask(target, args, {}, queue)
        ended = False
        try:
            while True:
                kind, value = await queue.get()
                if kind == "item":
                    yield value
                    continue
                ended = True
                if kind == "error":
                    raise value
                return
        finally:
            self._open.pop(number, None)
            self._asked.pop(number, None)
            if not ended:
                self._cancel(number)

    def _ask(self, target: str, args: Sequence[Any], kwargs: dict[str, Any], where: Any) -> int:
        if self.lost:
            raise self._dead(f"cannot answer {target}")
        self._next += 1
        self.connection.send([self._next, target, args, kwargs])
        self._open[self._next] = where
        self._asked[self._next] = (target, time.monotonic())
        return self._next

    def _cancel(self, number: int) -> None:
        if not self.lost:
            self.connection.send([number, "", (), {}])

    def _on_frame(self, frame: Any) -> None:
        self.last_seen = time.monotonic()
        kind, number, *rest = frame
        if kind == "beat":
            return
        place = self._open.get(number)
        if place is None:
            return
        value = error_from_wire(rest[0], self.name) if kind == "error" else rest[0]
        if isinstance(place, asyncio.Queue):
            self._put(place, kind, value)
        elif place.done():
            return
        elif kind == "error":
            place.set_exception(value)
        else:
            place.set_result(value)

    def _put(self, queue: asyncio.Queue[Any], kind: str, value: Any) -> None:
        if queue.full():  # the reader is stuck: end its stream rather than hold everything
            while not queue.empty():
                queue.get_nowait()
            text = f"{self.name}: {_MOST_ITEMS} items of a stream were not read"
            kind, value = "error", WorkerError(text)
        queue.put_nowait((kind, value))

    def _on_lost(self) -> None:
        self.lost = True
        self.fail("ended")

    def fail(self, what: str) -> None:
        """Answer every open call with the error of `dead(what)`."""
        places = list(self._open.values())
        if not places:
            return
        seen = self._dead(what)  # once: finding out how a process ended may take a moment
        for place in places:
            error = WorkerError(str(seen))
            for note in getattr(seen, "__notes__", ()):
                error.add_note(note)
            if isinstance(place, asyncio.Queue):
                self._put(place, "error", error)
            elif not place.done():
                place.set_exception(error)


class _Rank(Protocol):
    name: str

    async def where(self) -> str: ...


async def whereabouts(ranks: Sequence[_Rank]) -> str:
    """What ranks are at, in one line: those at the same together, and the fewest first; of one
    rank, without its name."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for rank, words in zip(ranks, await asyncio.gather(*(r.where() for r in ranks)), strict=True):
        alike[words].append(rank.name)
    if len(ranks) == 1:
        return words
    told = []
    for words, names in sorted(alike.items(), key=lambda item: len(item[1])):
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        told.append(f"{', '.join(names[:_NAMES])}{more}: {words}")
    return "; ".join(told)


async def call_ranks(
    ranks: Sequence[_Rank], calls: Sequence[Awaitable[Any]], timeout: float | None
) -> list[Any]:
    """What the calls give, one of each rank. The error of a rank that did not answer within
    `timeout` seconds says in a note what every rank is at: those that work together all wait for
    the one that is elsewhere."""
    began = time.monotonic()
    try:
        return list(await asyncio.gather(*calls))
    except WorkerError as error:
        if len(ranks) > 1 and timeout is not None and time.monotonic() - began >= timeout:
            error.add_note(f"what its ranks are at: {await whereabouts(ranks)}")
        raise


class Answerer:
    """The answering end: looks methods up, runs them, sends what they give.

    Coroutines and async generators run in the event loop and can be cancelled from the other end;
    other methods run in `executor`, one after the other. With a `token`, nothing is answered before
    the other end has sent it.
    """

    def __init__(
        self,
        find: Callable[[str], Any],
        *,
        executor: Executor,
        on_lost: Callable[[], None],
        token: str | None = None,
    ) -> None:
        self.connection = Connection(self._on_frame, self._on_lost)
        self._find = find
        self._executor = executor
        self._ended = on_lost
        self._token = token
        self._tasks: dict[int, asyncio.Task[None]] = {}
        if token is not None:
            self.connection.limit = _HELLO_LIMIT

    def _on_lost(self) -> None:
        for task in self._tasks.values():  # nobody is there to hear what they would say
            task.cancel()
        self._ended()

    def _on_frame(self, frame: Any) -> None:
        if self._token is not None:
            self._greet(frame)
            return
        number, target, args, kwargs = frame
        if not target:
            if (running := self._tasks.get(number)) is not None:
                running.cancel()
            return
        answer = self._answer(number, target, args, kwargs)
        task = asyncio.get_running_loop().create_task(answer, name=target)
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def given_up(self) -> list[asyncio.Task[None]]:
        """Answers that the other end cancelled and that have not ended yet."""
        return [task for task in self._tasks.values() if task.cancelling()]

    def _greet(self, frame: Any) -> None:
        said = frame[1] if isinstance(frame, list) and frame[:1] == ["hello"] else None
        known = isinstance(said, str) and hmac.compare_digest(said, self._token or "")
        if not known:
            self.connection.close()
            return
        self._token = self.connection.limit = None

    async def _answer(
        self, number: int, target: str, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        send = self.connection.send
        try:
            method = self._find(target)
            if inspect.isasyncgenfunction(method):
                result = None
                async for item in method(*args, **kwargs):
                    send(["item", number, item])
            elif inspect.iscoroutinefunction(method):
                result = await method(*args, **kwargs)
            else:
                loop = asyncio.get_running_loop()
                work = partial(_called, method, args, kwargs)
                result = await loop.run_in_executor(self._executor, work)
            send(["ok", number, result])
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the boundary: raised again at the other end
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the other end gave the call up; otherwise, something inside was cancelled
            send(["error", number, error_to_wire(error)])


def _called(method: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return method(*args, **kwargs)
    except StopIteration as error:  # no future takes one: whoever waits would wait for ever
        raise RuntimeError("StopIteration, of an iterator that is used up") from error


class Peer:
    """A handle on a worker that another process started and that listens: one rank, a token."""

    world = 1

    def __init__(self, name: str, caller: Caller, address: tuple[str, int]) -> None:
        self.name = name
        self.address = address
        """Host and port at which the worker listens."""
        self._caller = caller

    @classmethod
    async def dial(cls, name: str, address: tuple[str, int], token: str, timeout: float) -> Peer:
        """Connect. Raises `WorkerError` when nobody listens there."""
        return cls(name, await cls._connect(name, address, token, timeout), address)

    async def redial(self, address: tuple[str, int], token: str, timeout: float) -> None:
        """Connect anew, to where the worker of this name listens now; calls that the old one
        never answered fail. Raises as `dial`."""
        self._caller.connection.close()
        self._caller.fail("is replaced by another")  # a host that vanished would never say so
        self._caller = await self._connect(self.name, address, token, timeout)
        self.address = address

    @staticmethod
    async def _connect(name: str, address: tuple[str, int], token: str, timeout: float) -> Caller:
        host, port = address

        def dead(what: str) -> WorkerError:
            return WorkerError(f"{name}: the worker at {host}:{port} {what}")

        caller = Caller(name, dead)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                transport, _ = await loop.create_connection(lambda: caller.connection, host, port)
        except (OSError, TimeoutError) as error:
            raise dead(f"cannot be reached: {error or 'no answer'}") from None
        if (sock := transport.get_extra_info("socket")) is not None:
            keep_alive(sock)
        caller.connection.send(["hello", token])
        return caller

    @property
    def lost(self) -> bool:
        """The connection has ended."""
        return self._caller.lost

    async def call(
        self, target: str, *args: Any, rank: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """See `miles.Handle`."""
        try:
            return await self._caller.call(target, args, kwargs, timeout)
        except TimeoutError:
            text = f"{self.name}: {target} did not answer within {timeout:g} s"
            raise WorkerError(text) from None

    async def call_all(
        self, target: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """See `miles.Handle`."""
        return [await self.call(target, *args, timeout=timeout, **kwargs)]

    def stream(self, target: str, *args: Any, rank: int = 0) -> AsyncIterator[Any]:
        """See `miles.Handle`."""
        return self._caller.stream(target, args)

    def close(self) -> None:
        """Hang up."""
        self._caller.connection.close()
