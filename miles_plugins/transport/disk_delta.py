"""Weights move through files as what changed since the last publish.

The driver's half: it passes a directory's name, never tensors. Both worker halves are in `delta`,
which imports torch.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles import ConfigError, Context, Engine, Handle, MilesError, Receipt, Trainer
from miles_plugins.transport.bucketed import positive
from miles_plugins.transport.calling import (
    CLEANUP_S,
    Verifying,
    everywhere,
    folder_faults,
    quietly,
)

__all__ = ["DiskDelta"]

_log = logging.getLogger(__name__)


class DiskDelta:
    """Byte-level differences between snapshots, compressed with zstd, applied where the engine is.

    For engines behind a slow or shared file system. The trainer writes the exclusive-or of every
    tensor with the one published before; each engine worker keeps a whole snapshot of its own,
    applies the difference to it, proves every tensor of the result by its checksum, and has the
    engine load that. When an engine or the trainer lacks the base (the first publish, a worker
    that was started again, a publish that failed) a whole snapshot is written, and that is said.
    """

    brings = ("directory", "tensors")

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Where files lie, and how they are compressed and checked."""

        directory: str = ""
        """Where differences lie, seen by trainer and engines alike, in a folder of the run's own;
        empty is `weights` in the run's directory."""
        local: str = ""
        """Where engine workers keep their snapshots, best on a disk of their own machine; empty is
        `received` in the run's directory."""
        level: int = 1
        """Compression level of zstd, 1 to 19."""
        file_bytes: int = 2 * 2**30
        """Bytes per file of a snapshot; a larger tensor gets a file of its own."""
        verify_every: int = 20
        """Publishes from one comparison of what engines serve to the next; the first one, and one
        to an engine that was started again, always are compared. The files are always."""

    @classmethod
    def check(cls, config: Config, planned: Any = None) -> list[str]:
        """Values that cannot be meant, and directories that cannot be written."""
        faults = positive(config, "file_bytes", "verify_every")
        if not 1 <= config.level <= 19:
            faults.append(f"level is {config.level}; 1 to 19")
        if importlib.util.find_spec("zstandard") is None:
            faults.append("zstandard is not installed; pip install 'miles[delta]'")
        return [*faults, *folder_faults(config, planned, "directory", "local")]

    def __init__(self, config: Config, context: Context) -> None:
        if faults := self.check(config):
            raise ConfigError(f"transport disk_delta: {'; '.join(faults)}")
        self.config = config
        self.context = context
        self.local = Path(config.local or context.directory / "received").absolute()
        self._verifying = Verifying(config.verify_every)
        self._first = True

    def sender(self, trainer: Trainer) -> Any:
        """The half for a trainer worker."""
        from miles_plugins.transport.delta import DeltaSender
        from miles_plugins.transport.snapshot import own_folder

        return DeltaSender(
            trainer,
            rank=self.context.rank,
            directory=own_folder(self.config.directory, self.context),
            file_bytes=self.config.file_bytes,
            model=self.context.model,
            level=self.config.level,
        )

    def receiver(self, engine: Engine) -> Any:
        """The half for an engine worker."""
        from miles_plugins.transport.delta import DeltaReceiver

        return DeltaReceiver(engine, local=self.local, file_bytes=self.config.file_bytes)

    async def publish(self, version: int, *, trainer: Handle, engines: Sequence[Handle]) -> Receipt:
        """Move the trainer's weights to every engine as `version`. The receipt counts the bytes of
        the weights; what was written is logged.

        Raises `WeightSyncError` naming the file that could not be written or read, the tensors that
        differ and the engines that failed. Engines then serve the old version or are stopped.
        """
        began = time.perf_counter()
        if not engines:
            return Receipt(version=version, digest="", bytes=0, seconds=0.0)
        compare = self._verifying.due(engines)
        try:
            whole = await self._lacking(trainer, engines)
            written = (await trainer.call_all("sender.write", version, not whole))[0]
            where, digest = written["directory"], written["digest"]
            await everywhere(engines, "disk_delta", "receiver.stage", where, digest)
            await everywhere(engines, "disk_delta", "receiver.load", version, compare)
            await trainer.call_all("sender.keep", where)
        except (MilesError, asyncio.CancelledError):
            self._verifying.failed()
            calls = [trainer.call_all("sender.give_up", timeout=CLEANUP_S)]
            calls += [e.call_all("receiver.give_up", timeout=CLEANUP_S) for e in engines]
            await quietly(calls)
            raise
        self._first = False
        self._verifying.published(engines)
        size, moved = written["bytes"], written["written"]
        _log.info("version %d: %d of %d bytes were written", version, moved, size)
        seconds = time.perf_counter() - began
        return Receipt(version=version, digest=digest, bytes=size, seconds=seconds)

    async def _lacking(self, trainer: Handle, engines: Sequence[Handle]) -> bool:
        """Whether somebody has not the base that the others have; says so, but for the first
        time."""
        ours = (await trainer.call_all("sender.holds"))[0]
        theirs = [a[0] for a in await everywhere(engines, "disk_delta", "receiver.holds")]
        lack = [e.name for e, base in zip(engines, theirs, strict=True) if not base or base != ours]
        if not ours:
            lack = [trainer.name]
        if lack and not self._first:
            _log.warning(
                "transport disk_delta: %s has not the weights of the last publish; a whole "
                "snapshot is written", ", ".join(lack),
            )  # fmt: skip
        return bool(lack)
