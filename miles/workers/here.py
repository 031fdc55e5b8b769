"""Rollouts that live in the driver itself: a handle without a process (`rollout_workers=0`).

Spares the hop to a rollout worker, which is worth it where every CPU second counts and episodes are
short. What blocks an episode then blocks the driver, and nothing can end it: there is no worker to
start again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from miles.errors import WorkerError
from miles.protocols import Handle
from miles.workers.rollouts import Rollouts

__all__ = ["Here", "restart"]


class Here:
    """Implements `miles.Handle` over rollouts of this process."""

    name = "driver"
    world = 1

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts

    async def call(
        self, target: str, *args: Any, rank: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call `rollouts.method`. Raises `WorkerError` after `timeout` seconds."""
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                return await self._method(target)(*args, **kwargs)
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"{self.name}: {target} did not answer within {timeout:g} s"
            raise WorkerError(text) from None

    async def call_all(
        self, target: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """The same: there is one."""
        return [await self.call(target, *args, timeout=timeout, **kwargs)]

    def stream(self, target: str, *args: Any, rank: int = 0) -> AsyncIterator[Any]:
        """The items of an async generator method."""
        items: AsyncIterator[Any] = self._method(target)(*args)
        return items

    def _method(self, target: str) -> Any:
        return getattr(self.rollouts, target.removeprefix("rollouts."))


async def restart(handle: Handle) -> Handle:
    """Always raises `WorkerError`: nothing ends what runs in this process."""
    raise WorkerError(
        f"{handle.name}: an episode hangs in the driver itself (rollout_workers=0), where nothing "
        "can end it; take rollout_workers=1"
    )
