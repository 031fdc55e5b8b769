"""The two worker halves of the `rdma` transport: register memory, write into the others'.

Written against the Python API of Mooncake's TransferEngine, with its peer-to-peer handshake: no
metadata server is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from miles import ConfigError, Engine, WeightSyncError
from miles_plugins.transport.receiving import Receiving
from miles_plugins.transport.sending import Sending
from miles_plugins.transport.stream import extent

if TYPE_CHECKING:
    from miles_plugins.transport.rdma import Rdma

__all__ = ["RdmaReceiver", "RdmaSender"]


class Wire:
    """One transfer engine of this process, and the memory that is registered with it."""

    def __init__(self, config: Rdma.Config) -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise ConfigError(
                "transport rdma: Mooncake cannot be loaded; pip install mooncake-transfer-engine "
                f"(or mooncake-transfer-engine-non-cuda), and libibverbs1 by the system: {error}"
            ) from error
        self._engine = TransferEngine()
        self._held: dict[int, torch.Tensor] = {}
        status = self._engine.initialize(
            config.host, "P2PHANDSHAKE", config.protocol, config.device
        )
        if status:
            raise WeightSyncError(
                f"transport rdma: {config.protocol} at {config.host} could not be opened "
                f"({status}); is the device {config.device or 'there'!r}?"
            )
        self.name = f"{config.host}:{self._engine.get_rpc_port()}"

    def register(self, flat: torch.Tensor) -> int:
        """Let others, or this engine, reach the memory; its address. Raises `WeightSyncError`."""
        address = flat.data_ptr()
        if status := self._engine.register_memory(address, flat.numel()):
            raise WeightSyncError(
                f"transport rdma: {flat.numel()} bytes on {flat.device} could not be registered "
                f"({status})"
            )
        self._held[address] = flat
        return address

    def drop(self, address: int) -> None:
        """Take memory back."""
        if self._held.pop(address, None) is not None:
            self._engine.unregister_memory(address)

    def close(self) -> None:
        """Take all of it back."""
        for address in list(self._held):
            self.drop(address)

    def write(self, peer: str, here: int, there: int, size: int) -> None:
        """Write memory of this process into that of another. Raises `WeightSyncError`."""
        if status := self._engine.transfer_sync_write(peer, here, there, size):
            raise WeightSyncError(
                f"transport rdma: {size} bytes could not be written to {peer} ({status})"
            )


class RdmaSender(Sending):
    """Half of the transport in a trainer worker; rank 0 writes."""

    def __init__(self, trainer: Any, *, config: Rdma.Config, **how: Any) -> None:
        super().__init__(trainer, **how)
        self._config = config
        self._wire: Wire | None = None
        self._places: list[dict[str, Any]] = []
        self._addresses: dict[int, int] = {}

    def aim(self, places: Sequence[Mapping[str, Any]]) -> None:
        """Where each engine's two buckets are."""
        if self._wire is None:
            self._wire = Wire(self._config)
        self._places = [dict(place) for place in places]

    def made(self, size: int, device: torch.device) -> torch.Tensor:
        """Memory of the size that receivers have. Raises `WeightSyncError` for a larger tensor."""
        if size > self._config.bucket_bytes:
            raise WeightSyncError(
                f"transport rdma: a tensor has {size} bytes, and transport.bucket_bytes is "
                f"{self._config.bucket_bytes}; make it as large"
            )
        return super().made(self._config.bucket_bytes, device)

    def sent(
        self, slot: int, flat: torch.Tensor, entries: list[dict[str, Any]], *, native: bool
    ) -> dict[str, Any]:
        """Write the bucket into every engine's."""
        if self._wire is None:
            raise WeightSyncError("transport rdma: a bucket was filled before the sides met")
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
        if self._addresses.get(slot) != flat.data_ptr():
            self._addresses[slot] = self._wire.register(flat)
        for place in self._places:
            there = place["buckets"][slot]
            self._wire.write(place["name"], flat.data_ptr(), there, extent(entries))
        return {}

    def _release(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._addresses.clear()
        super()._release()


class RdmaReceiver(Receiving):
    """Half of the transport in an engine worker."""

    def __init__(self, engine: Engine, *, config: Rdma.Config) -> None:
        super().__init__(engine, "rdma", reaches_servers=False)
        self._config = config
        self._wire: Wire | None = None
        self._buckets: list[torch.Tensor] = []

    def places(self) -> dict[str, Any]:
        """`name` of this side, and the addresses of its two `buckets`."""
        if self._wire is None:
            self._wire = Wire(self._config)
        device = torch.device("cpu")
        if torch.cuda.is_available() and self._config.protocol == "rdma":
            device = torch.device("cuda", torch.cuda.current_device())
        size = self._config.bucket_bytes
        self._buckets = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        addresses = [self._wire.register(flat) for flat in self._buckets]
        return {"name": self._wire.name, "buckets": addresses}

    def memory(self, bucket: Mapping[str, Any]) -> torch.Tensor:
        """What was written into this slot's bucket."""
        return self._buckets[bucket["slot"]]

    def release(self) -> None:
        """Free the buckets."""
        if self._wire is not None:
            self._wire.close()
        self._buckets = []
