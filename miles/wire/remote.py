"""The driver's side of components that live in worker processes: async mirrors of their protocols.

Only names and plain values go through; what a method means is in `miles.protocols`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from miles.batch import Batch, Tokens, Update
from miles.errors import WorkerError
from miles.protocols import Handle
from miles.types import Array, Completion, Request

__all__ = ["RemoteEngine", "RemoteTrainer"]


class RemoteTrainer:
    """`Trainer`, every method a coroutine that runs in all ranks; rank 0 answers."""

    def __init__(
        self,
        handle: Handle,
        *,
        timeout_s: float,
        step_timeout_s: float | None = None,
        version: int = 0,
    ) -> None:
        """A step, and a pass for log-probs, may take `step_timeout_s`; `timeout_s` is for all other
        calls, and for those too where nothing else is said."""
        self.handle = handle
        self.version = version
        self.certain = True
        """False once a step was lost: what weights the worker has is then unknown."""
        self.idle = asyncio.Lock()
        """Held during every call."""
        self._timeout_s = timeout_s
        self._step_timeout_s = timeout_s if step_timeout_s is None else step_timeout_s

    async def step(self, batch: Batch) -> Update:
        try:
            update: Update = (await self._computed("trainer.step", batch))[0]
        except WorkerError:  # it may or may not have stepped, or may yet
            self.certain = False
            raise
        self.version = update.version
        return update

    async def logprobs(self, tokens: Tokens, source: str) -> Array:
        values: Array = (await self._computed("trainer.logprobs", tokens, source))[0]
        return values

    async def save(self, directory: Path, *, weights_only: bool = False) -> None:
        more = {"weights_only": True} if weights_only else {}
        await self._all("trainer.save", str(directory), **more)

    async def load(self, directory: Path, *, weights_only: bool = False) -> None:
        await self._all("trainer.load", str(directory), weights_only=weights_only)

    async def free(self, within_s: float) -> bool:
        """Whether every rank does something that is asked within so many seconds, rather than hang
        or still be at work on what was given up."""
        try:
            await self.handle.call_all("precision.fingerprint", timeout=within_s)
        except WorkerError:
            return False
        return True

    async def sleep(self) -> None:
        await self._all("trainer.sleep")

    async def wake(self) -> None:
        await self._all("trainer.wake")

    async def _all(
        self, target: str, *args: Any, limit_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        async with self.idle:
            limit = self._timeout_s if limit_s is None else limit_s
            return await self.handle.call_all(target, *args, timeout=limit, **kwargs)

    async def _computed(self, target: str, *args: Any) -> list[Any]:
        limit, began = self._step_timeout_s, time.monotonic()
        try:
            return await self._all(target, *args, limit_s=limit)
        except WorkerError as error:
            if time.monotonic() - began >= limit:
                error.add_note(f"step_timeout_s is {limit:g}")
            raise


class RemoteEngine:
    """`Engine` in another process. Weights never pass here: a transport moves them."""

    samples: ClassVar[bool] = True

    def __init__(self, handle: Handle, *, timeout_s: float) -> None:
        self.handle = handle
        self.dp_ranks = 1
        """Data-parallel ranks that a routing key can be bound to; as `look` found it."""
        self._timeout_s = timeout_s

    async def look(self) -> Self:
        """Ask how many ranks there are. Raises `WorkerError`, `EngineError`."""
        self.dp_ranks = max(1, int((await self.health()).get("dp_ranks", 1)))
        return self

    async def generate(self, request: Request) -> Completion:
        completion: Completion = await self.handle.call("engine.generate", request)
        return completion

    def stream(self, request: Request) -> AsyncIterator[Any]:
        return self.handle.stream("engine.stream", request)

    async def score(self, tokens: Array) -> Array:
        values: Array = await self._call("engine.score", tokens)
        return values

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        return int(await self._call("engine.abort", None if keys is None else list(keys)))

    async def pause(self) -> None:
        await self._call("engine.pause")

    async def resume(self) -> None:
        await self._call("engine.resume")

    async def load(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        raise TypeError("weights do not pass through the driver: publish them with a transport")

    async def version(self) -> int:
        return int(await self._call("engine.version"))

    async def health(self) -> Mapping[str, float]:
        answer: Mapping[str, float] = await self._call("engine.health")
        return answer

    async def sleep(self) -> None:
        await self._call("engine.sleep")

    async def wake(self) -> None:
        await self._call("engine.wake")

    async def _call(self, target: str, *args: Any) -> Any:
        return await self.handle.call(target, *args, timeout=self._timeout_s)
