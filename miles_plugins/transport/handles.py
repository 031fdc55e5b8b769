"""The two worker halves of the `ipc` transport: share a bucket by handle, open it there.

A handle is plain numbers and bytes as torch's storages give them; nothing is unpickled here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from miles import Engine, WeightSyncError, gpus_here
from miles_plugins.transport.native import Native, handed_over
from miles_plugins.transport.receiving import Receiving
from miles_plugins.transport.sending import Sending

__all__ = ["IpcReceiver", "IpcSender"]


class IpcSender(Sending):
    """Half of the transport in a trainer worker; every rank shares a bucket on its own GPU."""

    def __init__(self, trainer: Any, **how: Any) -> None:
        super().__init__(trainer, **how)
        self._handles: dict[int, tuple[int, dict[str, Any]]] = {}
        self._uses: list[tuple[bytes, int]] = []  # counters of uses, one for each handle made
        # A file that a dead process left would stay for ever; a named one is cleaned up after it.
        torch.multiprocessing.set_sharing_strategy("file_system")

    @property
    def writes(self) -> bool:
        """Rank 0 always; others where they have a GPU of their own."""
        return self.rank == 0 or torch.cuda.is_available()

    def made(self, size: int, device: torch.device) -> torch.Tensor:
        """Memory that others can open."""
        flat = super().made(size, device)
        return flat if flat.is_cuda else flat.share_memory_()

    def sent(
        self, slot: int, flat: torch.Tensor, entries: list[dict[str, Any]], *, native: bool
    ) -> dict[str, Any]:
        """The bucket's handle, for our receivers and for an engine's own server."""
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
        payload, uses = handed_over(flat, entries) if native else ("", [])
        self._uses += uses
        held, own = self._handles.get(slot, (0, {}))
        if held != flat.data_ptr():
            own = handle(flat)
            self._handles[slot] = (flat.data_ptr(), own)
            if flat.is_cuda:
                _handle, _size, _start, counter, at, *_ = own["more"]  # as torch gives them
                self._uses.append((counter, at))
        return {"handle": own | {"native": payload}}

    def finish(self) -> None:
        """As `Sending.finish`. A handle counts as a use of GPU memory until somebody has opened and
        closed it, and not everybody opens every handle: all uses end here, or torch would never
        free the bucket."""
        uses, self._uses = self._uses, []
        for use in uses:
            torch.UntypedStorage._release_ipc_counter_cuda(*use)
        super().finish()

    def _release(self) -> None:
        self._handles.clear()
        super()._release()

    def fill(self, slot: int, first: bool, native: bool = False) -> dict[str, Any]:
        """As `Sending.fill`, with `handle`."""
        return {"handle": {}} | super().fill(slot, first, native)


class IpcReceiver(Receiving):
    """Half of the transport in an engine worker."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "ipc")
        self._opened: dict[str, torch.Tensor] = {}
        self._gpus: list[str] | None = None  # UUIDs of those that are seen here, once asked for

    def memory(self, bucket: Mapping[str, Any]) -> torch.Tensor:
        """The bucket on this GPU, or rank 0's."""
        own = ""
        if torch.cuda.is_available():
            own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        chosen = nearest(bucket["handles"], own)
        key = repr((chosen["handle"], chosen["more"]))  # two buckets may lie in one allocation
        if key not in self._opened:
            if len(self._opened) > 1:  # one that was replaced by a larger one
                self._opened.clear()
            self._opened[key] = opened(chosen)
        return self._opened[key]

    async def hand_on(self, native: Native, bucket: Mapping[str, Any]) -> None:
        """One handle a rank of the server: of the bucket on its own GPU, where there is one."""
        if self._gpus is None:
            self._gpus = [gpu.uuid for gpu in await asyncio.to_thread(gpus_here)]
        own = self._gpus[native.first_gpu :][: native.ranks]
        own += [""] * (native.ranks - len(own))
        payload = [nearest(bucket["handles"], gpu)["native"] for gpu in own]
        body = {"serialized_named_tensors": payload, "load_format": "flattened_bucket"}
        await native.post("/update_weights_from_tensor", body | {"flush_cache": False})

    def release(self) -> None:
        """Close the buckets, so that the trainer's memory is really free."""
        self._opened.clear()


def handle(flat: torch.Tensor) -> dict[str, Any]:
    """Plain values by which another process opens the memory of a whole (bytes,) uint8 tensor."""
    storage = flat.untyped_storage()
    if not flat.is_cuda:
        there, name, size = storage._share_filename_cpu_()
        return {"device": "", "handle": bytes(name), "more": [bytes(there), int(size)]}
    _, *rest = storage._share_cuda_()
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    offset = flat.storage_offset()
    return {"device": uuid, "handle": bytes(rest[0]), "more": [*rest, offset, flat.numel()]}


def nearest(handles: list[dict[str, Any]], gpu: str) -> dict[str, Any]:
    """Of the buckets that hold the same, the one on the GPU with this UUID, or the first."""
    present = [each for each in handles if each]
    return min(present, key=lambda each: each["device"] != gpu)


def opened(shared: Mapping[str, Any]) -> torch.Tensor:
    """(bytes,) uint8 of another process's memory. Raises `WeightSyncError` when it is gone or on a
    GPU that this process does not see."""
    try:
        if not shared["device"]:
            there, size = shared["more"]
            storage = torch.UntypedStorage._new_shared_filename_cpu(there, shared["handle"], size)
            return torch.empty(0, dtype=torch.uint8).set_(storage)
        *rest, offset, size = shared["more"]
        index = _index(shared["device"])
        storage = torch.UntypedStorage._new_shared_cuda(index, *rest)
        flat = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}")
        return flat.set_(storage, offset, (size,))
    except RuntimeError as error:
        raise WeightSyncError(
            f"transport ipc: the trainer's bucket cannot be opened: {error}"
        ) from error


def _index(uuid: str) -> int:
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise WeightSyncError(
            f"transport ipc: the trainer's bucket is on GPU {uuid}, and this process sees "
            f"{', '.join(seen) or 'none'}; colocated engines have to see the trainer's GPUs"
        )
    return seen.index(uuid)
