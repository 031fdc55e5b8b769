"""The two worker halves of the `memory` transport: fill a bucket, copy a bucket, compare digests.

They meet only through files and the plain dictionaries that the driver carries; neither knows the
other's process beyond the path under `/proc` by which the nameless file is opened.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from miles import Engine, Trainer, WeightSyncError
from miles.learn.digest import Whole, contents, dtype_name
from miles_plugins.transport.serving import Serving

__all__ = ["MemoryReceiver", "MemorySender"]

_ALIGNMENT = 64
"""Tensors start at multiples of this many bytes."""
_BRIEF = 1 << 20
"""Buckets below this many bytes are copied at once; larger ones in a thread, so that decoding goes
on."""


class MemorySender:
    """Half of the transport in a trainer worker. Every rank takes part in the export; rank 0
    writes."""

    def __init__(
        self, trainer: Trainer, *, rank: int, bucket_bytes: int, directories: Sequence[str]
    ) -> None:
        self._trainer = trainer
        self._writes = rank == 0
        self._bucket_bytes = bucket_bytes
        self._directories = tuple(dict.fromkeys(directories))
        self._buckets: dict[int, _Bucket] = {}
        self._stream: Iterator[tuple[str, torch.Tensor]] | None = None
        self._held: tuple[str, torch.Tensor] | None = None
        self._digest = _Digest()

    def fill(self, slot: int, first: bool) -> dict[str, Any]:
        """Write the next tensors of the stream into bucket `slot`; `first` begins a new stream.

        Returns `path`; `tensors`, each with `name`, `dtype`, `shape`, `offset`, `bytes` and
        `content`; `digest` of the whole stream, empty until its last bucket; `notice` for a person,
        or empty. Only rank 0's answer says anything. Raises `WeightSyncError` when there is no room
        anywhere.
        """
        if first:
            self.close()
            self._stream = iter(self._trainer.export())
        if self._stream is None:
            raise WeightSyncError("transport memory: a bucket was asked for before a stream began")
        taken, last = self._take()
        answer: dict[str, Any] = {"path": "", "tensors": [], "digest": "", "notice": ""}
        if not self._writes:
            return answer
        if taken:
            end = taken[-1][2] + taken[-1][1].nbytes
            bucket, answer["notice"] = self._bucket(slot, end)
            answer["path"] = bucket.path
            answer["tensors"] = self._write(bucket, taken)
        if last:
            answer["digest"] = self._digest.end()
            self._stream = None
        return answer

    def close(self) -> None:
        """Give up a stream that did not end; buckets stay for the next one."""
        stream, self._stream, self._held = self._stream, None, None
        self._digest = _Digest()
        if stream is not None and hasattr(stream, "close"):
            stream.close()

    def _take(self) -> tuple[list[tuple[str, torch.Tensor, int]], bool]:
        """Tensors for one bucket with their offsets, and whether the stream ends with them.

        Decided by sizes alone, so that every rank stops at the same tensor.
        """
        taken: list[tuple[str, torch.Tensor, int]] = []
        offset = 0
        while True:
            pair, self._held = self._held or next(self._stream, None), None
            if pair is None:
                return taken, True
            name, tensor = pair
            if taken and offset + tensor.nbytes > self._bucket_bytes:
                self._held = pair
                return taken, False
            taken.append((name, tensor, offset))
            offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    def _write(
        self, bucket: _Bucket, taken: Sequence[tuple[str, torch.Tensor, int]]
    ) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        written: list[torch.Tensor] = []
        for name, tensor, offset in taken:
            entry = {
                "name": name,
                "dtype": dtype_name(tensor),
                "shape": list(tensor.shape),
                "offset": offset,
                "bytes": tensor.nbytes,
            }
            if tensor.nbytes:
                tensor = _view(bucket.memory, entry).copy_(tensor.detach())
            entries.append(entry)
            written.append(tensor)
        for entry, content in zip(entries, self._digest.add(entries, written), strict=True):
            entry["content"] = content
        return entries

    def _bucket(self, slot: int, size: int) -> tuple[_Bucket, str]:
        bucket = self._buckets.get(slot)
        if bucket is not None and bucket.size >= size:
            return bucket, ""
        self._buckets.pop(slot, None)
        refused: list[str] = []
        for directory in self._directories:
            try:
                bucket = _Bucket(directory, max(size, 1))
            except OSError as error:
                refused.append(f"{directory}: {os.strerror(error.errno or errno.EIO)}")
                continue
            self._buckets[slot] = bucket
            fallen = f"transport memory: {'; '.join(refused)}; using {directory} for {size} bytes"
            return bucket, fallen if refused else ""
        raise WeightSyncError(
            f"transport memory: no room for a bucket of {size} bytes: {'; '.join(refused)}"
        )


class MemoryReceiver:
    """Half of the transport in an engine worker: stages a whole stream, then lets the engine
    switch."""

    def __init__(self, engine: Engine) -> None:
        self._serving = Serving(engine, "memory")
        self._staged: dict[str, torch.Tensor] = {}
        self._entries: list[Mapping[str, Any]] = []
        self._digest = _Digest()

    async def stage(self, bucket: Mapping[str, Any], first: bool) -> None:
        """Copy a bucket out of shared memory; `first` drops what an earlier stream left.

        Raises `WeightSyncError` naming the tensors whose bytes are not the sender's.
        """
        if first:
            self.discard()
        if not bucket["tensors"]:
            return
        if sum(entry["bytes"] for entry in bucket["tensors"]) < _BRIEF:
            self._copy(bucket)
        else:
            await asyncio.to_thread(self._copy, bucket)

    async def load(self, version: int, digest: str, compare: bool) -> None:
        """Serve what was staged as `version`; with `compare`, what the engine then serves is
        compared before it goes on. Raises `WeightSyncError` when the stream is not the sender's."""
        found = self._digest.end()
        staged, entries = self._staged, self._entries
        self.discard()
        if found != digest:
            raise WeightSyncError(
                f"transport memory: version {version}: {len(staged)} tensors arrived with digest "
                f"{found}, {digest} was sent: one is missing, or they came in another order"
            )
        await self._serving.load(version, entries, tensors=lambda: _drain(staged), compare=compare)

    def discard(self) -> None:
        """Drop what was staged."""
        self._staged, self._entries = {}, []
        self._digest = _Digest()

    def _copy(self, bucket: Mapping[str, Any]) -> None:
        tensors = bucket["tensors"]
        # Held here, so that a copy that outlives a discarded stream cannot touch the next one.
        staged, entries, digest = self._staged, self._entries, self._digest
        size = max(entry["offset"] + entry["bytes"] for entry in tensors)
        memory = _open(bucket["path"], size) if size else None
        copies: list[torch.Tensor] = []
        for entry in tensors:
            tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
            if entry["bytes"]:
                tensor.copy_(_view(memory, entry))
            copies.append(tensor)
            staged[entry["name"]] = tensor
            entries.append(entry)
        # The copies are hashed, not the shared bytes: what is proven is what the engine will be
        # given.
        found = digest.add(tensors, copies)
        pairs = zip(tensors, found, strict=True)
        differ = [entry["name"] for entry, content in pairs if entry["content"] != content]
        if differ:
            raise WeightSyncError(
                f"transport memory: {len(differ)} tensors differ from what the trainer sent: "
                f"{', '.join(differ[:8])}"
            )


class _Bucket:
    """A file of this user alone, without a name, reserved to its full size and mapped."""

    def __init__(self, directory: str, size: int) -> None:
        self.size = size
        # mkstemp makes mode 0600 under an unguessable name, which is gone before anything is
        # written.
        descriptor, path = tempfile.mkstemp(prefix="miles-", dir=directory)
        try:
            os.unlink(path)
            # Reserved, because a full tmpfs would otherwise kill the process at the first write.
            os.posix_fallocate(descriptor, 0, size)
            self.memory = mmap.mmap(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def _open(path: str, size: int) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise WeightSyncError(f"transport memory: cannot open {path}: {error}") from error
    try:
        if os.fstat(descriptor).st_size < size:
            raise WeightSyncError(f"transport memory: {path} is shorter than {size} bytes")
        # Private and writable: torch refuses to view memory that it may not write.
        return mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


def _view(memory: mmap.mmap, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, entry["dtype"])
    count = entry["bytes"] // dtype.itemsize
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry["offset"])
    return flat.view(entry["shape"])


def _drain(staged: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Hand tensors on and let go of each, so that a large model is not held twice for longer than
    needed."""
    for name in list(staged):
        yield name, staged.pop(name)


class _Digest:
    """The content of every tensor as it is added, and that of all of them in order."""

    def __init__(self) -> None:
        self._whole = Whole()

    def add(
        self, entries: Sequence[Mapping[str, Any]], tensors: Sequence[torch.Tensor]
    ) -> list[str]:
        """Digests of tensors, counted into the whole."""
        found = contents(tensors)
        for entry, content in zip(entries, found, strict=True):
            self._whole.add(entry["name"], entry["dtype"], entry["shape"], content)
        return found

    def end(self) -> str:
        """Digest of everything added."""
        return self._whole.end()
