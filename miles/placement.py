"""Where trainer and engines stand: on devices of their own, or taking turns on the same ones.

A placement is two context managers around the loop's training and publishing; it moves no weights
itself.
"""

from __future__ import annotations

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
        """Async context manager: engines can take weights inside."""


class Split:
    """Devices of their own: nobody waits for anybody."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        yield


class Colocated:
    """The same devices in turns: producers are held and drained, the engine sleeps while the
    trainer is awake.

    Raises `RunError` when groups in flight do not end within `drain_timeout_s`.
    """

    def __init__(
        self, *, buffer: Buffer, trainer: _Sleeper, engine: _Sleeper, drain_timeout_s: float
    ) -> None:
        self._buffer = buffer
        self._trainer = trainer
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        self._buffer.hold()
        try:
            await self._drain()
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
            await self._engine.wake()
            yield
            await self._trainer.sleep()
        finally:
            self._buffer.release()
