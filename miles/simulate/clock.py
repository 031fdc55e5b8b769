"""An asyncio event loop whose time is virtual: it jumps to the next timer when nothing is ready.

No threads, executors, sockets, signals or wall clock: what needs one of them fails by name. One
loop runs one simulation, in an order that is a function of the program alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
from asyncio import events
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakSet

from miles.errors import RunError

if TYPE_CHECKING:
    _Loop = object  # the real one is abstract in sixty methods, of which programs here need ten
else:
    _Loop = asyncio.AbstractEventLoop

__all__ = ["Deadlock", "OutOfTime", "VirtualLoop", "after", "run"]

T = TypeVar("T")
_FEW = 1024  # cancelled timers that are not worth clearing away


class Deadlock(RunError):
    """Nothing is ready, no timer is set, and the program has not ended."""


class OutOfTime(RunError):
    """The program went on past the time that it was given."""


_CALL, _ARGS, _CONTEXT, _HEAP = 2, 3, 4, 5


class _Handle(list[Any]):
    """A callback to be called at a time: [when, sequence, callback, arguments, context, the loop
    in whose heap it is]. A list, as lists compare themselves in a heap."""

    __slots__ = ()

    def cancel(self) -> None:
        if self[_CALL] is not None:
            self[_CALL], self[_ARGS] = None, ()
            if self[_HEAP] is not None:
                self[_HEAP].cancelled += 1

    def cancelled(self) -> bool:
        return self[_CALL] is None

    def when(self) -> float:
        when: float = self[0]
        return when


class VirtualLoop(_Loop):
    """See the module. `limit_s` is the virtual time at which `OutOfTime` is raised."""

    def __init__(self, *, limit_s: float = float("inf")) -> None:
        self.limit_s = limit_s
        self.cancelled = 0
        """Timers in the heap that were cancelled."""
        self._now = 0.0
        self._ready: deque[_Handle] = deque()
        self._timers: list[_Handle] = []
        self._sequence = 0
        self._stopping = self._running = self._closed = False
        self._generators: WeakSet[Any] = WeakSet()
        self._failure: BaseException | None = None
        self._typed: Any = self

    # ---- time and callbacks

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        """In order of the calls."""
        handle = _Handle((0.0, 0, callback, args, context, None))
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        """At a virtual time; timers of one time in order of the calls."""
        self._sequence = sequence = self._sequence + 1
        timer = _Handle((when, sequence, callback, args, context, self))
        heappush(self._timers, timer)
        return timer

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        """As `call_at`, from now."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self._typed)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        """A task of this loop."""
        return asyncio.Task(coro, loop=self._typed, name=name, context=context)

    # ---- running

    def run_until_complete(self, future: Any) -> Any:
        """Run until it is done; its result. Raises `Deadlock`, `OutOfTime`, and what the future
        or a callback raised."""
        main = asyncio.ensure_future(future, loop=self._typed)
        main.add_done_callback(self._end)
        try:
            self.run_forever()
        finally:
            main.remove_done_callback(self._end)
        if not main.done():
            raise RuntimeError("the loop was stopped before its main task was done")
        return main.result()

    def _end(self, _: Any) -> None:
        self._stopping = True

    def run_forever(self) -> None:
        """Run until `stop`."""
        if self._running or self._closed:
            raise RuntimeError("this event loop is running already, or closed")
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generators.add, finalizer=self._finalize)
        events._set_running_loop(self._typed)
        self._running, self._stopping = True, False
        try:
            self._go_on()
        finally:
            self._running = False
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _go_on(self) -> None:
        """Whatever is ready, in order; when nothing is, the next timer."""
        ready = self._ready
        following = ready.popleft
        while not self._stopping:
            _, _, call, args, context, _ = following() if ready else self._advance()
            if call is None:
                continue  # cancelled
            if context is None:
                call(*args)
            else:
                context.run(call, *args)
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure

    def _advance(self) -> _Handle:
        """Jump to the time of the next timer: that one, and what else is due then is ready."""
        timers = self._timers
        if self.cancelled > _FEW and 2 * self.cancelled > len(timers):
            timers[:] = [timer for timer in timers if timer[_CALL] is not None]
            heapify(timers)
            self.cancelled = 0
        while timers and timers[0][_CALL] is None:
            heappop(timers)
            self.cancelled -= 1
        if not timers:
            raise Deadlock(self._stuck())
        first = heappop(timers)
        first[_HEAP] = None
        when = first[0]
        if when > self._now:
            if when > self.limit_s:
                raise OutOfTime(f"simulation: not done after {self.limit_s:g} virtual seconds")
            self._now = when
        while timers and timers[0][0] <= self._now:
            timer = heappop(timers)
            timer[_HEAP] = None
            if timer[_CALL] is None:
                self.cancelled -= 1
            else:
                self._ready.append(timer)
        return first

    def _stuck(self) -> str:
        waiting = sorted(t.get_name() for t in asyncio.all_tasks(self._typed))
        shown = ", ".join(waiting[:8]) + (" ..." if len(waiting) > 8 else "")
        return (
            f"simulation: at {self._now:.3f} s nothing can happen any more, and "
            f"{len(waiting)} tasks wait: {shown}"
        )

    def stop(self) -> None:
        """End `run_forever` after this turn."""
        self._stopping = True

    def is_running(self) -> bool:
        """Whether it is inside `run_forever`."""
        return self._running

    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Forget everything that was to happen."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    async def shutdown_asyncgens(self) -> None:
        """Close async generators that nobody finished."""
        for generator in list(self._generators):
            await generator.aclose()

    def _finalize(self, generator: Any) -> None:
        self._generators.discard(generator)
        if not self._closed:
            self.create_task(generator.aclose())

    # ---- debugging and failures

    def get_debug(self) -> bool:
        """Never."""
        return False

    def set_debug(self, enabled: bool) -> None:
        """Has no effect."""

    def get_exception_handler(self) -> None:
        """There is none."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A failure that nobody would see ends the simulation."""
        failure = context.get("exception")
        if isinstance(failure, BaseException):
            self._failure = failure
        elif failure is None and "Task was destroyed" not in str(context.get("message")):
            self._failure = RunError(f"simulation: {context.get('message')}")

    # ---- what there is not

    def _none(self, what: str) -> NoReturn:
        raise RunError(f"simulation: {what} does not exist in virtual time")

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Always raises `RunError`: results of threads would depend on real time."""
        self._none(f"a thread for {getattr(func, '__name__', func)}")

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        """Always raises `RunError`: there are no threads."""
        self._none("a call from another thread")

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        """Always raises `RunError`."""
        self._none("a signal")

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        """Always raises `RunError`."""
        self._none("a socket")

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> None:
        """Always raises `RunError`."""
        self._none("a socket")


@contextmanager
def _calm() -> Iterator[None]:
    """Many objects live shortly here: a default collector would walk all others again and again."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def after(loop: asyncio.AbstractEventLoop, seconds: float) -> asyncio.Future[None]:
    """A future that is done after so many seconds: what `asyncio.sleep` waits for, for less."""
    future: asyncio.Future[None] = loop.create_future()
    loop.call_at(loop.time() + seconds, _done, future)
    return future


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def run(main: Coroutine[Any, Any, T], *, limit_s: float = float("inf")) -> T:
    """Run a program in virtual time to its end; tasks that it leaves behind are cancelled.

    Raises what it raises, `Deadlock` when nothing can happen any more, and `OutOfTime`.
    """
    if events._get_running_loop() is not None:
        main.close()
        raise RuntimeError("a simulation cannot run inside a running event loop")
    loop = VirtualLoop(limit_s=limit_s)
    # a context of its own: what the caller's holds is not changed
    task = contextvars.copy_context().run(loop.create_task, main, name="main")
    try:
        with _calm():
            result: T = loop.run_until_complete(task)
        return result
    finally:
        _clear(loop)
        loop.close()


def _clear(loop: VirtualLoop) -> None:
    loop.limit_s = float("inf")
    left = asyncio.all_tasks(loop._typed)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(_gone(left))
    loop.run_until_complete(loop.shutdown_asyncgens())


async def _gone(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
