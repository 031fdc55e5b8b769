"""Start several workers at once: all of them, or none.

What a worker is, and how one is ended, whoever asks says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["all_or_none"]

T = TypeVar("T")
_log = logging.getLogger(__name__)


async def all_or_none(
    starts: Iterable[Coroutine[Any, Any, T]], end: Callable[[T], Awaitable[None]]
) -> list[T]:
    """What they return, in order. When one raises, or this is cancelled, those that have not ended
    are cancelled, and `end` is called with what the others returned, whoever gives up meanwhile."""
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        ending = asyncio.create_task(_none(tasks, end), name="end workers half started")
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait({ending})
            raise
        raise


async def _none(tasks: Iterable[asyncio.Task[T]], end: Callable[[T], Awaitable[None]]) -> None:
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    made = [one for one in outcomes if not isinstance(one, BaseException)]
    for ended in await asyncio.gather(*(end(one) for one in made), return_exceptions=True):
        if isinstance(ended, BaseException):  # why they are ended is what has to be heard
            _log.warning("a worker half started was not ended: %s", ended)
