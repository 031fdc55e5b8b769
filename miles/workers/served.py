"""Sessions that are reached over HTTP, in a rollout worker: by agents outside the loop, and by the
loop's own conversations under `session.through=server`.

Starts the session server when the first one is asked for. What the server does is
`miles.session.server`; what a session records is `miles.session`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from miles.errors import EpisodeError, RolloutError, WorkerError
from miles.protocols import Conversation, Tito
from miles.session import Session
from miles.settings import SessionKeys
from miles.types import Sampling, Trajectory

__all__ = ["Served", "SessionServer"]

_ABORT_S = 10.0
_CONNECT_S = 10.0
_KEEP_S = 2.0  # an idle connection; the server closes it after 5 s, perhaps while it is taken up


@dataclass(slots=True, kw_only=True)
class Served:
    """Implements `miles.ServedSession`."""

    base_url: str
    api_key: str
    model: str
    session: Session

    def trajectory(
        self, *, reward: float, metrics: Mapping[str, float] | None = None
    ) -> Trajectory:
        """See `miles.ServedSession`."""
        return self.session.trajectory(reward=reward, metrics=metrics)


class SessionServer:
    """One way of sampling, served: an engine, a sampling, and the sessions that use them."""

    def __init__(
        self,
        *,
        tito: Tito,
        engine: Any,
        sampling: Sampling,
        rules: SessionKeys,
        max_len: int | None,
        port: int,
    ) -> None:
        """`port` 0 takes a free one. Raises `EpisodeError` when the engine replays demonstrations,
        which no agent can ask for."""
        if not engine.samples:
            raise EpisodeError("sessions are served by engines that sample; this one replays")
        self._tito = tito
        self._engine = engine
        self._sampling = sampling
        self._rules = rules
        self._max_len = max_len
        self._port = port
        self._seeds: dict[str, int] = {}
        self._running = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._sessions: Any = None
        self._http: Any = None
        self._address = ""

    @asynccontextmanager
    async def open(self, key: str, seed: int) -> AsyncIterator[Served]:
        """A session under this routing key inside the block; whatever is being generated for it is
        aborted at the end. Raises `EpisodeError` for a key that no address can hold."""
        from miles.session.server import open_session

        if not key or "/" in key:
            raise EpisodeError(
                f"session {key!r}: a routing key is part of the address under which its session is "
                "served; it may not be empty or hold '/'"
            )
        await self._start()
        session, token = open_session(self._sessions, id=key)
        self._seeds[key] = seed
        try:
            yield Served(
                base_url=f"{self._address}/sessions/{quote(key, safe='')}",
                api_key=token,
                model="policy",
                session=session,
            )
        finally:
            del self._seeds[key]
            if key in self._sessions:
                self._sessions.close(key)
            if session.pending:
                await self._abort(key)

    def conversation(self, key: str, open: Callable[[], Awaitable[Served]]) -> Conversation:
        """One whose turns are requests to this server; its first opens the session, by `open`."""
        from miles.session.over_http import HTTPConversation

        return HTTPConversation(key=key, open=open, http=self._client)

    def _client(self) -> Any:
        """One pool of connections for all of them. It must be asked for while something is
        served."""
        if self._http is None:
            import aiohttp

            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S),
            )
            self._running.push_async_callback(self._http.close)  # before the server stops
        return self._http

    async def _abort(self, key: str) -> None:
        with suppress(RolloutError, WorkerError, TimeoutError):  # it may be gone itself
            async with asyncio.timeout(_ABORT_S):
                await self._engine.abort([key])

    async def _start(self) -> None:
        async with self._starting:
            if self._address:
                return
            from miles.session.server import make_app, serve
            from miles.session.store import Sessions

            self._sessions = Sessions(self._tito, rules=self._rules, max_tokens=self._max_len)
            app = make_app(
                self._sessions,
                engine=self._engine,
                tito=self._tito,
                sampling=self._sampling,
                seed_of=lambda id: self._seeds.get(id, 0),  # of one just closed: it is refused next
                model="policy",
                admin_token=secrets.token_hex(32),
                client_sampling=self._rules.client_sampling,
            )
            served = serve(app, self._rules.host, self._port)
            self._address = await self._running.enter_async_context(served)

    async def close(self) -> None:
        """Stop serving."""
        await self._running.aclose()
