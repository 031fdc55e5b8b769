"""One request of any API: read, sampled, recorded, answered, whole or as a stream.

A client that goes away ends its generation. What a turn is and how it is stored is the session's;
what the words look like is the API's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import time
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from miles.errors import MilesError, PromptTooLong
from miles.protocols import Engine, Tito
from miles.session.dialogue import turn, with_stop_ids
from miles.session.server import chat, messages, responses
from miles.session.server.asked import Asked, ClientSampling, drawn
from miles.session.server.events import Said
from miles.session.server.refusals import Body, json_reply, refusal, refused
from miles.session.server.unfolding import Unfolding
from miles.session.tree import Session
from miles.session.turns import Turn
from miles.types import Array, Message, Sampling

__all__ = ["APIS", "TRUNCATED", "Answering", "Api"]

_log = logging.getLogger(__name__)
TRUNCATED = "x-miles-truncated"
"""Header of an answer without a token: the prompt left no room for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One of the three ways to ask."""

    read: Callable[[Mapping[str, Any], bool, Session], Asked]
    """(body, whether images are carried, session) to what is asked."""
    reply: Callable[[Said, Asked], dict[str, Any]]
    """The whole answer."""
    events: Callable[..., Any]
    """Its stream."""
    error: Body
    """The form of its errors."""


APIS: Mapping[str, Api] = {
    "chat/completions": Api(
        read=lambda body, images, session: chat.read(body, images=images),
        reply=chat.reply,
        events=chat.Events,
        error=chat.error_body,
    ),
    "responses": Api(
        read=lambda body, images, session: responses.read(body, images=images),
        reply=responses.reply,
        events=responses.Events,
        error=chat.error_body,
    ),
    "messages": Api(
        read=lambda body, images, session: messages.read(
            body, images=images, spelled=_spelled(session)
        ),
        reply=messages.reply,
        events=messages.Events,
        error=messages.error_body,
    ),
}
"""By the path below `/v1`."""


def _spelled(session: Session) -> dict[str, str]:
    """Arguments of every tool call that was sampled, by its id."""
    return {
        call["id"]: call["function"]["arguments"]
        for message in session.replies
        for call in message.get("tool_calls") or ()
    }


class _Feed:
    """Tokens on their way from the engine to one client; as many as the completion has."""

    def __init__(self) -> None:
        self._parts: list[Array] = []
        self._more = asyncio.Event()

    def put(self, ids: Array) -> None:
        """Called as tokens are decoded."""
        self._parts.append(ids)
        self._more.set()

    async def arrival(self) -> None:
        """Until there is something to take."""
        await self._more.wait()

    def take(self) -> list[Array]:
        """What has come since the last time."""
        parts, self._parts = self._parts, []
        self._more.clear()
        return parts


class Answering:
    """Everything that requests have in common."""

    def __init__(
        self,
        *,
        engine: Engine,
        tito: Tito,
        sampling: Sampling,
        seed_of: Callable[[str], int],
        model: str,
        client_sampling: ClientSampling,
    ) -> None:
        self.engine, self.tito = engine, tito
        self.sampling = with_stop_ids(sampling, tito)
        self.seed_of, self.model, self.client_sampling = seed_of, model, client_sampling
        self.images = bool(getattr(tito, "multimodal", False))

    async def answer(
        self, session: Session, api: Api, body: Mapping[str, Any], receive: Receive
    ) -> ASGIApp:
        """The response. `receive` tells when the client has gone."""
        try:
            asked = api.read(body, self.images, session)
            sampling = drawn(self.sampling, asked.sampling, self.client_sampling)
        except MilesError as error:
            return refused(refusal(error), api.error)
        exchange = _Exchange(self, session, api, asked)
        response: ASGIApp | None = None
        try:
            await exchange.begin(sampling, receive)
            response = exchange.response()
        except MilesError as error:
            return refused(refusal(error), api.error)
        finally:
            if not isinstance(response, _Stream):  # which ends it itself
                await exchange.end()
        return response


class _Exchange:
    """One request that is being answered."""

    def __init__(self, common: Answering, session: Session, api: Api, asked: Asked) -> None:
        self._common, self._session, self._api, self._asked = common, session, api, asked
        self._id, self._created = f"{session.id}_{secrets.token_hex(4)}", int(time())
        self._feed = _Feed()
        self._asking: asyncio.Task[Turn] | None = None
        self._gone: asyncio.Task[None] | None = None

    async def begin(self, sampling: Sampling, receive: Receive) -> None:
        """Ask, and wait until there is something to answer."""
        asked, session, common = self._asked, self._session, self._common
        asking = turn(
            session,
            asked.messages,
            engine=common.engine,
            sampling=sampling,
            seed=common.seed_of(session.id),
            tools=asked.tools,
            on_tokens=self._feed.put if asked.stream else None,
        )
        self._asking = asyncio.create_task(asking, name=f"turn of {session.id}")
        self._gone = asyncio.create_task(_until_gone(receive), name=f"client of {session.id}")
        await self._wait(tokens=asked.stream)

    async def _wait(self, *, tokens: bool) -> None:
        """Until the turn is stored, it or the client is gone, or there are more tokens."""
        waits = {task for task in (self._asking, self._gone) if task is not None}
        if tokens:
            waits.add(asyncio.create_task(self._feed.arrival(), name=f"tokens of {self._id}"))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits - {self._asking, self._gone}:
                task.cancel()

    def response(self) -> ASGIApp:
        """What to send. Raises what the turn raised, unless a stream has begun before it."""
        made = self._made()
        if made is None and not self._begun():
            _log.info("session %s: its client went away; generation is ended", self._session.id)
            return Response(status_code=499)  # to nobody
        headers = {} if made is None or made.room else {TRUNCATED: "true"}
        if made is None or self._asked.stream:
            return _Stream(self._parts(), self.end, headers)
        return json_reply(self._api.reply(made, self._asked), headers=headers)

    def _begun(self) -> bool:
        """Whether there is a stream to send before the turn is stored, and somebody to read it."""
        return self._asked.stream and self._gone is not None and not self._gone.done()

    async def end(self) -> None:
        """Nothing goes on for a client that is answered or gone: a turn in the making is abandoned,
        and its engine told."""
        for task in (self._asking, self._gone):
            if task is None or task.done():
                continue
            task.cancel()
            with suppress(asyncio.CancelledError, MilesError):
                await task

    async def _parts(self) -> AsyncIterator[bytes]:
        common = self._common
        events = self._api.events(
            self._asked, id=self._id, model=common.model, created=self._created
        )
        unfolding = Unfolding(
            common.tito, tools=self._asked.tools, stop_ids=common.sampling.stop_ids
        )
        yield events.begin()
        try:
            while True:
                made = self._made()
                for ids in self._feed.take():
                    for delta in unfolding.feed(ids):
                        yield events.delta(delta)
                if made is not None:
                    break
                if not self._begun():
                    return
                await self._wait(tokens=True)
            for delta in unfolding.finish(made.message):
                yield events.delta(delta)
            yield events.end(made)
        except MilesError as error:
            yield events.fail(refusal(error).body(self._api.error))

    def _made(self) -> Said | None:
        """The finished turn, None before. A prompt without room is an empty answer that ended by
        length: the agent is to stop, not to fail. Raises what else the turn raised."""
        if self._asking is None or not self._asking.done():
            return None
        try:
            made = self._asking.result()
        except PromptTooLong:
            return self._said({}, "length", room=False)
        return self._said(
            made.message,
            made.finish,
            tokens=made.tokens,
            prompt_tokens=made.prompt_tokens,
            cached_tokens=made.cached_tokens,
        )

    def _said(self, message: Message, finish: str, **counts: Any) -> Said:
        return Said(
            id=self._id,
            model=self._common.model,
            created=self._created,
            message=message,
            content=message.get("content") or "",
            reasoning=message.get("reasoning_content") or "",
            calls=tuple(message.get("tool_calls") or ()),
            finish="length" if finish == "length" else "stop",
            **counts,
        )


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Stream:
    """Server-sent events, until they end or the client has gone."""

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        end: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
    ) -> None:
        self._parts, self._end = parts, end
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-store",
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        headers = [(k.encode(), v.encode()) for k, v in self._headers.items()]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            _log.info("a client went away in the middle of a stream; its generation is ended")
        finally:
            await self._end()
