"""The trainer's half that transports of flat buckets share: two buckets in turns, and a snapshot
to prove a server by.

How a bucket's bytes travel is what each transport adds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from miles import Trainer
from miles_plugins.transport.snapshot import SnapshotSender
from miles_plugins.transport.stream import Outgoing, extent

__all__ = ["Sending"]


class Sending:
    """Half of a transport in a trainer worker. Every rank takes part in the export."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        rank: int,
        bucket_bytes: int,
        directory: Path,
        model: Any,
        packed: bool = False,
    ) -> None:
        self.rank = rank
        self._trainer = trainer
        self._bucket_bytes = bucket_bytes
        self._outgoing = Outgoing(trainer, bucket_bytes=bucket_bytes, packed=packed)
        self._buckets: dict[int, torch.Tensor] = {}
        self._snapshots = SnapshotSender(
            trainer, rank=rank, directory=directory, file_bytes=2**31, model=model, name="proof_"
        )

    def fill(self, slot: int, first: bool, native: bool = False) -> dict[str, Any]:
        """Write the next tensors of the stream into bucket `slot`; `first` begins a new stream, and
        `native` says that servers take it as well.

        Returns `tensors`, each with `name`, `dtype`, `shape`, `offset` and `bytes`, and with the
        last bucket `last`: the `digest`, `contents` and `bytes` of all of it.
        """
        if first:
            self._outgoing.begin()
        taken, last = self._outgoing.take()
        answer: dict[str, Any] = {"tensors": [], "last": {}, "slot": slot}
        entries = [entry for entry, _ in taken] if self.writes else []
        if entries:
            flat = self._bucket(slot, extent(entries), taken[0][1].device)
            self._outgoing.write(taken, flat)
        if last:
            answer["last"] = self._outgoing.end() if self.writes else {"digest": ""}
        if entries:  # after all else: what is sent may occupy the GPU until receivers are told
            answer |= {"tensors": entries} | self.sent(slot, flat, entries, native=native)
        return answer

    @property
    def writes(self) -> bool:
        """Whether this rank has buckets, or only gathers with the others."""
        return self.rank == 0

    def sent(
        self, slot: int, flat: torch.Tensor, entries: list[dict[str, Any]], *, native: bool
    ) -> dict[str, Any]:
        """A bucket is filled: let it go. What receivers have to know of it."""
        raise NotImplementedError

    def place(self, device: torch.device) -> torch.device:
        """Where buckets lie of weights that are exported on `device`."""
        return device

    def made(self, size: int, device: torch.device) -> torch.Tensor:
        """(size,) uint8 of new memory."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def free(self, slot: int) -> None:
        """Return when nobody reads the bucket any more."""

    def _bucket(self, slot: int, size: int, device: torch.device) -> torch.Tensor:
        self.free(slot)
        device = self.place(device)
        held = self._buckets.get(slot)
        if held is None or held.numel() < size or held.device != device:
            self._buckets.pop(slot, None)
            held = None  # freed before the next one is asked for
            held = self._buckets[slot] = self.made(max(size, self._least(size)), device)
        return held

    def _least(self, size: int) -> int:
        """Whole buckets for a stream that has several, so that they are made once."""
        return self._bucket_bytes if size > self._bucket_bytes // 2 else size

    def gather(self) -> float:
        """Seconds that the export alone takes, for measurements: nothing is sent."""
        began = time.perf_counter()
        for _, tensor in self._trainer.export():
            last = tensor
        if last.is_cuda:
            torch.cuda.synchronize(last.device)
        return time.perf_counter() - began

    def snapshot(self, version: int) -> dict[str, Any]:
        """Write the weights to the disk for a server to be compared with: `directory`."""
        return self._snapshots.write(version)

    def finish(self) -> None:
        """Every engine has what was sent: free the buckets and snapshots."""
        self._release()

    def give_up(self) -> None:
        """Clean up after a publish that failed."""
        self._outgoing.close()
        self._release()

    def _release(self) -> None:
        for slot in list(self._buckets):
            self.free(slot)
        self._buckets.clear()
        self._snapshots.give_up()
