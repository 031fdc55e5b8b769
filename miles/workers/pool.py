"""The driver's rollout workers: who plays which group, and what becomes of a worker that dies or
hangs.

What is played, and how, is `miles.workers.rollouts`, in the workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from miles.buffer import Lease
from miles.errors import EpisodeTimeout, WorkerError
from miles.protocols import Handle
from miles.router.accounts import summarize
from miles.settings import Settings
from miles.types import Drop, Group, Sampling, Trajectory
from miles.workers.deadline import Deadline

__all__ = ["TRIES", "Pool"]

SESSION_COUNTS = (
    "token_mismatches", "unmatched_tool_ids", "rollbacks", "branches", "kept_history", "rebased",
    "truncated", "conflicts",
)  # fmt: skip
"""Counters of sessions that are logged, as `session/<name>`."""

TRIES = 3
"""How often a group is played at most whose worker dies under it."""
_log = logging.getLogger(__name__)


class _Worker:
    """One rollout worker and how often it was started again."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.playing = 0
        self.before: Mapping[str, Mapping[str, float]] = {}  # counts already told
        self.lock = asyncio.Lock()
        self.starting: asyncio.Task[None] | None = None  # again, while that goes on


class Pool:
    """Sends each group to the worker with the fewest, restarts workers, adds their counters up.

    A worker that dies, or that does not bring a group back by its deadline because something blocks
    it, is killed with its children and started again. The groups it was playing are played again,
    under the same ids and seeds, unless they are late or were played `TRIES` times: those end as
    `worker_lost`. One that is late although its worker answers is given up alone, as
    `timeout`. After `max_restarts` the error goes to the run.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        *,
        restart: Callable[[Handle], Awaitable[Handle]],
        settings: Settings,
    ) -> None:
        """`restart` ends a worker, however stuck, and gives a new one that is built and
        connected. Of the settings, deadlines and `max_restarts` are used."""
        self._workers = [_Worker(handle) for handle in handles]
        self._restart = restart
        self._deadline = Deadline(settings.group_deadline_s)
        self._worker_timeout_s = settings.worker_timeout_s
        self._silent_after_s = settings.silent_after_s
        self._restarts_left = settings.max_restarts
        self.restarts = 0

    async def group(
        self,
        lease: Lease,
        samples: int | None = None,
        sampling: Sampling | None = None,
        *,
        of: str = "",
        returned: Callable[[], None] | None = None,
    ) -> Group:
        """Have one group played, in the environment of evaluation set `of` if it has its own.
        `returned` is called whenever one of its attempts has ended."""
        how, tries = (samples, sampling, of), 1
        while True:
            group, died = await self._once(lease, how, returned)
            if not died or tries == TRIES:
                return group
            tries += 1

    async def _once(
        self, lease: Lease, how: tuple[Any, ...], returned: Callable[[], None] | None
    ) -> tuple[Group, bool]:
        """The group, and whether its worker died under it."""
        worker = min(self._workers, key=lambda w: w.playing)
        handle = worker.handle
        worker.playing += 1
        wait = self._deadline.wait()
        try:
            with wait:
                if returned is not None:
                    return await self._each(handle, lease, returned), False
                group: Group = await handle.call("rollouts.group", lease.id, lease.task, *how)
                return group, False
        except (WorkerError, TimeoutError) as error:
            lost = await self._lost(worker, handle, lease, error, late=wait.expired)
            return lost, not wait.expired
        finally:
            worker.playing -= 1

    async def _each(self, handle: Handle, lease: Lease, returned: Callable[[], None]) -> Group:
        async for item in handle.stream("rollouts.returning", lease.id, lease.task):
            if item is not None:
                group: Group = item
                return group
            returned()
        raise WorkerError(f"{handle.name}: group {lease.id} ended without a result")

    async def _lost(
        self, worker: _Worker, handle: Handle, lease: Lease, error: Exception, *, late: bool
    ) -> Group:
        """The group of a worker that is gone or stuck, or that is `late` with it all the same; what
        the worker raised, if it is neither."""
        reason = "worker_lost"
        async with worker.lock:
            if worker.handle is handle:  # the first to notice
                if (fault := await self._fault(handle)) is not None:
                    await self._replace(worker, error if str(error) else fault)
                elif late:  # the environment does not stop when it is told to
                    reason = EpisodeTimeout.reason
                else:
                    raise error
        what = str(error) or f"not back {self._deadline.limit_s:g} s after its start"
        failure = Drop(reason=reason, detail=what)
        lost = Trajectory(id=f"g{lease.id}", samples=(), failure=failure)
        return Group(id=lease.id, task=lease.task, trajectories=(lost,))

    async def _replace(self, worker: _Worker, error: Exception) -> None:
        if worker.starting is None:
            if not self._restarts_left:
                raise error
            self._restarts_left -= 1
            self.restarts += 1
            _log.warning("%s is started again: %s", worker.handle.name, error)
            name = f"start {worker.handle.name} again"
            worker.starting = asyncio.create_task(self._start(worker), name=name)
        # the group that noticed may be cancelled, as one that nobody needs any more
        await asyncio.shield(worker.starting)

    async def _start(self, worker: _Worker) -> None:
        try:
            worker.handle, worker.before = await self._restart(worker.handle), {}
        finally:
            worker.starting = None

    async def published(self, version: int) -> None:
        """Tell every worker which version the engines serve."""
        await self._all("rollouts.published", version)

    async def rewire(self, doors: Sequence[Sequence[Any]]) -> None:
        """Tell every worker where engines listen that were started again."""
        await self._all("rollouts.rewire", doors)

    async def replaying(self, version: int) -> None:
        """Tell the engines inside the workers, which replay, which version they stand for."""
        await self._all("rollouts.replaying", version)

    async def metrics(self) -> Mapping[str, float]:
        """`session/...` and `router/...` of all workers, since the call before."""
        counts = await self._all("rollouts.counts")
        before = [worker.before for worker in self._workers]
        for worker, now in zip(self._workers, counts, strict=True):
            worker.before = now
        sessions = Counter[str]()
        for now in counts:
            sessions.update(now["session"])
        for then in before:
            sessions.subtract(then.get("session", {}))
        metrics = {f"session/{name}": float(sessions[name]) for name in SESSION_COUNTS}
        if any(now["router"] for now in counts):
            routers = [then.get("router", {}) for then in before]
            metrics |= summarize([now["router"] for now in counts], routers)
        return metrics

    async def _all(self, target: str, *args: Any) -> list[Any]:
        return list(await asyncio.gather(*(self._ask(w, target, *args) for w in self._workers)))

    async def _ask(self, worker: _Worker, target: str, *args: Any) -> Any:
        """A worker's answer; of a new one, when it died or hangs: nobody else may have noticed
        while it played nothing."""
        while True:
            handle = worker.handle
            try:
                return await handle.call(target, *args, timeout=self._worker_timeout_s)
            except WorkerError as error:
                async with worker.lock:
                    if worker.handle is handle:
                        if await self._fault(handle) is None:
                            raise
                        await self._replace(worker, error)

    async def _fault(self, handle: Handle) -> WorkerError | None:
        """Why a worker does not answer; None when it does."""
        try:
            await handle.call("rollouts.ping", timeout=self._silent_after_s)
        except WorkerError as error:
            return error
        return None
