"""The run's engine workers as one: asked after, put to sleep, and started again when they die.

Weights are a transport's, requests a router's. What an engine is given that was started again, and
who is told of it, is `miles.workers.weights`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from miles.errors import EngineError, WorkerError
from miles.protocols import Context, Handle, Runtime, Spec
from miles.types import Array
from miles.workers.starting import all_or_none

__all__ = ["Engines"]

_SCORE_S = 60.0
_log = logging.getLogger(__name__)


class Engines:
    """Engine workers that all serve the same weights; `handles` for transports, `doors` for
    rollout workers: name, host, port and token of each."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        timeout_s: float,
        max_restarts: int,
        silent_after_s: float = 60.0,
        name: str = "engine",
    ) -> None:
        """`timeout_s` is for one call; an engine that does not say its version in `silent_after_s`
        counts as hung."""
        self.handles: list[Handle] = []
        self.doors: list[list[Any]] = []
        self.restarts = 0
        self._name = name
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._max_restarts = max_restarts
        self._silent_after_s = silent_after_s
        self._parts: tuple[Spec, ...] = ()
        self._context: Context | None = None
        self._variables: dict[str, str] = {}
        self._why: dict[Handle, WorkerError] = {}  # of those that were ended, what they had

    async def build(
        self,
        parts: Sequence[Spec],
        context: Context,
        *,
        count: int,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Have `count` workers built of these parts, keeping those that are; `variables` is what
        parts have set in them, which a worker is born with."""
        if len(self.handles) != count or self._variables != (variables or {}):
            self._variables = dict(variables or {})
            await asyncio.gather(*(self._runtime.end(handle) for handle in self.handles))
            self._parts, self._context = tuple(parts), context
            names = [self._name] if count == 1 else [f"{self._name}-{i}" for i in range(count)]
            started = await all_or_none(
                (self._start(name) for name in names), lambda one: self._runtime.end(one[0])
            )
            self.handles, self.doors = [s[0] for s in started], [s[1] for s in started]
        elif (tuple(parts), context.settings) != (self._parts, self._settings):
            self._parts, self._context = tuple(parts), context
            rebuilds = (self._runtime.rebuild(h, parts, context) for h in self.handles)
            await asyncio.gather(*rebuilds)

    @property
    def _settings(self) -> Any:
        return None if self._context is None else self._context.settings

    async def _start(self, name: str) -> tuple[Handle, list[Any]]:
        if self._context is None:
            raise WorkerError(f"{name}: it was never built")
        handle = await self._runtime.start(name, self._parts, self._context)
        token = secrets.token_hex(16)
        host = getattr(handle, "bind", "127.0.0.1")
        try:
            address = await handle.call("worker.listen", host, token, timeout=self._timeout_s)
        except BaseException:  # nobody would know of it
            await self._runtime.end(handle)
            raise
        return handle, [name, *address, token]

    async def revive(self) -> bool:
        """Start those again that are dead or do not answer; whether there were any. They have no
        weights yet.

        Raises the `WorkerError` of the first when all restarts of the run are used up.
        """
        faults = await self.faults()
        for index, fault in enumerate(faults):
            if fault is None:
                continue
            handle = self.handles[index]
            fault = self._why.pop(handle, fault)
            if self.restarts >= self._max_restarts:
                fault.add_note(f"max_restarts is {self._max_restarts}, and they are used up")
                raise fault
            self.restarts += 1
            _log.warning("%s is started again: %s", handle.name, fault)
            await self._runtime.end(handle)
            self.handles[index], self.doors[index] = await self._start(handle.name)
        return any(fault is not None for fault in faults)

    async def end_silent(self) -> bool:
        """End workers that hang, so that nobody waits for them any more; whether any is dead."""
        handles = list(self.handles)  # others may be started while these are asked
        faults = await self.faults()
        dead = {handle: fault for handle, fault in zip(handles, faults, strict=True) if fault}
        for handle, fault in dead.items():
            self._why.setdefault(handle, fault)  # afterwards it only says that it was ended
        await asyncio.gather(*(self._runtime.end(handle) for handle in dead))
        return bool(dead)

    async def health(self) -> Mapping[str, float]:
        """Sums over the workers, except `max_len`, the smallest; `engines` is how many there are.
        Raises `WorkerError`, `EngineError`."""
        each: list[Mapping[str, float]] = await self._all("engine.health")
        total = {name: sum(one.get(name, 0.0) for one in each) for name in each[0]}
        if "max_len" in total:
            total["max_len"] = min(one["max_len"] for one in each)
        return {**total, "engines": len(each)}

    async def score(self, tokens: Array) -> Array:
        """(tokens,) float32 log-probs of the first worker, 0 for the first. Raises `WorkerError`,
        `EngineError`."""
        values: Array = await self.handles[0].call("engine.score", tokens, timeout=_SCORE_S)
        return values

    async def sleep(self) -> None:
        """Free device memory; a worker that cannot is ended, as it would keep it."""
        await self._all_or_end("engine.sleep")

    async def wake(self) -> None:
        """Take it back; a worker that cannot is ended, and the next publish starts it again."""
        await self._all_or_end("engine.wake")

    async def _all_or_end(self, target: str) -> None:
        handles = list(self.handles)
        calls = (handle.call(target, timeout=self._timeout_s) for handle in handles)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for handle, answer in zip(handles, answers, strict=True):
            if isinstance(answer, WorkerError | EngineError):
                _log.warning("%s is ended: %s: %s", handle.name, target, answer)
                await self._runtime.end(handle)
            elif isinstance(answer, BaseException):
                raise answer

    async def _all(self, target: str) -> list[Any]:
        calls = (handle.call(target, timeout=self._timeout_s) for handle in self.handles)
        return list(await asyncio.gather(*calls))

    async def faults(self, *, within_s: float | None = None) -> list[WorkerError | None]:
        """Of each engine, why it does not say its version in `silent_after_s`, or in so many
        seconds; None when it does."""
        limit = self._silent_after_s if within_s is None else within_s
        return await asyncio.gather(*(self._fault(handle, limit) for handle in self.handles))

    async def _fault(self, handle: Handle, limit_s: float) -> WorkerError | None:
        try:
            await handle.call("engine.version", timeout=limit_s)
        except WorkerError as error:
            return error
        except EngineError as error:  # its worker is well; what it samples with is not
            return WorkerError(f"{handle.name}: {error}")
        return None
