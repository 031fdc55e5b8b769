"""Whether a server is well, and what it said of itself when it became so.

It looks, and raises; what is then done about a server is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from miles import EngineError
from miles_plugins.engine.sglang import facts as says
from miles_plugins.engine.sglang import wording
from miles_plugins.engine.sglang.http import Http
from miles_plugins.engine.sglang.pairs import Pair
from miles_plugins.engine.sglang.server import Server

__all__ = ["Watch"]

_log = logging.getLogger(__name__)
_FRESH_S = 2.0  # for which an answer counts as a sign of life
_BOOTSTRAP = 8998  # SGLang's own port for pairs
_AGAIN_S = 0.5  # between looks for a server that is away
_IDLE_S = 30.0  # for requests that were given up to end


class Watch:
    """`server` is the process where that is ours, `pair` its other half where there is one."""

    def __init__(
        self,
        http: Http,
        *,
        server: Server | None,
        pair: Pair | None,
        start_timeout_s: float,
        silent_s: float,
        failing: Callable[[], str] = str,
    ) -> None:
        """`failing` says why a server that answers is of no use; empty when it is."""
        self._http = http
        self._server = server
        self._pair = pair
        self._start_timeout_s = start_timeout_s
        self._silent_s = silent_s
        self._failing = failing
        self._starting = asyncio.Lock()
        self.facts: says.Facts | None = None
        """What it said; None before it was well."""
        self.load: dict[str, float] = {}
        """What `/v1/loads` said last."""
        self.broken = ""
        """Why it cannot be used any more."""
        self.busy = False
        """It takes weights, or has none in memory, and has no time to answer."""
        self.alive_at = float("-inf")
        """When it last gave a sign of life, by `time.monotonic()`."""

    async def ready(self) -> says.Facts:
        """Wait until it is well. Raises `EngineError`."""
        async with self._starting:
            if self.facts is not None:
                return self.facts
            if self._server is not None:
                await self._server.ready(self._http, self._start_timeout_s)
            found = says.facts(await self._reached())
            if doubt := says.doubt(found.version):
                _log.warning("engine sglang: %s: %s", self._http.url, doubt)
            if self._pair is not None:
                theirs = await self._pair.http.ask("GET", "/server_info")
                self._pair.meet(int(theirs.get("disaggregation_bootstrap_port") or _BOOTSTRAP))
            self.facts = found
            return found

    async def _reached(self) -> Any:
        """What it says of itself. One that others run may be away while they start it again, and
        is waited for as long as a server of our own. Raises `EngineError`."""
        end = monotonic() + self._start_timeout_s
        said = False
        while True:
            try:
                return await self._info()
            except wording.Unreachable as error:
                if self._server is not None or monotonic() > end:
                    raise
                if not said:
                    limit = f"{self._start_timeout_s:g} s (start_timeout_s)"
                    _log.warning(
                        "engine sglang: waiting for a server, at most %s: %s", limit, error
                    )
                    said = True
                await asyncio.sleep(_AGAIN_S)

    async def alive(self) -> None:
        """Raise `EngineError` unless the server, its scheduler and the other of a pair included,
        answered lately."""
        self.usable()
        if self._server is not None and (said := self._server.lost()):
            raise EngineError(f"engine sglang: {said}")
        if self._server is not None and (said := self._failing()):  # another may do better
            raise EngineError(f"engine sglang: {said}")
        if self.facts is None or self.busy or monotonic() - self.alive_at < _FRESH_S:
            return
        await self._info()
        if self._pair is not None:
            await self._said(self._pair.http)
        with suppress(wording.NotFound):
            self.load = says.load_of(await self._http.ask("GET", "/v1/loads"))

    async def idle(self) -> None:
        """Wait until it computes nothing, and forget cached prompts. An overlapped schedule has a
        forward under way after the last answer, in which memory must not be taken from it: the
        server would end. Raises `EngineError` when requests run on."""
        path = f"/flush_cache?timeout={_IDLE_S:g}"
        await self._http.ask("POST", path, {}, limit=_IDLE_S + self._silent_s)

    def usable(self) -> None:
        """Raise `EngineError` when it cannot be used any more."""
        if self.broken:
            raise EngineError(f"engine sglang: it cannot be used: {self.broken}")

    async def _info(self) -> Any:
        info = await self._said(self._http)
        self.alive_at = monotonic()
        return info

    async def _said(self, http: Http) -> Any:
        """What only a scheduler that runs can say; of a server that speaks no more than
        `/generate`, that it is there."""
        info: Any = {"version": says.UNKNOWN}
        for path in ("/server_info", "/get_server_info", "/health"):  # the second before 0.5.16
            try:
                found = await http.ask("GET", path, limit=self._silent_s)
            except wording.NotFound:
                continue
            return found if path != "/health" else info
        return info
