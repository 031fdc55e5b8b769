"""Run a function beside the event loop in a thread that can be given up.

It cannot end the function, only stop waiting for it: the process then exits without it, which the
loop's own pool of threads would not let it do. A thread that is done takes the next function.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


_Jobs = SimpleQueue[Callable[[], None]]
_idle: list[_Jobs] = []  # of threads that wait for work; one that was given up is not among them


def _new_thread() -> _Jobs:
    jobs: _Jobs = SimpleQueue()

    def work() -> None:
        while True:
            jobs.get()()

    threading.Thread(target=work, daemon=True).start()
    return jobs


async def in_thread(call: Callable[[], T], *, name: str, timeout_s: float) -> T:
    """What the call returns or raises. Raises `TimeoutError` after `timeout_s` seconds, and leaves
    the thread `name` to itself."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            method(value)

    jobs = _idle.pop() if _idle else _new_thread()

    def run() -> None:
        threading.current_thread().name = name
        try:
            outcome = partial(settle, future.set_result, call())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome = partial(settle, future.set_exception, error)
        _idle.append(jobs)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(outcome)

    jobs.put(run)
    async with asyncio.timeout(timeout_s):
        return await future
