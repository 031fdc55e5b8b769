"""Eviction of the paused trainer: the memory behind its tensors leaves the device and comes back.

Tensors stay the objects they are, with their views, hooks and places in FSDP and the optimizer;
only their storage is emptied. What has to leave is told by `worker`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_plugins.trainer.fsdp.host import host_array
from miles_plugins.trainer.fsdp.ranks import local

__all__ = ["Eviction", "Moved"]

ALIGN = 512
"""Bytes to which each storage's place in the host array is rounded up."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What an eviction or its return moved."""

    bytes: int
    """Bytes of storage."""
    seconds: float
    """Wall-clock, the copies included."""


class Eviction:
    """Storages that are away, and the host array that holds them; it is kept between sleeps,
    because locking memory takes longer than copying it."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._away: list[tuple[Any, int, int]] = []  # storage, bytes, place in the host array
        self.asleep = False

    @torch.no_grad()
    def leave(self, tensors: Iterable[Tensor], device: torch.device) -> Moved:
        """Copy the storage of every tensor that lies on `device` to the host and empty it; one
        that several share leaves once."""
        began = time.perf_counter()
        found: dict[int, Any] = {}
        for tensor in tensors:
            part = local(tensor)
            if part.device.type == device.type and part.untyped_storage().nbytes():
                storage = part.untyped_storage()
                found.setdefault(storage.data_ptr(), storage)
        at = 0
        for storage in found.values():
            self._away.append((storage, storage.nbytes(), at))
            at += -(-storage.nbytes() // ALIGN) * ALIGN
        if self._host is None or len(self._host) < at:
            self._host = None  # before the larger one is made
            self._host = host_array(at, torch.uint8, pin=device.type == "cuda")
        for storage, size, place in self._away:
            self._host[place : place + size].copy_(_bytes(storage, size), non_blocking=True)
        _wait(device)
        for storage, _, _ in self._away:
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self.asleep = True
        return Moved(sum(size for _, size, _ in self._away), time.perf_counter() - began)

    @torch.no_grad()
    def come_back(self, device: torch.device) -> Moved:
        """Fill every storage again, with the bits that it had."""
        began = time.perf_counter()
        moved = 0
        for storage, size, place in self._away:
            storage.resize_(size)
            if self._host is not None:
                _bytes(storage, size).copy_(self._host[place : place + size], non_blocking=True)
            moved += size
        _wait(device)
        self._away.clear()
        self.asleep = False
        return Moved(moved, time.perf_counter() - began)


def _bytes(storage: Any, size: int) -> Tensor:
    """(size,) uint8 over a storage."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (size,), (1,))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
