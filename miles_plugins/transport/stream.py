"""The trainer's one stream of named tensors, cut into flat buckets, and put together again.

Every transport that sends buckets sends these; how a bucket's bytes travel is its own affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles import Trainer, WeightSyncError
from miles.learn.digest import Whole, dtype_name, hexadecimal, sums

__all__ = ["Incoming", "Outgoing", "view"]


class Outgoing:
    """A trainer's export, a bucket at a time. Where buckets end is decided by sizes alone, so that
    every rank stops at the same tensor.

    `packed` leaves no gap between tensors, and starts a bucket wherever one would be misaligned;
    otherwise each begins at a multiple of 64 bytes.
    """

    def __init__(self, trainer: Trainer, *, bucket_bytes: int, packed: bool = False) -> None:
        self._trainer = trainer
        self._bucket_bytes = bucket_bytes
        self._alignment = 1 if packed else 64
        self._stream: Iterator[tuple[str, Tensor]] | None = None
        self._held: tuple[str, Tensor] | None = None
        self._entries: list[dict[str, Any]] = []
        self._sums: list[Tensor] = []

    def begin(self) -> None:
        """Start a new stream, giving up one that did not end."""
        self.close()
        self._stream = iter(self._trainer.export())

    def take(self) -> tuple[list[tuple[dict[str, Any], Tensor]], bool]:
        """(entry, tensor) of one bucket, and whether the stream ends with it. An entry has `name`,
        `dtype`, `shape`, `offset`, `bytes`. Raises `WeightSyncError` before `begin`."""
        if self._stream is None:
            raise WeightSyncError("transport: a bucket was asked for before a stream began")
        taken: list[tuple[dict[str, Any], Tensor]] = []
        offset = 0
        while True:
            pair, self._held = self._held or next(self._stream, None), None
            if pair is None:
                return taken, True
            name, tensor = pair
            misaligned = offset % tensor.element_size()
            if taken and (misaligned or offset + tensor.nbytes > self._bucket_bytes):
                self._held = pair
                return taken, False
            entry = {"name": name, "dtype": dtype_name(tensor), "shape": list(tensor.shape)}
            entry |= {"offset": offset, "bytes": tensor.nbytes}
            taken.append((entry, tensor.detach()))
            offset += -(-tensor.nbytes // self._alignment) * self._alignment

    def write(self, taken: Sequence[tuple[dict[str, Any], Tensor]], flat: Tensor) -> None:
        """Copy a bucket's tensors into (bytes,) uint8 `flat`, and count what then lies there into
        the digest."""
        places = [view(flat, entry).copy_(tensor) for entry, tensor in taken]
        self._entries += [entry for entry, _ in taken]
        self._sums += sums(places)

    def end(self) -> dict[str, Any]:
        """`digest` of the whole stream, `contents` of its tensors in order, `bytes`."""
        contents = hexadecimal(self._sums)
        whole = Whole()
        for entry, content in zip(self._entries, contents, strict=True):
            whole.add(entry["name"], entry["dtype"], entry["shape"], content)
        size = sum(entry["bytes"] for entry in self._entries)
        self.close()
        return {"digest": whole.end(), "contents": contents, "bytes": size}

    def close(self) -> None:
        """Give up a stream that did not end."""
        stream, self._stream, self._held = self._stream, None, None
        self._entries, self._sums = [], []
        if stream is not None and hasattr(stream, "close"):
            stream.close()


def extent(entries: Sequence[Mapping[str, Any]]) -> int:
    """Bytes that a bucket of these takes."""
    return max((entry["offset"] + entry["bytes"] for entry in entries), default=0)


def view(flat: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """A tensor of a bucket, sharing its (bytes,) uint8 memory."""
    dtype = getattr(torch, entry["dtype"])
    start, stop = entry["offset"], entry["offset"] + entry["bytes"]
    return flat[start:stop].view(dtype).view(entry["shape"])


class Incoming:
    """A stream as it arrives: copies of its tensors, and what was said of them."""

    def __init__(self, name: str, *, hashed: bool) -> None:
        self._name = name  # of the transport
        self._hashed = hashed
        self.entries: list[dict[str, Any]] = []
        self._tensors: dict[str, Tensor] = {}
        self._sums: list[Tensor] = []

    def add(self, entries: Sequence[Mapping[str, Any]], flat: Tensor) -> None:
        """Copy tensors out of a bucket. Raises `WeightSyncError` for a name that came before, or
        a shape that is not that of its bytes."""
        for entry in entries:
            name, dtype = entry["name"], getattr(torch, entry["dtype"])
            count = 1
            for size in entry["shape"]:
                count *= size
            if name in self._tensors:
                raise WeightSyncError(f"transport {self._name}: {name} arrived twice")
            if count * dtype.itemsize != entry["bytes"]:
                raise WeightSyncError(
                    f"transport {self._name}: {name} has {entry['bytes']} bytes, which are no "
                    f"{entry['dtype']} of shape {tuple(entry['shape'])}"
                )
            self._tensors[name] = view(flat, entry).clone()
            self.entries.append(dict(entry))
        if self._hashed:
            # The copies are hashed, not the bucket: what is proven is what the engine is given.
            self._sums += sums(self._tensors[entry["name"]] for entry in entries)

    def end(self, digest: str, contents: Sequence[str]) -> None:
        """Compare with what the sender says it sent. Raises `WeightSyncError` naming the tensors
        whose bytes differ, or that the names, types or shapes do."""
        whole = Whole()
        for entry, content in zip(self.entries, contents, strict=False):
            entry["content"] = content
            whole.add(entry["name"], entry["dtype"], entry["shape"], content)
        if len(contents) != len(self.entries) or whole.end() != digest:
            raise WeightSyncError(
                f"transport {self._name}: {len(self.entries)} tensors arrived, and their names, "
                f"types and shapes are not those of the {len(contents)} that were sent"
            )
        found = hexadecimal(self._sums) if self._hashed else contents
        differ = [e["name"] for e, f in zip(self.entries, found, strict=True) if e["content"] != f]
        if differ:
            raise WeightSyncError(
                f"transport {self._name}: {len(differ)} tensors differ from what the trainer sent: "
                f"{', '.join(differ[:8])}"
            )

    def drain(self) -> Iterator[tuple[str, Tensor]]:
        """Hand tensors on and let go of each, so that a large model is not held twice for longer
        than needed."""
        for name in list(self._tensors):
            yield name, self._tensors.pop(name)
