"""What a transport says to a server that takes weights over its native routes.

The engine brackets an update (`Sglang.updating`); tensors pass beside this, by handle or process
group, and so does the proof that they arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles import EngineError, WeightSyncError
from miles_plugins.engine.sglang import facts as says
from miles_plugins.engine.sglang import wording
from miles_plugins.engine.sglang.http import Http

__all__ = ["Channel", "opened"]

_WRITES = ("/update_weights_from_tensor", "/update_weights_from_distributed")


class Channel:
    """One server during one update to `version`."""

    def __init__(
        self, http: Http, version: int, *, ranks: int, first_gpu: int, limit: float
    ) -> None:
        self._http = http
        self._version = version
        self._limit = limit
        self._session = False
        self.ranks = ranks
        """Tensor-parallel ranks of the server, each of which receives everything."""
        self.first_gpu = first_gpu
        """Number of the GPU of its first rank; the others have those after it."""
        self.flush = True
        """Whether what the old weights cached is forgotten."""
        self.touched = False
        """Some tensor may have been written: the old version is gone."""

    async def begin(self) -> None:
        """Open a weight-update session, where the version has them (0.5.17 and later)."""
        try:
            await self._http.ask("POST", "/begin_weight_update", {}, limit=self._limit)
        except wording.NotFound:
            return
        self._session = True

    async def end(self) -> None:
        """Close the session: the server finishes what it makes of new weights."""
        session, self._session = self._session, False
        if session:
            await self._http.ask("POST", "/end_weight_update", {}, limit=self._limit)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Ask one of SGLang's routes; a write is of this update's version. Raises `EngineError`,
        and `WeightSyncError` when the server says that it did not succeed."""
        if path in _WRITES:
            self.touched = True
            body = {**body, "weight_version": str(self._version), "flush_cache": self.flush}
        reply = await self._http.ask("POST", path, dict(body), limit=self._limit)
        if isinstance(reply, Mapping) and "success" in reply and (wrong := says.verdict(reply)):
            raise WeightSyncError(f"engine sglang: {path}: {wrong}")
        return reply

    async def checksums(self) -> dict[str, str]:
        """Tensor to checksum, under SGLang's own names. Raises `EngineError`."""
        body = {"action": "checksum"}
        return says.checksums(await self.post("/weights_checker", body))


async def opened(http: Http, version: int, *, limit: float) -> Channel:
    """A channel to a server, which answers meanwhile and has to be paused before it begins. Raises
    `WeightSyncError`, also for a layout whose ranks cannot be told apart."""
    try:
        info = await http.ask("GET", "/server_info", limit=limit)
    except EngineError as error:
        raise WeightSyncError(f"engine sglang: version {version}: {error}") from error
    if not isinstance(info, Mapping):
        raise WeightSyncError(f"engine sglang: /server_info says {str(info)[:200]}")
    if int(info.get("dp_size") or 1) > 1 and not info.get("enable_dp_attention"):
        raise WeightSyncError(
            "engine sglang: replicas within one server (dp) cannot join an update; use several "
            "engine workers, or transport=disk"
        )
    if int(info.get("pp_size") or 1) > 1:
        raise WeightSyncError("engine sglang: pipeline stages take weights by transport=disk only")
    places = {
        "ranks": int(info.get("tp_size") or 1), "first_gpu": int(info.get("base_gpu_id") or 0)
    }  # fmt: skip
    return Channel(http, version, limit=limit, **places)
