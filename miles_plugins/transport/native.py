"""An engine with a server of its own, which takes weights over SGLang's native routes.

The engine gives the channel (`updating`); here is what is said over it, and the proof that the
server took what was sent. Tensors pass beside it, by handle or process group.
"""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch

from miles import Engine, EngineError, MilesError, WeightsDiffer, WeightSyncError

__all__ = ["Native", "handed_over"]

_log = logging.getLogger(__name__)


class Native:
    """One engine's server during updates, on behalf of transport `name`."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine: Engine | Any = engine
        self._name = name
        self._around: AbstractAsyncContextManager[Any] | None = None
        self._channel: Any = None
        self.ranks = 1
        """Tensor-parallel ranks of the server."""
        self.first_gpu = 0
        """Number of the GPU of its first rank."""

    async def begin(self, version: int) -> int:
        """Stop the server for an update to `version`; how many ranks it has."""
        await self.give_up()
        around = self._engine.updating(version)
        self._channel = await around.__aenter__()
        self._around = around
        self.ranks = int(self._channel.ranks)
        self.first_gpu = int(self._channel.first_gpu)
        return self.ranks

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Ask the server. Raises `WeightSyncError`."""
        if self._channel is None:
            raise WeightSyncError(f"transport {self._name}: {path} was asked before an update")
        try:
            return await self._channel.post(path, body)
        except EngineError as error:
            raise WeightSyncError(f"transport {self._name}: {path}: {error}") from error

    async def finish(self, *, compare: bool) -> dict[str, str]:
        """The last bucket was taken; the server's checksums when they are to be compared. It stays
        stopped until `go_on`."""
        if self._channel is None:
            raise WeightSyncError(f"transport {self._name}: no update began")
        await self._channel.end()
        return await self._checksums() if compare else {}

    async def _checksums(self) -> dict[str, str]:
        try:
            found: dict[str, str] = await self._channel.checksums()
        except EngineError as error:
            raise WeightSyncError(f"transport {self._name}: checksums: {error}") from error
        return found

    async def prove(self, version: int, directory: str) -> None:
        """Compare what the server has with what it makes of a snapshot of the same weights.

        All tensors are scrambled in between, so that one which neither way reached shows too.
        Raises `WeightsDiffer` naming tensors, by the server's names.
        """
        first = await self._checksums()
        _log.info("transport %s: version %d: checksums taken", self._name, version)
        try:
            await self._channel.post("/weights_checker", {"action": "reset_tensors"})
        except MilesError as error:
            _log.warning("transport %s: weights cannot be scrambled: %s", self._name, error)
        body = {"model_path": directory, "load_format": "auto", "flush_cache": True}
        body |= {"weight_version": str(version)}
        await self.post("/update_weights_from_disk", body)
        second = await self._checksums()
        _log.info("transport %s: version %d: read from a snapshot", self._name, version)
        differ = [name for name in second if first.get(name) != second[name]]
        if differ:
            more = f" and {len(differ) - 8} more" if len(differ) > 8 else ""
            raise WeightsDiffer(
                f"transport {self._name}: {len(differ)} of {len(second)} tensors on the server "
                f"differ from those of a snapshot: {', '.join(sorted(differ)[:8])}{more}"
            )

    async def go_on(self) -> None:
        """Let the server serve what it has."""
        around, self._around, self._channel = self._around, None, None
        if around is not None:
            await around.__aexit__(None, None, None)

    async def leave(self, group: str) -> None:
        """Have the server leave a process group, if it answers."""
        if self._channel is None:
            return
        try:
            await self._channel.post("/destroy_weights_update_group", {"group_name": group})
        except MilesError as error:
            _log.info("transport %s: while leaving %s: %s", self._name, group, error)

    async def give_up(self) -> None:
        """End an update half way: what the server holds may be of two versions, and then the engine
        serves nothing any more."""
        around, self._around = self._around, None
        if around is None:
            return
        self._channel = None
        fault = WeightSyncError(f"transport {self._name}: an update was given up half way")
        try:
            await around.__aexit__(type(fault), fault, None)
        except MilesError as error:  # that one, or what the engine makes of it
            _log.info("%s", error)


def handed_over(
    flat: torch.Tensor, entries: Sequence[Mapping[str, Any]]
) -> tuple[str, list[tuple[bytes, int]]]:
    """A bucket as `/update_weights_from_tensor` takes it: base64 of a handle to its memory and
    where each tensor lies. Plain containers and torch's own handles only, which are all that the
    server unpickles. Beside it the counter (file and place) by which torch knows that a handle to
    GPU memory is in use."""
    metadata = [
        SimpleNamespace(
            name=entry["name"],
            shape=torch.Size(entry["shape"]),
            dtype=getattr(torch, entry["dtype"]),
            start_idx=entry["offset"],
            end_idx=entry["offset"] + entry["bytes"],
            numel=entry["bytes"],
        )
        for entry in entries
    ]
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode(), pickler.uses


class _Pickler(ForkingPickler):
    """Names a GPU by what it is, not by its number, which differs between processes."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.uses: list[tuple[bytes, int]] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        from torch.multiprocessing.reductions import reduce_tensor

        function, args = reduce_tensor(value)
        if value.is_cuda:
            uuid = str(torch.cuda.get_device_properties(value.device).uuid)
            args = (*args[:6], uuid, *args[7:])
            self.uses.append((args[11], args[12]))
        return function, args
