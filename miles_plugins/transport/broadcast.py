"""The two worker halves of the `nccl` transport: meet in a process group, broadcast buckets.

The group is no part of torch's default one, which belongs to the trainer's ranks; it is made so
that an SGLang server finds it under the same keys.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from miles import Engine, WeightSyncError
from miles_plugins.transport.native import Native
from miles_plugins.transport.nccl import CUMEM
from miles_plugins.transport.receiving import Receiving
from miles_plugins.transport.sending import Sending
from miles_plugins.transport.stream import extent

__all__ = ["BroadcastReceiver", "BroadcastSender", "Group"]


class Group:
    """One rank of a process group in which rank 0 broadcasts."""

    def __init__(
        self,
        store: dist.Store,
        *,
        backend: str,
        name: str,
        rank: int,
        world: int,
        timeout_s: float,
    ) -> None:
        self._limit = timedelta(seconds=timeout_s)
        kind = "cuda" if backend == "nccl" else "cpu"
        self.device = torch.device("cpu")
        if kind == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        # The keys under which torch's own group of this name would meet.
        for prefix in (name, f"{name}/", f"{kind}/"):
            store = dist.PrefixStore(prefix, store)
        try:
            if kind == "cuda" and not dist.is_nccl_available():
                raise WeightSyncError("transport nccl: this torch has no NCCL; use backend=gloo")
            if kind == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = 2 * self._limit  # when torch would end the process; see `wait`
                self._group = dist.ProcessGroupNCCL(store, rank, world, options)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, world, self._limit)
        except RuntimeError as error:
            raise WeightSyncError(
                f"transport nccl: rank {rank} of {world} could not meet the others: {error}"
            ) from error

    def broadcast(self, flat: torch.Tensor) -> Any:
        """Begin to send from rank 0, or to receive; `wait` ends it. NCCL connects in the first one,
        and returns when every rank is there."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            return self._group.broadcast([flat], options)
        except RuntimeError as error:
            raise WeightSyncError(f"transport nccl: a broadcast was refused: {error}") from error

    def wait(self, work: Any) -> None:
        """Return when the bucket may be used again. Raises `WeightSyncError` when another rank is
        gone or silent."""
        try:
            work.wait(self._limit)  # of NCCL only the stream waits, however long that takes
            if self.device.type == "cuda":
                self._reached()
        except RuntimeError as error:
            raise WeightSyncError(f"transport nccl: a broadcast failed: {error}") from error

    def _reached(self) -> None:
        """Return when the GPU has come as far as this thread's stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        end = time.monotonic() + self._limit.total_seconds()
        while not event.query():
            if time.monotonic() > end:
                raise WeightSyncError(
                    f"transport nccl: a broadcast did not end within "
                    f"{self._limit.total_seconds():g} s (transport.timeout_s)"
                )
            time.sleep(0.0001)

    def leave(self) -> None:
        """End it, whatever the others do."""
        for name in ("abort", "shutdown"):
            if hasattr(self._group, name):
                getattr(self._group, name)()
                break
        del self._group


class BroadcastSender(Sending):
    """Half of the transport in a trainer worker; rank 0 is in the group."""

    def __init__(self, trainer: Any, *, backend: str, timeout_s: float, **how: Any) -> None:
        super().__init__(trainer, packed=True, **how)
        self._backend = backend
        self._timeout_s = timeout_s
        self._meeting: tuple[dist.Store, str, int] | None = None
        self._group: Group | None = None
        self._begun: dict[int, Future[Any]] = {}  # broadcasts by slot
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")

    def open(self, host: str, name: str, world: int) -> int:
        """Listen for the others at this address alone; the port. (Torch's own socket would be open
        on every interface.)"""
        self._leave()
        how: dict[str, Any] = {"timeout": timedelta(seconds=self._timeout_s)}
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family) as sock:
                sock.bind(address)
                port, own = sock.getsockname()[1], sock.detach()
            how |= {"wait_for_workers": False, "master_listen_fd": own}
            store = dist.TCPStore(host, port, world, True, **how)
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"transport nccl: cannot listen at {host} (transport.host, which has to be an "
                f"address of the trainer's machine): {error}"
            ) from error
        self._meeting = (store, name, world)
        return int(store.port)

    async def join(self) -> None:
        """Meet the others as rank 0."""
        if self._meeting is None:
            raise WeightSyncError("transport nccl: joined before it was opened")
        store, name, world = self._meeting

        def meet() -> Group:
            how = {"backend": self._backend, "timeout_s": self._timeout_s}
            return Group(store, name=name, rank=0, world=world, **how)

        self._group = await asyncio.to_thread(meet)

    def sent(
        self, slot: int, flat: torch.Tensor, entries: list[dict[str, Any]], *, native: bool
    ) -> dict[str, Any]:
        """Begin to broadcast the bucket; the next one is gathered meanwhile."""
        if self._group is None:
            raise WeightSyncError("transport nccl: a bucket was filled before the sides met")
        # In a thread: it may wait for receivers, who are asked once this has returned.
        part = flat[: extent(entries)]
        self._begun[slot] = self._thread.submit(self._group.broadcast, part)
        return {}

    async def begun(self, slot: int) -> None:
        """Return when the bucket's broadcast has begun, which of NCCL's first one is when every
        rank is there. Raises `WeightSyncError` when it was refused."""
        if (begun := self._begun.get(slot)) is not None:
            await asyncio.wrap_future(begun)

    def free(self, slot: int) -> None:
        """Wait for the bucket's broadcast."""
        begun = self._begun.pop(slot, None)
        if begun is None or self._group is None:
            return
        try:
            work = begun.result(self._timeout_s)
        except TimeoutError:
            raise WeightSyncError(
                f"transport nccl: nobody came to a broadcast within {self._timeout_s:g} s "
                "(transport.timeout_s)"
            ) from None
        self._group.wait(work)

    def place(self, device: torch.device) -> torch.device:
        """Where the group can send from, also when the weights are kept elsewhere."""
        return device if self._group is None else self._group.device

    def give_up(self) -> None:
        """Leave the group, so that no broadcast is waited for."""
        self._leave()
        super().give_up()

    def _leave(self) -> None:
        group, self._group = self._group, None
        self._begun.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)  # it may wait for who is gone
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
        self._meeting = None
        if group is not None:
            group.leave()


class BroadcastReceiver(Receiving):
    """Half of the transport in an engine worker."""

    at_once = False

    def __init__(self, engine: Engine, *, backend: str, timeout_s: float) -> None:
        super().__init__(engine, "nccl")
        self._backend = backend
        self._timeout_s = timeout_s
        self._group: Group | None = None
        self._name = ""
        self._flat: torch.Tensor | None = None

    async def join(self, host: str, port: int, name: str, offset: int, world: int) -> None:
        """Meet the others, as rank `offset`, or with a server as that and those after it."""
        self._name = name
        if self._native is not None:
            body = {"master_address": host, "master_port": port, "rank_offset": offset}
            body |= {"world_size": world, "group_name": name, "backend": self._backend}
            await self._native.post("/init_weights_update_group", body)
            return
        await asyncio.to_thread(self._join, host, port, offset, world)

    def _join(self, host: str, port: int, rank: int, world: int) -> None:
        limit = timedelta(seconds=self._timeout_s)
        try:
            store = dist.TCPStore(host, port, world, False, limit)
        except (RuntimeError, OSError) as error:
            where = f"{host}:{port}"
            raise WeightSyncError(f"transport nccl: nobody meets at {where}: {error}") from error
        how = {"backend": self._backend, "timeout_s": self._timeout_s}
        self._group = Group(store, name=self._name, rank=rank, world=world, **how)

    def memory(self, bucket: Mapping[str, Any]) -> torch.Tensor:
        """The bucket's bytes, once they are here."""
        group = self._group
        if group is None:
            raise WeightSyncError("transport nccl: a bucket came before the sides met")
        size = extent(bucket["tensors"])
        if self._flat is None or self._flat.numel() < size:
            self._flat = None  # freed before the next one is asked for
            self._flat = torch.empty(size, dtype=torch.uint8, device=group.device)
        flat = self._flat[:size]
        group.wait(group.broadcast(flat))
        return flat

    async def hand_on(self, native: Native, bucket: Mapping[str, Any]) -> None:
        """Have the server receive the same broadcast."""
        entries = bucket["tensors"]
        body = {"names": [e["name"] for e in entries], "dtypes": [e["dtype"] for e in entries]}
        body |= {"shapes": [e["shape"] for e in entries], "group_name": self._name}
        body |= {"load_format": "flattened_bucket", "flush_cache": False}
        try:
            await native.post("/update_weights_from_distributed", body)
        except WeightSyncError as error:
            if "NCCL error" in str(error):
                own = os.environ.get(CUMEM, "unset")
                error.add_note(
                    f"{CUMEM} is {own} for the trainer (transport.cumem) and has to be "
                    "the same for the server, where SGLang sets 0 unless it finds it set; "
                    "NCCL_DEBUG=INFO tells more in both logs"
                )
            raise

    async def give_up(self) -> None:
        """Leave the group as well."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()
        if self._native is not None and self._name:
            await self._native.leave(self._name)
        self._name = ""
        await super().give_up()

    def release(self) -> None:
        """Free the bucket."""
        self._flat = None
