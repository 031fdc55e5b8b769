"""The driver's half of every transport that sends flat buckets, and their receivers' common part.

Two buckets take turns: while engines take one, the trainer gathers the next. It carries names,
sizes and handles; how bytes move is each transport's own affair. No torch is imported here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from miles import Handle, MilesError, Receipt
from miles_plugins.transport.calling import CLEANUP_S, Verifying, everywhere, quietly

__all__ = ["Bucketed", "positive"]


class Bucketed:
    """One publish: engines are told that it begins, buckets follow, and with the last of them what
    they must have been; only then do embedded engines switch."""

    name: ClassVar[str]
    """Registered name, for messages."""

    def __init__(self, verify_every: int) -> None:
        self._verifying = Verifying(verify_every)

    async def set_up(
        self, trainer: Handle, engines: Sequence[Handle], begun: Sequence[dict[str, Any]]
    ) -> None:
        """Whatever the sides need before the first bucket; of each engine, in how many `ranks` it
        receives, and whether its server is `native`."""

    async def publish(self, version: int, *, trainer: Handle, engines: Sequence[Handle]) -> Receipt:
        """Move the trainer's weights to every engine as `version`.

        Raises `WeightSyncError` naming the tensors that differ or the engines that failed, which
        then serve the old version or are stopped.
        """
        began = time.perf_counter()
        if not engines:
            return Receipt(version=version, digest="", bytes=0, seconds=0.0)
        compare = self._verifying.due(engines)
        try:
            answers = await everywhere(engines, self.name, "receiver.begin", version, compare)
            begun = [answer[0] for answer in answers]
            await self.set_up(trainer, engines, begun)
            sent = await self._send(trainer, engines, any(each["native"] for each in begun))
            last = (sent["digest"], sent["contents"])
            sums = await everywhere(engines, self.name, "receiver.finish", version, *last)
            if compared := [e for e, said in zip(engines, sums, strict=True) if said[0]["sums"]]:
                await self._prove(version, trainer, compared)
            if held := [e for e, said in zip(engines, sums, strict=True) if said[0]["held"]]:
                await everywhere(held, self.name, "receiver.go_on")
            await trainer.call_all("sender.finish")
        except (MilesError, asyncio.CancelledError):
            self._verifying.failed()
            await self.give_up(trainer, engines)
            raise
        self._verifying.published(engines)
        seconds = time.perf_counter() - began
        size, digest = sent["bytes"], sent["digest"]
        return Receipt(version=version, digest=digest, bytes=size, seconds=seconds)

    async def _prove(self, version: int, trainer: Handle, engines: Sequence[Handle]) -> None:
        """Compare servers, which are still stopped, with a snapshot of the same weights."""
        where = (await trainer.call_all("sender.snapshot", version))[0]["directory"]
        await everywhere(engines, self.name, "receiver.prove", version, where)

    async def give_up(self, trainer: Handle, engines: Sequence[Handle]) -> None:
        """Clean up after a fault on both sides, as far as they are there."""
        calls = [trainer.call_all("sender.give_up", timeout=CLEANUP_S)]
        calls += [e.call_all("receiver.give_up", timeout=CLEANUP_S) for e in engines]
        await quietly(calls)

    async def _send(
        self, trainer: Handle, engines: Sequence[Handle], native: bool
    ) -> dict[str, Any]:
        """Fill and take buckets until the stream ends; what the sender says of it."""
        taking: asyncio.Task[Any] | None = None
        slot, first = 0, True
        try:
            while True:
                answers = await trainer.call_all("sender.fill", slot, first, native)
                bucket = self.joined(answers)
                if taking is not None:
                    await taking
                taking = asyncio.create_task(self.move(trainer, engines, bucket))
                if bucket["last"]:
                    await taking
                    return dict(bucket["last"])
                slot, first = 1 - slot, False
        finally:
            if taking is not None:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)

    async def move(
        self, trainer: Handle, engines: Sequence[Handle], bucket: dict[str, Any]
    ) -> None:
        """Return when every engine has the bucket."""
        await everywhere(engines, self.name, "receiver.take", bucket)

    def joined(self, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What receivers are told of a bucket, of what every rank said."""
        return answers[0]


def positive(config: Any, *names: str) -> list[str]:
    """Faults of numbers in a configuration that have to be above 0."""
    values = ((name, getattr(config, name)) for name in names)
    return [f"{name} is {value}; it must be above 0" for name, value in values if value <= 0]
