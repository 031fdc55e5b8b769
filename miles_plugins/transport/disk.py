"""Weights move through files: the trainer writes a snapshot, engines load it.

The driver's half: it passes a directory's name, never tensors. Both worker halves are in
`snapshot`, which imports torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles import ConfigError, Context, Engine, Handle, MilesError, Receipt, Trainer
from miles_plugins.transport.calling import (
    CLEANUP_S,
    Verifying,
    everywhere,
    folder_faults,
    quietly,
)

__all__ = ["Disk"]


class Disk:
    """Safetensors snapshots: the trainer writes one, every engine reloads from it.

    Works with any engine, on any machine that sees the directory. A snapshot is complete or absent:
    it is written under another name, flushed to the disk and then renamed. Engines look at its
    names, types and shapes first, all of them, and only then load; the snapshot that they served
    before is deleted when all serve the new one.
    """

    brings = ("directory", "tensors")

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Where snapshots lie, and how they are checked."""

        directory: str = ""
        """Where snapshots lie, seen by trainer and engines alike, in a folder of the run's own;
        empty is `weights` in the run's directory."""
        file_bytes: int = 2 * 2**30
        """Bytes per file; a larger tensor gets a file of its own."""
        verify_every: int = 20
        """Publishes from one comparison of contents to the next; the first one, and one to an
        engine that was started again, always are compared."""

    def __init__(self, config: Config, context: Context) -> None:
        faults = self.check(config)
        if faults:
            raise ConfigError(f"transport disk: {'; '.join(faults)}")
        self.config = config
        self.context = context
        self._verifying = Verifying(config.verify_every)

    @classmethod
    def check(cls, config: Config, planned: Any = None) -> list[str]:
        """Values that cannot be meant, and a directory that cannot be written."""
        wrong = [
            f"{name} is {value}; it must be at least 1"
            for name in ("file_bytes", "verify_every")
            if (value := getattr(config, name)) < 1
        ]
        return [*wrong, *folder_faults(config, planned, "directory")]

    def sender(self, trainer: Trainer) -> Any:
        """The half for a trainer worker."""
        from miles_plugins.transport.snapshot import SnapshotSender, own_folder

        return SnapshotSender(
            trainer,
            rank=self.context.rank,
            directory=own_folder(self.config.directory, self.context),
            file_bytes=self.config.file_bytes,
            model=self.context.model,
        )

    def receiver(self, engine: Engine) -> Any:
        """The half for an engine worker."""
        from miles_plugins.transport.snapshot import SnapshotReceiver

        return SnapshotReceiver(engine)

    async def publish(self, version: int, *, trainer: Handle, engines: Sequence[Handle]) -> Receipt:
        """Move the trainer's weights to every engine as `version`.

        Raises `WeightSyncError` naming the file that could not be written or read, the tensors that
        differ and the engines that failed. Engines then serve the old version or are stopped.
        """
        began = time.perf_counter()
        if not engines:
            return Receipt(version=version, digest="", bytes=0, seconds=0.0)
        compare = self._verifying.due(engines)
        try:
            written = (await trainer.call_all("sender.write", version))[0]
            where, digest = written["directory"], written["digest"]
            await everywhere(engines, "disk", "receiver.look", where, digest)
            await everywhere(engines, "disk", "receiver.load", version, where, compare)
            await trainer.call_all("sender.keep", where)
        except (MilesError, asyncio.CancelledError):
            self._verifying.failed()
            await quietly([trainer.call_all("sender.give_up", timeout=CLEANUP_S)])
            raise
        self._verifying.published(engines)
        seconds = time.perf_counter() - began
        return Receipt(version=version, digest=digest, bytes=written["bytes"], seconds=seconds)
