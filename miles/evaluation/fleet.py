"""Engines that only evaluate: workers of their own, loaded from a checkpoint directory, verified.

One rollout worker plays on them, apart from those that train. Which version is due, and what its
score is, is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.errors import WeightSyncError, WorkerError
from miles.protocols import Context, Handle, Spec
from miles.types import Group, Sampling, Task
from miles.workers.engines import Engines
from miles.workers.starting import all_or_none

__all__ = ["EvalFleet"]

_log = logging.getLogger(__name__)


class EvalFleet:
    """Started with the first `load`; started again with the next one after a worker was lost."""

    def __init__(
        self,
        *,
        runtime: Any,
        engine: Sequence[Spec],
        rollouts: Sequence[Spec],
        context: Context,
        count: int,
    ) -> None:
        """`engine` and `rollouts` are the parts of an engine worker, of which there are `count`,
        and of the rollout worker."""
        self._runtime = runtime
        self._engine_parts = tuple(engine)
        self._rollout_parts = tuple(rollouts)
        self._context = context
        self._count = count
        self._engines: Engines | None = None
        self._worker: Handle | None = None
        self._connected = False
        self.version = -1
        """What all engines serve; -1 before the first load."""

    async def load(self, directory: Path, version: int, *, sealed: bool = True) -> None:
        """Have every engine serve `version` from `directory`. When it is `sealed`, every file is
        checked against its manifest where it is read; a bare model has none.

        Raises `WorkerError` when a worker cannot be started or dies, `CheckpointError` naming a
        missing or damaged file, and `WeightSyncError` when an engine then says another version.
        """
        self.version = -1
        if self._engines is not None and (fault := await self._fault()) is not None:
            _log.warning("the evaluation fleet is started again: %s", fault)
            await self.close()
        engines = self._engines or await self._start()
        limit = self._context.settings.worker_timeout_s
        calls = (
            handle.call("worker.load_snapshot", str(directory), version, sealed, timeout=limit)
            for handle in engines.handles
        )
        for handle, found in zip(engines.handles, await asyncio.gather(*calls), strict=True):
            if found != version:
                raise WeightSyncError(
                    f"{handle.name}: serves version {found} after loading {directory}, not "
                    f"{version}"
                )
        await self._connect(engines, version)
        self.version = version

    async def _start(self) -> Engines:
        settings = self._context.settings
        engines = Engines(
            self._runtime,
            timeout_s=settings.worker_timeout_s,
            max_restarts=0,
            silent_after_s=settings.silent_after_s,
            name="eval-engine",
        )

        async def build() -> Sequence[Handle]:
            await engines.build(self._engine_parts, self._context, count=self._count)
            return engines.handles

        async def play() -> Sequence[Handle]:
            start = self._runtime.start
            return [await start("eval-rollout", self._rollout_parts, self._context)]

        _, (self._worker,) = await all_or_none([build(), play()], self._end)
        self._engines, self._connected = engines, False
        return engines

    async def _end(self, handles: Sequence[Handle]) -> None:
        await asyncio.gather(*(self._runtime.end(handle) for handle in handles))

    async def _connect(self, engines: Engines, version: int) -> None:
        if self._worker is None:
            raise WorkerError("eval-rollout: it is not running")
        if not self._connected:
            longest = (await engines.health()).get("max_len")
            max_len = int(longest or self._context.model.decoder().max_len)
            await self._worker.call("rollouts.connect", engines.doors, max_len, timeout=60.0)
            self._connected = True
        limit = self._context.settings.worker_timeout_s
        await self._worker.call("rollouts.published", version, timeout=limit)

    async def _fault(self) -> WorkerError | None:
        """Why a worker does not answer; None when all do."""
        if self._engines is None or self._worker is None:
            return WorkerError("eval-rollout: it is not running")
        limit = self._context.settings.silent_after_s
        calls = [h.call("engine.version", timeout=limit) for h in self._engines.handles]
        calls.append(self._worker.call("rollouts.ping", timeout=limit))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return next((answer for answer in answers if isinstance(answer, WorkerError)), None)

    async def attempt(
        self, task: Task, *, samples: int, sampling: Sampling, seed: int, of: str = ""
    ) -> Group:
        """As `miles.Attempt`. Raises `WorkerError` when the rollout worker is gone or blocked."""
        if self._worker is None:
            raise WorkerError("eval-rollout: it is not running")
        group: Group = await self._worker.call(
            "rollouts.group",
            -1 - seed,
            task,
            samples,
            sampling,
            of,
            timeout=self._context.settings.group_deadline_s,
        )
        return group

    async def close(self) -> None:
        """End its processes; safe to call twice, and a later `load` starts anew."""
        engines, self._engines = self._engines, None
        worker, self._worker = self._worker, None
        handles = [*(engines.handles if engines else ()), *([worker] if worker else ())]
        await self._end(handles)
