"""Several session servers behind one address: every session belongs to one of them, by its id.

Passes requests and answers on as they come and looks into neither, except to learn which session
they are about. It records nothing; a server that is gone is a 502.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from miles.session.server.chat import error_body
from miles.session.server.refusals import MAX_BODY, Refusal, json_reply, refused

__all__ = ["make_front", "place"]

_CONNECT_S = 10.0
_LIST_S = 30.0
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_OWN = {"connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding"}
"""Headers that belong to one connection."""


def place(id: str, servers: int) -> int:
    """Which of several servers a session belongs to; the same in every process."""
    digest = hashlib.blake2b(id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % servers


def make_front(addresses: Callable[[], Sequence[str]]) -> Starlette:
    """The application; `addresses` gives where the servers are now, always as many and in the same
    order."""
    front = _Front(addresses)
    routes = [
        Route("/sessions", front.sessions, methods=["GET", "POST"]),
        Route("/sessions/{id}", front.session, methods=_METHODS),
        Route("/sessions/{id}/{path:path}", front.session, methods=_METHODS),
        Route("/{path:path}", front.elsewhere, methods=_METHODS),
    ]
    return Starlette(routes=routes, lifespan=front.lifespan, max_body_size=MAX_BODY)


class _Front:
    def __init__(self, addresses: Callable[[], Sequence[str]]) -> None:
        self._addresses = addresses
        self._http: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """One pool of connections while the front is up."""
        limit = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            timeout=limit, connector=connector, auto_decompress=False
        ) as self._http:
            yield

    async def session(self, request: Request) -> ASGIApp:
        """To the server of this session."""
        addresses = self._addresses()
        where = addresses[place(request.path_params["id"], len(addresses))]
        return await self._pass(request, where, await request.body())

    async def elsewhere(self, request: Request) -> ASGIApp:
        """Whatever is about no session is the same on every server."""
        return await self._pass(request, self._addresses()[0], await request.body())

    async def sessions(self, request: Request) -> ASGIApp:
        """Open a session where its id belongs, or list those of all servers."""
        if request.method != "POST":
            return await self._listed(request)
        body = await request.body()
        addresses = self._addresses()
        try:
            asked = msgspec.json.decode(body or b"{}")
        except (msgspec.DecodeError, RecursionError):
            asked = None
        if not isinstance(asked, dict) or not isinstance(asked.get("id", ""), str | None):
            return await self._pass(request, addresses[0], body)  # which says what is wrong
        id = asked.get("id") or uuid.uuid4().hex
        where = addresses[place(id, len(addresses))]
        return await self._pass(request, where, msgspec.json.encode({**asked, "id": id}))

    async def _listed(self, request: Request) -> Response:
        replies = await asyncio.gather(*(self._list(where, request) for where in self._addresses()))
        for status, body in replies:
            if status != 200:
                return json_reply(body, status=status)
        metrics: Counter[str] = Counter()
        for _, body in replies:
            metrics.update(body["metrics"])
        sessions = [one for _, body in replies for one in body["sessions"]]
        return json_reply({"sessions": sessions, "metrics": dict(metrics)})

    async def _list(self, where: str, request: Request) -> tuple[int, Any]:
        try:
            async with asyncio.timeout(_LIST_S):
                async with self._client().get(f"{where}/sessions", headers=_kept(request)) as reply:
                    return reply.status, msgspec.json.decode(await reply.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            return 502, _gone(error).body(error_body)

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("the front answers only while it is up")
        return self._http

    async def _pass(self, request: Request, where: str, body: bytes) -> ASGIApp:
        target = where + request.url.path + (f"?{request.url.query}" if request.url.query else "")
        asking = asyncio.create_task(
            self._client().request(
                request.method, target, data=body, headers=_kept(request), allow_redirects=False
            ),
            name=f"passed to {where}",
        )
        gone = asyncio.create_task(_until_gone(request.receive), name=f"client of {where}")
        try:
            await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return Response(status_code=499)  # to nobody; the server hears of it below
            return _Passed(await asking, gone)
        except aiohttp.ClientError as error:
            return refused(_gone(error), error_body)
        finally:
            if not asking.done() or asking.cancelled() or asking.exception() is not None:
                asking.cancel()
                gone.cancel()
                with suppress(asyncio.CancelledError, aiohttp.ClientError):
                    await asking


def _kept(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name not in _OWN}


def _gone(error: BaseException) -> Refusal:
    what = f"the server of this session does not answer ({type(error).__name__}: {error})"
    return Refusal(status=502, code="server_gone", message=what, again=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Passed:
    """An answer on its way; the connection to the server is closed when the client goes."""

    def __init__(self, reply: aiohttp.ClientResponse, gone: asyncio.Task[None]) -> None:
        self._reply, self._gone = reply, gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        reply, gone = self._reply, self._gone
        gone.add_done_callback(lambda _: reply.close())
        headers: Mapping[str, str] = reply.headers
        raw = [
            (k.lower().encode(), v.encode()) for k, v in headers.items() if k.lower() not in _OWN
        ]
        try:
            await send({"type": "http.response.start", "status": reply.status, "headers": raw})
            async for part in reply.content.iter_any():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except aiohttp.ClientError:
            if not gone.done():  # the server broke off; so does this answer
                raise
        finally:
            reply.close()
            gone.cancel()
