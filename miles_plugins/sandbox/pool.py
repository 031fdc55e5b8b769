"""Boxes started before they are asked for, to hide the time that starting takes.

Each is given out once; a box is never used for a second attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable

from miles import SandboxError
from miles_plugins.sandbox.supervised import SupervisedBox

__all__ = ["Pool"]


class Pool:
    """Keeps `size` boxes ready, and starts at most `at_once` at the same time."""

    def __init__(
        self, start: Callable[[], Awaitable[SupervisedBox]], *, size: int, at_once: int
    ) -> None:
        self._start, self._size, self._at_once = start, size, at_once
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Semaphore(at_once)
        self._ready: deque[asyncio.Task[SupervisedBox]] = deque()
        self._closed = False

    async def take(self) -> SupervisedBox:
        """A fresh box, which is the caller's to close. Raises `SandboxError`."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # boxes belong to the loop that started them
            self._loop, self._starting = loop, asyncio.Semaphore(self._at_once)
            self._ready.clear()
        task = self._ready.popleft() if self._ready else None
        while len(self._ready) < self._size:
            self._ready.append(asyncio.ensure_future(self._one()))
        if task is None:
            return await self._one()
        try:
            box = await task
        except asyncio.CancelledError:
            task.cancel()
            task.add_done_callback(_close_unwanted)
            raise
        if box.channel.lost is None:
            return box
        await box.close()  # it ended while it waited
        return await self._one()

    async def close(self) -> None:
        """Close what nobody took."""
        self._closed = True
        if self._loop is not asyncio.get_running_loop():
            return
        while self._ready:
            task = self._ready.popleft()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandboxError):
                await (await task).close()

    async def _one(self) -> SupervisedBox:
        async with self._starting:
            return await self._start()


def _close_unwanted(task: asyncio.Task[SupervisedBox]) -> None:
    if not task.cancelled() and task.exception() is None:
        asyncio.ensure_future(task.result().close())  # noqa: RUF006 - the box keeps the task itself
