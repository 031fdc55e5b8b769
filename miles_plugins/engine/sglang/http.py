"""HTTP to one SGLang server: a question and its JSON, or the events of a stream.

It knows addresses, limits and typed errors; what is asked and answered is `wording`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from miles import EngineError
from miles_plugins.engine.sglang import wording

__all__ = ["Http"]

IDLE_S = 2.0
"""Seconds after which a connection is not used again: servers close theirs after 5, and whoever
asks in that moment gets no answer."""


class Http:
    """One address. `lost` may say why nobody answers there, such as how a process ended."""

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        connect_s: float,
        connections: int = 1024,
        lost: Callable[[], str] = str,
    ) -> None:
        self.url = url.rstrip("/")
        self.connect_s = connect_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._connections = connections
        self._lost = lost
        self._session: aiohttp.ClientSession | None = None
        self._streams: set[aiohttp.StreamReader] = set()  # that are read
        self._closed = False

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=IDLE_S),
                json_serialize=lambda value: msgspec.json.encode(value).decode(),
            )
        return self._session

    @asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: Any, limit: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        where = f"engine sglang: {method} {self.url}{path}"
        if self._closed:
            raise wording.Unreachable(f"{where}: this client has hung up")
        timeout = aiohttp.ClientTimeout(total=limit, sock_connect=self.connect_s)
        try:
            async with self._client().request(
                method, self.url + path, json=body, timeout=timeout
            ) as reply:
                if reply.status >= 400:
                    raise wording.failure(where, reply.status, await reply.text())
                yield reply
        except TimeoutError:
            raise EngineError(f"{where}: no answer in {limit:g} s{self._why()}") from None
        except aiohttp.ClientError as error:
            gone = isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError)
            kind = wording.Unreachable if gone else EngineError
            raise kind(f"{where}: {type(error).__name__}: {error}{self._why()}") from error

    def _why(self) -> str:
        return f"; {said}" if (said := self._lost()) else ""

    async def ask(self, method: str, path: str, body: Any = None, *, limit: float = 0.0) -> Any:
        """The JSON of an answer, None for plain words. `limit` in seconds, `connect_s` when it is
        0. Raises `EngineError`."""
        async with self._sent(method, path, body, limit or self.connect_s) as reply:
            return wording.decoded(await reply.read())

    async def parts(
        self, path: str, body: Mapping[str, Any], *, limit: float
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """What a stream says, as it comes. Raises `EngineError`."""
        async with self._sent("POST", path, body, limit) as reply:
            rest = b""
            self._streams.add(reply.content)
            try:
                async for chunk in reply.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if (part := wording.event(line)) is not None:
                            yield part
            finally:
                self._streams.discard(reply.content)

    async def close(self) -> None:
        """Hang up; who waits for an answer gets an `EngineError`."""
        self._closed = True
        for stream in self._streams:  # the session forgets them, and they would wait on
            stream.set_exception(aiohttp.ClientConnectionError("this client hung up"))
        if self._session is not None:
            await self._session.close()
            self._session = None
