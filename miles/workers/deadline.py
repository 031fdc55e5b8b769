"""One limit for many waits that may all take equally long: a single timer stands for them.

What `asyncio.timeout` does, without a timer for each of a step's hundreds of groups. It ends waits
by cancelling their tasks, and does nothing about what they waited for.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

__all__ = ["Deadline", "Wait"]


class Deadline:
    """`limit_s` seconds for whatever runs inside `with deadline.wait():`, which then raises
    `TimeoutError`. All waits are of one event loop's tasks."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._until: dict[Wait, float] = {}  # the loop's time; those that began first come first
        self._timer: asyncio.TimerHandle | None = None

    def wait(self) -> Wait:
        """A block of the running task that may last so long."""
        return Wait(self)

    def begin(self, wait: Wait) -> asyncio.Task[object]:
        """Count from now on; the task that waits. Raises `RuntimeError` outside of one."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # a system call, on Python 3.11
        if (task := asyncio.current_task(self._loop)) is None:
            raise RuntimeError("a deadline is for what a task waits for")
        self._until[wait] = until = self._loop.time() + self.limit_s
        if self._timer is None:
            self._timer = self._loop.call_at(until, self._expire, self._loop)
        return task

    def end(self, wait: Wait) -> None:
        """It is over, in time or not."""
        self._until.pop(wait, None)
        if not self._until and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for wait, until in list(self._until.items()):
            if until > loop.time():
                self._timer = loop.call_at(until, self._expire, loop)
                return
            del self._until[wait]
            wait.expire()


class Wait:
    """One block under a `Deadline`."""

    __slots__ = ("_before", "_deadline", "_task", "expired")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self.expired = False
        """It took longer than the limit."""

    def __enter__(self) -> Wait:
        self._task = self._deadline.begin(self)
        self._before = self._task.cancelling()
        return self

    def expire(self) -> None:
        """End it."""
        self.expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._deadline.end(self)
        if not self.expired or self._task.uncancel() > self._before:
            return  # in time, or cancelled by somebody else besides
        if isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error
