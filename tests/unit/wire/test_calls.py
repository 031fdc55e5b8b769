"""Both ends of a connection, over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from miles import ConfigError, WorkerError
from miles.wire.calls import Answerer, Caller, Peer


class Part:
    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.begun = asyncio.Event()

    def plain(self, x: int) -> int:
        return x + 1

    async def wait(self) -> None:
        self.begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.append("wait")
            raise

    async def count(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                yield i
                await asyncio.sleep(0)
        finally:
            self.cancelled.append("count")

    async def broken(self) -> AsyncIterator[int]:
        yield 1
        raise ConfigError("half way")

    async def not_to_be_worded(self) -> None:
        class Odd(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no words")

        raise Odd

    async def no_bytes(self) -> None:
        raise ValueError("x \ud800 y")

    async def nothing_to_send(self) -> str:
        return "\ud800"

    async def inner_cancelled(self) -> None:
        inner = asyncio.ensure_future(asyncio.sleep(60))
        inner.cancel()
        await inner

    async def base(self) -> None:
        raise BaseExceptionGroup("two", [KeyError(1), asyncio.CancelledError()])

    def used_up(self) -> None:
        next(iter(()))

    async def items_cancelled(self) -> AsyncIterator[int]:
        yield 1
        raise asyncio.CancelledError


def run(body: Callable[[Caller, Part, Answerer], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        part, pool = Part(), ThreadPoolExecutor(1)
        ours, theirs = socket.socketpair()
        answerer = Answerer(lambda t: getattr(part, t), executor=pool, on_lost=lambda: None)
        caller = Caller("odd", lambda what: WorkerError(f"odd {what}"))
        for connection, sock in ((answerer.connection, theirs), (caller.connection, ours)):
            sock.setblocking(False)
            await loop.create_connection(lambda c=connection: c, sock=sock)  # type: ignore[misc]
        await asyncio.wait_for(body(caller, part, answerer), 20)
        caller.connection.close()
        pool.shutdown()

    asyncio.run(main())


def test_calls_answer_functions_coroutines_and_generators() -> None:
    async def body(caller: Caller, part: Part, answerer: Answerer) -> None:
        assert await caller.call("plain", [1], {}, None) == 2
        assert [i async for i in caller.stream("count", [5])] == [0, 1, 2, 3, 4]
        assert caller.owed() == []

    run(body)


def test_calls_cancelled_here_are_cancelled_there() -> None:
    async def body(caller: Caller, part: Part, answerer: Answerer) -> None:
        task = asyncio.create_task(caller.call("wait", [], {}, None))
        await part.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        items = caller.stream("count", [100000])
        assert await anext(items) == 0
        await items.aclose()  # type: ignore[attr-defined]
        while len(part.cancelled) < 2:
            await asyncio.sleep(0.01)
        assert sorted(part.cancelled) == ["count", "wait"] and caller.owed() == []

    run(body)


def test_calls_that_time_out_are_cancelled_there() -> None:
    async def body(caller: Caller, part: Part, answerer: Answerer) -> None:
        with pytest.raises(TimeoutError):
            await caller.call("wait", [], {}, 0.05)
        while not part.cancelled:
            await asyncio.sleep(0.01)

    run(body)


def test_calls_to_a_silent_end_fail_and_say_what_was_waited_for() -> None:
    """ "sent nothing for 61 s", and nobody knew during what."""

    async def body(caller: Caller, part: Part, answerer: Answerer) -> None:
        watch = asyncio.create_task(caller.watch_silence(0.2))
        calls = [asyncio.create_task(caller.call("wait", [], {}, None)) for _ in range(2)]
        said = r"nothing for 0 s \(silent_after_s is 0\.2\) and owes wait, 0 s and 1 more"
        for call in calls:
            with pytest.raises(WorkerError, match=said):
                await call
        watch.cancel()

    run(body)


def test_calls_to_an_end_that_speaks_while_it_is_asked_where_it_is_go_on() -> None:
    async def body(caller: Caller, part: Part, answerer: Answerer) -> None:
        asked = asyncio.Event()

        async def where() -> str:
            if not asked.is_set():
                answerer.connection.send(["beat", 0.0])
            await asyncio.sleep(0.05)
            asked.set()
            return "at its place"

        caller._signalled = caller.where = where  # type: ignore[method-assign]
        watch = asyncio.create_task(caller.watch_silence(0.2))
        call = asyncio.create_task(caller.call("wait", [], {}, None))
        await asked.wait()
        await asyncio.sleep(0.05)
        assert not call.done()
        with pytest.raises(WorkerError, match=r"and owes wait, 0 s, at its place$"):
            await call
        watch.cancel()

    run(body)


def test_calls_streams_raise_what_the_generator_raised() -> None:
    async def body(caller: Caller, part: Part, answerer: Answerer) -> None:
        items = caller.stream("broken", [])
        assert await anext(items) == 1
        with pytest.raises(ConfigError, match="half way"):
            await anext(items)

    run(body)


def test_calls_of_a_lost_connection_fail_by_name_and_end_what_ran() -> None:
    async def body(caller: Caller, part: Part, answerer: Answerer) -> None:
        waiting = asyncio.create_task(caller.call("wait", [], {}, None))
        await part.begun.wait()
        answerer.connection.close()
        with pytest.raises(WorkerError, match="odd ended"):
            await waiting
        with pytest.raises(WorkerError, match="odd cannot answer plain"):
            await caller.call("plain", [1], {}, None)
        assert part.cancelled == ["wait"]

    run(body)


def test_calls_stream_that_nobody_reads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles.wire.calls._MOST_ITEMS", 8)

    async def body(caller: Caller, part: Part, answerer: Answerer) -> None:
        items = caller.stream("count", [100])
        assert await anext(items) == 0
        await asyncio.sleep(0.2)
        with pytest.raises(WorkerError, match="8 items of a stream were not read"):
            async for _ in items:
                pass

    run(body)


async def _door(token: str) -> tuple[asyncio.Server, tuple[str, int], ThreadPoolExecutor]:
    part, pool = Part(), ThreadPoolExecutor(1)

    def answer() -> Any:
        return Answerer(
            lambda t: getattr(part, t), executor=pool, on_lost=lambda: None, token=token
        ).connection

    server = await asyncio.get_running_loop().create_server(answer, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname(), pool


@pytest.mark.parametrize("token", ["wrong", "", "sesame2"])
def test_calls_peer_without_the_token_is_shown_the_door(token: str) -> None:
    async def main() -> None:
        server, address, pool = await _door("sesame")
        peer = await Peer.dial("engine", address, token, 5)
        with pytest.raises(WorkerError, match="engine: the worker at 127"):
            await peer.call("plain", 1, timeout=5)
        server.close()
        pool.shutdown()

    asyncio.run(main())


def test_calls_peer_with_the_token_may_call_and_stream() -> None:
    async def main() -> None:
        server, address, pool = await _door("sesame")
        peer = await Peer.dial("engine", address, "sesame", 5)
        assert await peer.call("plain", 1) == 2
        assert [i async for i in peer.stream("count", 3)] == [0, 1, 2]
        with pytest.raises(WorkerError, match=r"engine: wait did not answer within 0\.05 s"):
            await peer.call("wait", timeout=0.05)
        peer.close()
        server.close()
        pool.shutdown()

    asyncio.run(main())


def test_calls_peer_that_is_dialled_elsewhere_fails_what_was_never_answered() -> None:
    """A host that vanished ends no connection, and would keep its callers waiting."""

    async def main() -> None:
        first, address, pool = await _door("sesame")
        peer = await Peer.dial("engine", address, "sesame", 5)
        waiting = asyncio.create_task(peer.call("wait"))
        await asyncio.sleep(0.05)
        second, elsewhere, more = await _door("sesame")
        await peer.redial(elsewhere, "sesame", 5)
        with pytest.raises(WorkerError, match=f":{address[1]} is replaced by another"):
            await waiting
        assert peer.address == elsewhere and await peer.call("plain", 1) == 2
        peer.close()
        for server in (first, second):
            server.close()
        for each in (pool, more):
            each.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("first", [b"\xff" * 64, (2000).to_bytes(8, "little") + b"x" * 2000])
def test_calls_stranger_is_cut_off_before_anything_is_read(first: bytes) -> None:
    async def main() -> None:
        server, address, pool = await _door("sesame")
        reader, writer = await asyncio.open_connection(*address)
        writer.write(first)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        server.close()
        pool.shutdown()

    asyncio.run(main())


def test_calls_nobody_listening_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    with pytest.raises(WorkerError, match=r"engine: the worker at .* cannot be reached"):
        asyncio.run(Peer.dial("engine", address, "x", 5))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("not_to_be_worded", "Odd: .*__str__ raised RuntimeError"),
        ("no_bytes", r"ValueError: x \\ud800 y"),
        ("nothing_to_send", "surrogates not allowed"),
        ("inner_cancelled", "CancelledError"),
        ("base", "two"),
        ("used_up", "StopIteration, of an iterator that is used up"),
    ],
)
def test_calls_answer_whatever_a_method_raises(method: str, words: str) -> None:
    async def body(caller: Caller, part: Part, answerer: Answerer) -> None:
        with pytest.raises(WorkerError, match=words):
            await caller.call(method, [], {}, 5)

    run(body)


def test_calls_end_a_stream_whose_method_raises_a_cancellation_of_its_own() -> None:
    async def body(caller: Caller, part: Part, answerer: Answerer) -> None:
        with pytest.raises(WorkerError, match="CancelledError"):
            async with asyncio.timeout(5):
                assert [item async for item in caller.stream("items_cancelled", [])] == [1]

    run(body)
