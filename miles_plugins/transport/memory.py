"""Weights move through shared memory between processes of one machine.

The driver's half: it passes names and sizes, never tensors. Both worker halves are in
`shared_memory`, which imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles import (
    ConfigError,
    Context,
    Engine,
    Handle,
    MilesError,
    Receipt,
    Trainer,
)
from miles_plugins.transport.calling import CLEANUP_S, Verifying, everywhere, quietly

__all__ = ["Memory"]

_log = logging.getLogger(__name__)


class Memory:
    """Shared memory between local processes: one stream of named tensors, in buckets, proven by
    digest.

    Two buckets take turns: while engines copy one, the trainer fills the other. A bucket is a file
    in shared memory, readable by this user alone, that loses its name as soon as it is made, so
    that nothing is left behind however a process ends. Engines stage the whole stream, compare
    every tensor's digest, and only then switch, between two forwards; a failure before that leaves
    the old version everywhere.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How large buckets are and where they lie."""

        bucket_bytes: int = 64 * 2**20
        """Bytes per bucket; a larger tensor gets a bucket of its own size."""
        directory: str = "/dev/shm"
        """Where buckets lie; when it is missing or full, the run's directory is used, with a
        warning."""
        verify_every: int = 20
        """Publishes from one comparison of what engines serve to the next; the first one, and one
        to an engine that was started again, always are compared. What arrives always is."""

    def __init__(self, config: Config, context: Context) -> None:
        if config.bucket_bytes < 1:
            raise ConfigError(
                f"transport memory: bucket_bytes is {config.bucket_bytes}; it must be at least 1"
            )
        if config.verify_every < 1:
            raise ConfigError(
                f"transport memory: verify_every is {config.verify_every}; it must be at least 1"
            )
        self.config = config
        self.context = context
        self._verifying = Verifying(config.verify_every)

    def sender(self, trainer: Trainer) -> Any:
        """The half for a trainer worker."""
        from miles_plugins.transport.shared_memory import MemorySender

        return MemorySender(
            trainer,
            rank=self.context.rank,
            bucket_bytes=self.config.bucket_bytes,
            directories=(self.config.directory, str(self.context.directory)),
        )

    def receiver(self, engine: Engine) -> Any:
        """The half for an engine worker."""
        from miles_plugins.transport.shared_memory import MemoryReceiver

        return MemoryReceiver(engine)

    async def publish(self, version: int, *, trainer: Handle, engines: Sequence[Handle]) -> Receipt:
        """Move the trainer's weights to every engine as `version`.

        Raises `WeightSyncError` naming the tensors whose digests differ, or the engines that
        failed. Before the last step, the switch, nothing changes anywhere; an engine that fails to
        switch keeps its old version.
        """
        began = time.perf_counter()
        if not engines:
            return Receipt(version=version, digest="", bytes=0, seconds=0.0)
        _one_machine(trainer, engines)
        compare = self._verifying.due(engines)
        try:
            digest, size = await self._stage(trainer, engines)
            await everywhere(engines, "memory", "receiver.load", version, digest, compare)
        except (MilesError, asyncio.CancelledError):
            self._verifying.failed()
            calls = [trainer.call_all("sender.close", timeout=CLEANUP_S)]
            calls += [e.call_all("receiver.discard", timeout=CLEANUP_S) for e in engines]
            await quietly(calls)
            raise
        self._verifying.published(engines)
        seconds = time.perf_counter() - began
        return Receipt(version=version, digest=digest, bytes=size, seconds=seconds)

    async def _stage(self, trainer: Handle, engines: Sequence[Handle]) -> tuple[str, int]:
        """Fill and copy buckets until the stream ends; its digest and size in bytes."""
        copying: asyncio.Task[Any] | None = None
        slot, size, first = 0, 0, True
        try:
            while True:
                bucket = (await trainer.call_all("sender.fill", slot, first))[0]
                if bucket["notice"]:
                    _log.warning("%s", bucket["notice"])
                size += sum(entry["bytes"] for entry in bucket["tensors"])
                if copying is not None:  # one at a time and in order, as the digest is
                    await copying
                copying = asyncio.create_task(
                    everywhere(engines, "memory", "receiver.stage", bucket, first)
                )
                if bucket["digest"]:
                    await copying
                    return bucket["digest"], size
                slot, first = 1 - slot, False
        finally:
            if copying is not None:
                copying.cancel()
                await asyncio.gather(copying, return_exceptions=True)


def _one_machine(trainer: Handle, engines: Sequence[Handle]) -> None:
    where = {handle.name: getattr(handle, "machines", [""]) for handle in (trainer, *engines)}
    if len({machine for machines in where.values() for machine in machines}) > 1:
        found = "; ".join(f"{name} on {', '.join(set(m))}" for name, m in where.items())
        raise ConfigError(
            f"transport memory: {found}: machines share no memory; take a transport that goes "
            "through files or the network (`miles plugins list --kind transport`)"
        )
