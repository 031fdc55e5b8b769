"""A handle whose workers are objects of this process: what a runtime gives, without a process.

Arguments, answers and errors take the real wire format both ways, so what could not cross a process
fails here too. It times nothing out and restarts nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from miles.errors import WorkerError
from miles.wire.frames import decode, encode, error_from_wire, error_to_wire

__all__ = ["FakeHandle"]


class FakeHandle:
    """Calls `part.method` on objects given by name, one mapping a rank.

    `FakeHandle("trainer", {"trainer": trainer, "sender": transport.sender(trainer)})`
    """

    def __init__(self, name: str, *ranks: Mapping[str, Any]) -> None:
        self.name = name
        self.ranks: Sequence[Mapping[str, Any]] = ranks
        self.calls: list[str] = []
        """Targets called so far, in order."""
        self.dead = False
        """Set it, and every later call is a `WorkerError`, as if the process were gone."""

    @property
    def world(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    async def call(
        self, target: str, *args: Any, rank: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call one rank. Raises `TypeError` for what cannot cross, `WorkerError` for a part that is
        not there."""
        self.calls.append(target)
        if self.dead:
            raise WorkerError(f"{self.name}: worker {rank} is dead (on purpose)")
        there_args, there_kwargs = decode(encode([list(args), kwargs]))
        try:
            answer = self._method(target, rank)(*there_args, **there_kwargs)
            if inspect.isawaitable(answer):
                answer = await answer
            return decode(encode(answer))
        except Exception as error:
            raise error_from_wire(error_to_wire(error), self.name) from error

    def _method(self, target: str, rank: int) -> Any:
        part, _, method = target.partition(".")
        parts = self.ranks[rank]
        if part not in parts or not method or method.startswith("_"):
            raise WorkerError(f"{self.name}: no part {part!r} (has: {', '.join(parts)})")
        return getattr(parts[part], method)

    async def call_all(
        self, target: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call every rank, in order."""
        return [
            await self.call(target, *args, rank=rank, timeout=timeout, **kwargs)
            for rank in range(self.world)
        ]

    async def stream(self, target: str, *args: Any, rank: int = 0) -> AsyncIterator[Any]:
        """The items of an async generator method of one rank."""
        self.calls.append(target)
        if self.dead:
            raise WorkerError(f"{self.name}: worker {rank} is dead (on purpose)")
        (there_args,) = decode(encode([list(args)]))
        try:
            async for item in self._method(target, rank)(*there_args):
                yield decode(encode(item))
        except Exception as error:
            raise error_from_wire(error_to_wire(error), self.name) from error
