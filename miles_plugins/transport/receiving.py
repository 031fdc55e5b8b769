"""The engine's half that transports of flat buckets share: stage a stream, then let the engine
switch; or hand it to the engine's own server.

Where a bucket's bytes come from is what each transport adds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from miles import Engine, WeightSyncError
from miles_plugins.transport.native import Native
from miles_plugins.transport.serving import Serving
from miles_plugins.transport.stream import Incoming

__all__ = ["BRIEF", "Receiving"]

BRIEF = 1 << 20
"""Buckets below this many bytes are copied at once; larger ones in a thread, so that decoding goes
on."""


class Receiving:
    """Half of a transport in an engine worker."""

    def __init__(self, engine: Engine, name: str, *, reaches_servers: bool = True) -> None:
        self.name = name
        self._serving = Serving(engine, name)
        served = reaches_servers and hasattr(engine, "updating")
        self._native = Native(engine, name) if served else None
        self._incoming: Incoming | None = None
        self._compare = False

    async def begin(self, version: int, compare: bool) -> dict[str, Any]:
        """A stream follows; in how many `ranks` it is received, and whether a server of the
        engine's own does (`native`)."""
        self._compare = compare
        if self._native is not None:
            return {"ranks": await self._native.begin(version), "native": True}
        self._incoming = Incoming(self.name, hashed=compare)
        return {"ranks": 1, "native": False}

    async def take(self, bucket: Mapping[str, Any]) -> None:
        """Take one bucket. Raises `WeightSyncError`."""
        if self._native is not None:
            if bucket["tensors"]:
                await self.hand_on(self._native, bucket)
            return
        if (incoming := self._incoming) is None:
            raise WeightSyncError(f"transport {self.name}: a bucket came before a stream began")
        if not bucket["tensors"]:
            return

        def copy() -> None:
            incoming.add(bucket["tensors"], self.memory(bucket))

        if sum(entry["bytes"] for entry in bucket["tensors"]) < BRIEF and self.at_once:
            copy()
        else:
            await asyncio.to_thread(copy)

    at_once = True
    """Whether `memory` never waits for anybody."""

    def memory(self, bucket: Mapping[str, Any]) -> Tensor:
        """(bytes,) uint8: the bucket's bytes, valid until the next one is asked for."""
        raise NotImplementedError

    async def hand_on(self, native: Native, bucket: Mapping[str, Any]) -> None:
        """Have the engine's own server take the bucket."""
        raise WeightSyncError(
            f"transport {self.name}: it cannot reach an engine with a server of its own; use "
            "another transport"
        )

    async def finish(self, version: int, digest: str, contents: Sequence[str]) -> dict[str, Any]:
        """Serve the stream as `version`, if it is what was sent. A server of the engine's own is
        `held` until `go_on`, and gives its `sums` when they are to be compared. Raises
        `WeightSyncError`; then nothing has changed, or the engine is stopped."""
        if self._native is not None:
            sums = await self._native.finish(compare=self._compare)
            return {"sums": sums, "held": True}
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            raise WeightSyncError(f"transport {self.name}: no stream began")
        incoming.end(digest, contents)
        await self._serving.load(
            version, incoming.entries, tensors=incoming.drain, compare=self._compare
        )
        self.release()
        return {"sums": {}, "held": False}

    async def prove(self, version: int, directory: str) -> None:
        """Compare the engine's own server with a snapshot; see `Native.prove`."""
        if self._native is not None:
            await self._native.prove(version, directory)

    async def go_on(self) -> None:
        """Let the engine's own server serve what it has."""
        if self._native is not None:
            await self._native.go_on()

    async def give_up(self) -> None:
        """Drop what was staged."""
        self._incoming = None
        self.release()
        if self._native is not None:
            await self._native.give_up()

    def release(self) -> None:
        """Let go of what the sender shares."""
