"""Where trainer and engines stand: on devices of their own, or taking turns on the same ones.

A placement is two context managers around the loop's training and publishing; it moves no weights
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from miles.buffer import Buffer
from miles.errors import RunError

__all__ = ["Colocated", "Placement", "Split"]


class _Sleeper(Protocol):
    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Placement(Protocol):
    """What the loop asks of a placement."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """Async context manager: the trainer has its devices inside."""

    def publishing(self) -> AbstractAsyncContextManager[None]:
        """Async context manager: the trainer can send weights and engines can take them inside."""

    def recovering(self) -> AbstractAsyncContextManager[bool]:
        """The same between two steps, for engines that were started again, while others sample:
        whether it can be now. Not to be entered inside the others."""


class Split:
    """Devices of their own: nobody waits for anybody."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def recovering(self) -> AsyncIterator[bool]:
        yield True


class Colocated:
    """The same devices in turns: producers are held and drained, the engine sleeps while the
    trainer computes.

    Raises `RunError` when groups in flight do not end within `drain_timeout_s`.
    """

    def __init__(
        self, *, buffer: Buffer, trainer: _Sleeper, engine: _Sleeper, drain_timeout_s: float
    ) -> None:
        self._buffer = buffer
        self._trainer = trainer
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s
        self._switch = asyncio.Lock()  # while devices change hands, and while weights move
        self._training = True  # whose turn it is; a stage begins with a publish

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        self._buffer.hold()
        try:
            await self._drain()
            async with self._switch:
                self._training = True
                await self._engine.sleep()
                await self._trainer.wake()
            yield
        finally:
            self._buffer.release()

    async def _drain(self) -> None:
        try:
            await self._buffer.drained(self._drain_timeout_s)
        except TimeoutError:
            raise RunError(
                f"placement colocated: {self._buffer.accounts.in_flight} groups are still in "
                f"flight after {self._drain_timeout_s:g} s, and the engine cannot sleep"
            ) from None

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        self._buffer.hold()
        try:
            async with self._switch:
                await self._engine.wake()
                await self._trainer.wake()
                yield
                await self._trainer.sleep()
                self._training = False
        finally:
            self._buffer.release()

    @asynccontextmanager
    async def recovering(self) -> AsyncIterator[bool]:
        async with self._switch:
            if self._training:  # and engines sleep; the publish after the step reaches everyone
                yield False
                return
            await self._trainer.wake()
            yield True
            await self._trainer.sleep()
