"""The session server: routes, tokens, and errors as HTTP says them; an adapter over sessions.

`POST /sessions` opens one and gives its token; below `/sessions/ID/v1` an agent speaks any of three
APIs, all recorded alike; nothing passes through unrecorded. It decides nothing about tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from miles.errors import MilesError, UnsupportedRequest
from miles.protocols import Engine, Tito
from miles.session.dialogue import stop
from miles.session.server.answering import APIS, Answering, Api
from miles.session.server.asked import ClientSampling
from miles.session.server.chat import error_body
from miles.session.server.openapi import document
from miles.session.server.refusals import MAX_BODY, Refusal, json_reply, refusal, refused
from miles.session.server.samples import SAFETENSORS, as_json, as_safetensors
from miles.session.store import Sessions
from miles.session.tree import Session
from miles.types import Sampling

__all__ = ["make_app", "open_session"]

_log = logging.getLogger(__name__)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_EXPIRE_EVERY_S = 15.0
_DIGEST = "token_sha256"


def open_session(
    sessions: Sessions, *, id: str | None = None, data: Mapping[str, Any] | None = None
) -> tuple[Session, str]:
    """Open a session for a client: the session, and its token. What stays with the session, also
    over a restart, is the token's digest. Raises as `Sessions.open`."""
    token = secrets.token_hex(32)
    return sessions.open(id=id, data={**(data or {}), _DIGEST: _digest(token)}), token


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def make_app(
    sessions: Sessions,
    *,
    engine: Engine,
    tito: Tito,
    sampling: Sampling,
    seed_of: Callable[[str], int],
    model: str,
    admin_token: str,
    client_sampling: ClientSampling = "refuse",
) -> Starlette:
    """The application. `engine` samples, by the run's `sampling`; `seed_of` gives a session's seed,
    from which every turn derives its own; `model` is the name that replies carry. `admin_token`
    opens and lists sessions, and reaches all of them; a session's own token reaches that session.
    `client_sampling` says what a client's own temperature, top_p or top_k does when it is not the
    run's."""
    answering = Answering(
        engine=engine,
        tito=tito,
        sampling=sampling,
        seed_of=seed_of,
        model=model,
        client_sampling=client_sampling,
    )
    server = _Server(sessions, answering, admin_token)
    below = "/sessions/{id}"
    routes = [
        Route("/openapi.json", server.openapi, methods=["GET"]),
        Route("/sessions", server.sessions_, methods=["GET", "POST"]),
        Route(below, server.session, methods=["GET", "DELETE"]),
        Route(f"{below}/samples", server.samples, methods=["POST"]),
        Route(f"{below}/v1/models", server.models, methods=["GET"]),
    ]
    for name, api in APIS.items():
        ask = partial(server.ask, api=api)
        routes.append(Route(f"{below}/v1/{name}", ask, methods=["POST"]))
    routes.append(Route("/{path:path}", _nowhere, methods=_METHODS))
    return Starlette(
        routes=routes,
        lifespan=server.lifespan,
        exception_handlers={HTTPException: _http_error, MilesError: _error, Exception: _bug},
        max_body_size=MAX_BODY,
    )


_WANTED = (
    "the bearer token of this session is wanted, as `Authorization: Bearer TOKEN` or "
    "`x-api-key: TOKEN`; where there is no such session, no token is right"
)


def _token(request: Request) -> str:
    """What a client shows, in OpenAI's way or Anthropic's; empty when there is nothing."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        given = request.headers.get("x-api-key", "")
    return given.strip()


class _Server:
    """What the routes do."""

    def __init__(self, sessions: Sessions, answering: Answering, admin_token: str) -> None:
        self._sessions, self._answering, self._admin = sessions, answering, admin_token
        self._document = document(list(APIS))

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Idle sessions expire while the server runs."""
        task = asyncio.create_task(self._expire(), name="session expiry")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_EVERY_S)
            self._sessions.expire()

    # ---- who may

    def _admit(self, request: Request, data: Mapping[str, Any] | None = None) -> None:
        """Raise 401 unless the request carries the admin token, or that of the session with these
        data."""
        wanted = [_digest(self._admin)]
        if data is not None and isinstance(own := data.get(_DIGEST), str):
            wanted.append(own)
        shown = _digest(_token(request))
        if not any(hmac.compare_digest(shown, digest) for digest in wanted):
            raise HTTPException(401, _WANTED, {"www-authenticate": "Bearer"})

    def _session(self, request: Request) -> Session:
        """The session of a request that may reach it. That there is none, only those may learn who
        could have reached it."""
        id = request.path_params["id"]
        known = id in self._sessions
        self._admit(request, self._sessions.peek(id).data if known else self._sessions.gone(id))
        return self._sessions.get(id)

    # ---- routes

    async def openapi(self, request: Request) -> Response:
        """What there is, for programs."""
        return json_reply(self._document)

    async def sessions_(self, request: Request) -> Response:
        """Open a session, or list those that are open; for the holder of the admin token."""
        self._admit(request)
        if request.method in ("GET", "HEAD"):
            return json_reply(
                {
                    "sessions": [_state(s) for s in self._sessions],
                    "metrics": self._sessions.metrics(),
                }
            )
        body = await _body(request, optional=True)
        _refuse_unknown(body, "id")
        id = body.get("id")
        if id is not None and (not isinstance(id, str) or not _ID.fullmatch(id)):
            raise UnsupportedRequest(
                f"sessions: id {id!r} is not 1 to 128 letters, digits, '.', '_' or '-', a letter "
                "or digit first"
            )
        session, token = open_session(self._sessions, id=id)
        made = {"session_id": session.id, "token": token, "model": self._answering.model}
        return json_reply(made, status=201, headers={"location": f"/sessions/{session.id}"})

    async def session(self, request: Request) -> Response:
        """How a session stands, or the end of it."""
        session = self._session(request)
        if request.method == "DELETE":
            self._sessions.close(session.id)
            if session.pending:
                await stop(session, self._answering.engine)
        return json_reply(_state(session))

    async def samples(self, request: Request) -> Response:
        """What was recorded, one sample a kept leaf; made in a thread."""
        session = self._session(request)
        body = await _body(request, optional=True)
        _refuse_unknown(body, "reward")
        reward = 0.0 if body.get("reward") is None else body["reward"]
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise UnsupportedRequest(f"samples: reward {reward!r} is not a number")
        made = session.samples() if session.turns else ()
        if "safetensors" in request.headers.get("accept", ""):
            data = await asyncio.to_thread(as_safetensors, made, reward=float(reward))
            return Response(data, media_type=SAFETENSORS)
        data = await asyncio.to_thread(as_json, made, reward=float(reward))
        return Response(data, media_type="application/json")

    async def models(self, request: Request) -> Response:
        """The one model, for OpenAI's and Anthropic's clients at once."""
        self._session(request)
        name = self._answering.model
        model = {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "owned_by": "miles",
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
        }
        whole = {"object": "list", "data": [model], "has_more": False}
        return json_reply({**whole, "first_id": name, "last_id": name})

    async def ask(self, request: Request, api: Api) -> ASGIApp:
        """One turn."""
        try:
            session = self._session(request)
            body = await _body(request)
        except MilesError as error:
            return refused(refusal(error), api.error)
        except HTTPException as error:
            return _said(error, api)
        return await self._answering.answer(session, api, body, request.receive)


def _state(session: Session) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "turns": session.turns,
        "tokens": session.tokens,
        "bytes": session.nbytes,
        "pending": session.pending,
        "truncated": session.truncated,
        "closed": session.closed,
        "failure": "" if session.failure is None else session.failure.detail,
        "warnings": list(session.warnings),
        "counters": session.counters.plain(),
    }


def _refuse_unknown(body: Mapping[str, Any], *known: str) -> None:
    if unknown := sorted(set(body) - set(known)):
        raise UnsupportedRequest(f"there is no parameter {unknown[0]!r}; valid: {', '.join(known)}")


async def _body(request: Request, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object. Raises `UnsupportedRequest`."""
    raw = await request.body()
    if not raw and optional:
        return {}
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnsupportedRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise UnsupportedRequest(f"the body is {type(body).__name__}, not an object")
    return body


# ---------------------------------------------------------------- what is not answered


async def _nowhere(request: Request) -> Response:
    for route in request.app.routes[:-1]:
        if route.matches(request.scope)[0] is Match.PARTIAL:
            allowed = ", ".join(sorted(route.methods))
            what = f"{request.method} {request.url.path} is not answered, but {allowed} is"
            raise HTTPException(405, what, {"allow": allowed})
    apis = ", ".join(f"/v1/{name}" for name in [*APIS, "models"])
    raise HTTPException(
        404,
        f"{request.method} {request.url.path} is not here: a session answers {apis} below "
        "/sessions/ID, and nothing passes through unrecorded",
    )


_CODES = {401: "wrong_token", 404: "no_such_path", 405: "wrong_method", 413: "too_large"}


def _said(error: HTTPException, api: Api | None = None) -> Response:
    given = Refusal(
        status=error.status_code,
        code=_CODES.get(error.status_code, "bad_request"),
        message=error.detail,
    )
    form = error_body if api is None else api.error
    return refused(given, form, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return _said(error)


async def _error(request: Request, error: Exception) -> Response:
    if not isinstance(error, MilesError):
        raise error
    return refused(refusal(error), error_body)


async def _bug(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # to nobody
    _log.error("session server: %s %s", request.method, request.url.path, exc_info=error)
    message = f"a fault of the server, which is in its log: {type(error).__name__}"
    return refused(Refusal(status=500, code="internal", message=message), error_body)
