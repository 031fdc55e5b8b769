"""Run functions beside the event loop in threads that can be given up.

It cannot end a function, only stop waiting for it: the process then exits without it, which the
loop's own pool of threads would not let it do. A thread that is done takes the next function.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["Threads", "in_thread", "take_turns"]

T = TypeVar("T")


_TURN_S = 0.0005


def take_turns() -> None:
    """Have this process's threads wait 0.5 ms for each other, where Python lets them wait 5.

    A computation lets go of the interpreter at every operation, and gets it back from a busy event
    loop only after such a wait: a checksum of 0.1 s took a minute beside one.
    """
    sys.setswitchinterval(_TURN_S)


_Jobs = SimpleQueue[Callable[[], None]]
_idle: list[_Jobs] = []  # of threads that wait for work; one that was given up is not among them


def _new_thread() -> _Jobs:
    jobs: _Jobs = SimpleQueue()

    def work() -> None:
        while True:
            jobs.get()()

    threading.Thread(target=work, daemon=True).start()
    return jobs


def _begin(work: Callable[[], Callable[[], object]], name: str) -> None:
    """Do it in a thread of that name; what it gives is called once the thread counts as idle."""
    jobs = _idle.pop() if _idle else _new_thread()

    def run() -> None:
        threading.current_thread().name = name
        tell = work()
        _idle.append(jobs)
        tell()

    jobs.put(run)


def _outcome(call: Callable[[], Any], future: asyncio.Future[Any]) -> Callable[[], None]:
    """Make the call; what then settles the future, in its loop, if nobody has by then."""
    try:
        return partial(_settle, future, future.set_result, call())
    except StopIteration as error:  # which no future takes
        wrapped = RuntimeError("the function raised StopIteration")
        wrapped.__cause__ = error
        return partial(_settle, future, future.set_exception, wrapped)
    except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
        return partial(_settle, future, future.set_exception, error)


def _settle(future: asyncio.Future[Any], method: Callable[[Any], None], value: Any) -> None:
    """In the future's loop, unless that is closed and nobody waits."""
    if not future.done() and not future.get_loop().is_closed():
        method(value)


def _soon(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(what)


async def in_thread(call: Callable[[], T], *, name: str, timeout_s: float) -> T:
    """What the call returns or raises. Raises `TimeoutError` after `timeout_s` seconds, and leaves
    the thread `name` to itself."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    _begin(lambda: partial(_soon, loop, _outcome(call, future)), name)
    async with asyncio.timeout(timeout_s):
        return await future


class _Lane:
    """A thread's place: what it runs now."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] | None = None
        self.until = math.inf  # monotonic seconds when that one's time is up
        self.left = False  # it was: what comes back then takes nothing more


class Threads:
    """At most so many functions at a time, in the order in which they were asked for.

    A thread that is done with one takes the next without a way through the event loop, which hears
    of several at once: quick functions cost little more than what they do. Each has its own time,
    the wait for its turn not counted. One that is late is left to its thread, and another thread
    takes over.
    """

    def __init__(self, most: int, *, name: str, timeout_s: float) -> None:
        """`most` functions run at a time, in threads called `name`, each for `timeout_s` seconds at
        most."""
        self._most, self._name, self._timeout_s = most, name, timeout_s
        self._lock = threading.Lock()  # for all of these:
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._lanes: set[_Lane] = set()
        # by loop, which is told when it has none yet
        self._ended: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._watching: asyncio.AbstractEventLoop | None = None  # the time; not for threads

    async def call(self, function: Callable[[], T]) -> T:
        """What the function returns or raises. Raises `TimeoutError` when it took too long."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._lock:
            self._waiting.append((function, future))
        try:
            self._start()
        except RuntimeError:
            future.cancel()  # so that nobody runs it later
            raise
        if self._watching is not loop:
            self._watching = loop
            loop.call_later(self._timeout_s, self._look, loop)
        return await future

    def _start(self) -> None:
        with self._lock:
            if not self._waiting or len(self._lanes) >= self._most:
                return
            lane = _Lane()
            self._lanes.add(lane)
        try:
            _begin(partial(self._work, lane), self._name)
        except RuntimeError:  # no thread can be started: the place is another's to try
            with self._lock:
                self._lanes.discard(lane)
            raise

    def _work(self, lane: _Lane) -> Callable[[], object]:
        """Take what waits until there is no more; in a thread."""
        while True:
            with self._lock:
                if lane.left or not self._waiting:
                    self._lanes.discard(lane)
                    return lambda: None
                function, future = self._waiting.popleft()
                lane.future, lane.until = future, time.monotonic() + self._timeout_s
            if future.done():  # given up before its turn
                continue
            outcome, loop = _outcome(function, future), future.get_loop()
            with self._lock:
                told = loop in self._ended
                self._ended.setdefault(loop, []).append(outcome)
            if not told:
                _soon(loop, partial(self._hear, loop))

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        """Settle what has ended of this loop's; in it."""
        with self._lock:
            ended = self._ended.pop(loop)
        for outcome in ended:
            outcome()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up what is late, and look again when the next may be."""
        now = time.monotonic()
        with self._lock:
            late = [lane for lane in self._lanes if lane.until <= now]
            for lane in late:
                lane.left = True
                self._lanes.discard(lane)
            next_s = min([self._timeout_s, *(lane.until - now for lane in self._lanes)])
            idle = not self._lanes and not self._waiting
        for lane in late:
            if (future := lane.future) is not None:
                give_up = partial(_settle, future, future.set_exception, TimeoutError())
                _soon(future.get_loop(), give_up)
            self._start()
        self._watching = None if idle else loop
        if not idle:
            loop.call_later(next_s, self._look, loop)
