"""Brings the trainer's weights to the engines, and to engines that had to be started again.

When a publish is due is the stage's affair, how tensors move a transport's.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from miles.batch import Receipt
from miles.errors import WeightSyncError, WorkerError
from miles.placement import Placement
from miles.protocols import Handle
from miles.wire.remote import RemoteTrainer
from miles.workers.engines import Engines
from miles.workers.pool import Pool

__all__ = ["Weights"]

_WATCH_S = 5.0  # between looks at the engines
_CLEAN_UP_S = 60.0  # for a transport to end a publish that was given up
_log = logging.getLogger(__name__)
_PUBLISHES = re.compile(r"(sender|receiver|engine\.(pause|resume|load))").match


class Weights:
    """One publish at a time, of whatever the trainer then has."""

    def __init__(
        self,
        *,
        transport: Any,
        trainer: RemoteTrainer,
        engines: Engines,
        pool: Pool,
        placement: Placement,
        timeout_s: float,
        tell: Callable[[Receipt], None],
    ) -> None:
        """`timeout_s` is for one publish; `tell` hears of each that moved weights."""
        self._transport = transport
        self._trainer = trainer
        self._engines = engines
        self._pool = pool
        self._placement = placement
        self._timeout_s = timeout_s
        self._tell = tell
        self._turn = asyncio.Lock()
        self._sending: asyncio.Task[Receipt] | None = None
        self._recoveries: set[asyncio.Task[bool]] = set()

    async def publish(self) -> Receipt:
        """To every engine; those that die on the way are started again, and it begins anew.

        Raises `WeightSyncError` when an engine that lives did not get them, or when it failed in
        the same way with engines started anew, and `WorkerError` when the trainer is gone or an
        engine could not be started again.
        """
        async with self._turn:
            return await self._publish()

    async def recover(self) -> bool:
        """Start engines again that are dead or hang, and bring all of them the same weights;
        whether that was done. While a colocated trainer has the devices it is left to the publish
        that follows. Raises as `publish`; not to be asked for inside `placement.publishing()`.

        It goes on when whoever asks is cancelled, as a group that nobody needs any more: a worker
        half started, or a publish given up, would be another engine lost.
        """
        recovering = asyncio.create_task(self._recover(), name="recover engines")
        self._recoveries.add(recovering)
        recovering.add_done_callback(self._recovered)
        return await asyncio.shield(recovering)

    async def _recover(self) -> bool:
        if not any(await self._engines.faults()):
            return False
        async with self._placement.recovering() as now:
            if not now:
                return False
            async with self._turn:
                if not await self._engines.revive():
                    return False
                await self._pool.rewire(self._engines.doors)
                async with self._trainer.idle:  # or a step could begin between two tensors
                    await self._publish()
                return True

    def _recovered(self, task: asyncio.Task[bool]) -> None:
        self._recoveries.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("engines were not recovered: %s", error)  # if nobody waits for it any more

    async def close(self) -> None:
        """Give recoveries up."""
        if left := tuple(self._recoveries):
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=_CLEAN_UP_S)

    async def watch(self) -> None:
        """Recover whenever it is needed; ends only when cancelled or when that fails."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if await self._engines.end_silent():  # a publish that waits for one must not hold us up
                await self.recover()

    async def _publish(self) -> Receipt:
        before = ""  # how it failed at the last attempt
        while True:
            try:
                receipt = await self._send()
            except (WorkerError, WeightSyncError) as error:
                died = isinstance(error, WorkerError) or isinstance(error.__cause__, WorkerError)
                how = "" if died else _without_names(str(error))
                if how and how == before:
                    error.add_note(
                        "with an engine started anew it failed in the same way, so none is started "
                        "again"
                    )
                    raise
                before = how
                if not await self._revived(error):
                    raise
                await self._pool.rewire(self._engines.doors)
                continue
            await self._pool.published(receipt.version)
            if receipt.digest:
                self._tell(receipt)
            return receipt

    async def _revived(self, error: Exception) -> bool:
        """Whether engines were started again, after which publishing begins anew."""
        if self._sending is not None and not self._sending.done():
            return False  # it did not stop, and would write between another's tensors
        try:
            revived = await self._engines.revive()
        except WorkerError as gone:
            gone.add_note(f"publishing had failed: {error}")
            raise
        if revived:
            _log.warning("publishing begins anew, since it failed: %s", error)
        return revived

    async def _send(self) -> Receipt:
        version, trainer, engines = self._trainer.version, self._trainer.handle, self._engines
        sending = self._sending = asyncio.create_task(
            self._transport.publish(version, trainer=trainer, engines=engines.handles),
            name=f"publish {version}",
        )
        sending.add_done_callback(_heard)  # also when nobody waits for it any more
        try:
            await asyncio.wait({sending}, timeout=self._timeout_s)
            late = () if sending.done() else (trainer, *engines.handles)
            owing = await asyncio.gather(*map(_owed, late))
        finally:
            ended = sending.done()
            if not ended:
                sending.cancel()
                await asyncio.wait({sending}, timeout=_CLEAN_UP_S)
        if ended:
            return sending.result()
        waits_for = "; ".join(filter(None, owing)) or type(self._transport).__name__
        error = WeightSyncError(
            f"publishing version {version} took longer than publish_timeout_s "
            f"({self._timeout_s:g} s), waiting for {waits_for}"
        )
        if not sending.done():
            error.add_note(f"it did not stop in {_CLEAN_UP_S:g} s either")
            raise error
        raise error from (None if sending.cancelled() else sending.exception())


def _without_names(text: str) -> str:
    """What is said of a fault, less ports, process numbers and random names, which are others after
    a restart."""
    return re.sub(r"\b[0-9a-f]{4,}\b", "#", text)


def _heard(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def _owed(handle: Handle) -> str:
    """What a worker owes, that a publish may wait for, and what it is at, in words."""
    owed: Iterable[tuple[str, float]] = getattr(handle, "owed", tuple)()
    told = [f"{target}, {seconds:.0f} s" for target, seconds in owed if _PUBLISHES(target)]
    if not told:
        return ""
    where: Callable[[], Awaitable[str]] | None = getattr(handle, "where", None)
    at = "" if where is None else f"; {await where()}"
    return f"{handle.name} ({', '.join(told)}{at})"
