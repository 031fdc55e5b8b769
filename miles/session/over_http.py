"""The conversation that an environment is given when its turns go through the session server: each
one is a request of the chat completions API, as an outside agent would make it.

The server renders, samples and records, as for any agent; what was recorded is read from the
session, as `Tools.serve` does.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import aiohttp
import msgspec

from miles import errors
from miles.errors import EngineError, EpisodeError, PromptTooLong, RolloutError, TokenMismatch
from miles.protocols import Reply, ServedSession, Tool
from miles.session.server.answering import TRUNCATED
from miles.session.server.chat import read
from miles.session.tree import Session
from miles.types import Message, Trajectory

__all__ = ["HTTPConversation", "Opened"]

_PATH = "/v1/chat/completions"
_KINDS: Mapping[str, type[RolloutError]] = {
    kind.reason: kind
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, RolloutError)
} | {"invalid_messages": EpisodeError}
"""By the code that a refused request carries, the error that the same turn raises in process."""


class Opened(ServedSession, Protocol):
    """A served session whose record is at hand."""

    session: Session
    """What its requests are recorded in."""


class HTTPConversation:
    """One attempt's conversation over HTTP: tokens, versions and log-probs are those that
    `SessionConversation` would have, with the same seed.

    The session is opened by the first turn. A turn that raises leaves it as it was.
    """

    __slots__ = ("_http", "_messages", "_open", "_served", "_tools", "key")

    def __init__(
        self,
        *,
        key: str,
        open: Callable[[], Awaitable[Opened]],
        http: Callable[[], aiohttp.ClientSession],
    ) -> None:
        """`open` opens the session of this routing key; `http` gives the client to ask with, once
        it is open."""
        self.key = key
        self._open = open
        self._http = http
        self._served: Opened | None = None
        self._messages: tuple[Message, ...] = ()
        self._tools: Sequence[Tool] = ()

    async def turn(self, messages: str | Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Append messages and have one assistant turn sampled; no tools are those of before.
        Raises as `SessionConversation.turn`, `EpisodeError` for what the API cannot carry (raw
        text, a message or a tool that it would change) and `EngineError` when the server does not
        answer."""
        if isinstance(messages, str):
            raise EpisodeError(
                f"session {self.key}: raw text is no message, and the chat completions API takes "
                "nothing else: use session.through=process"
            )
        tools = tools or self._tools
        self._refuse_changed(messages, tools)
        if self._served is None:
            self._served = await self._open()
        served, sent = self._served, (*self._messages, *map(dict, messages))
        body: dict[str, Any] = {"model": served.model, "messages": sent}
        if tools:
            body["tools"] = tools
        said = await self._ask(served, body)
        choice = said["choices"][0]
        message = _message(choice["message"])
        self._messages, self._tools = (*sent, message), tools
        return Reply(
            text=served.session.text,  # with its markup, which the API has taken apart
            message=message,
            finish="length" if choice["finish_reason"] == "length" else "stop",
            tokens=said["usage"]["completion_tokens"],
        )

    def trajectory(
        self, *, reward: float, metrics: Mapping[str, float] | None = None
    ) -> Trajectory:
        """Everything so far, as the trajectory to train on. Raises as `Session.trajectory`."""
        if self._served is None:
            raise EpisodeError(f"session {self.key}: nothing was asked, so nothing was sampled")
        return self._served.trajectory(reward=reward, metrics=metrics)

    async def _ask(self, served: Opened, body: Mapping[str, Any]) -> Any:
        headers = {
            "authorization": f"Bearer {served.api_key}",
            "content-type": "application/json",
        }
        try:
            data = json.dumps(body, ensure_ascii=False).encode()
            url = served.base_url + _PATH
            async with self._http().post(url, data=data, headers=headers) as answer:
                if answer.status == 413:  # whoever refused it may not have spoken JSON
                    raise EpisodeError(
                        f"session {self.key}: the messages are {len(data)} bytes of JSON, more "
                        "than the session server takes; use session.through=process"
                    )
                said = msgspec.json.decode(await answer.read())
                if answer.status != 200:
                    raise self._error(answer.status, said["error"])
                if TRUNCATED in answer.headers:
                    raise PromptTooLong(f"session {self.key}: the prompt leaves no room")
                return said
        except UnicodeEncodeError as error:
            raise EpisodeError(f"session {self.key}: no JSON text: {error}") from error
        except (aiohttp.ClientError, msgspec.DecodeError) as error:
            raise EngineError(
                f"session {self.key}: the session server at {served.base_url} gave no answer "
                f"({type(error).__name__}: {error})"
            ) from error

    def _error(self, status: int, error: Mapping[str, Any]) -> Exception:
        """What a turn in process would have raised."""
        code, what = error.get("code"), str(error.get("message"))
        if code == "token_mismatch":
            return TokenMismatch(what)
        if (kind := _KINDS.get(str(code))) is not None:
            return kind(what)
        return RuntimeError(f"session {self.key}: {status} {code}: {what}")  # a bug, there or here

    def _refuse_changed(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Refuse what would be rendered otherwise once it has gone through the API."""
        taken = read(
            {"messages": [dict(m) for m in messages or _ANY], "tools": list(tools)}, images=True
        )
        for index, (ours, theirs) in enumerate(zip(messages, taken.messages, strict=False)):
            if _plain(ours) != _plain(theirs):
                raise EpisodeError(
                    f"session {self.key}: the chat completions API takes message {index}, of role "
                    f"{ours.get('role')!r}, for another one: {_other(ours, theirs)}; use "
                    "session.through=process"
                )
        if tools is not self._tools and json.dumps(list(tools)) != json.dumps(taken.tools):
            raise EpisodeError(
                f"session {self.key}: the chat completions API writes these tools otherwise: a "
                "function has name, description and parameters, in this order; use "
                "session.through=process"
            )


_ANY = ({"role": "user", "content": ""},)


def _plain(message: Message) -> dict[str, Any]:
    """The fields that say something."""
    return {key: value for key, value in message.items() if value not in (None, "", [], ())}


def _other(ours: Message, theirs: Message) -> str:
    one, two = _plain(ours), _plain(theirs)
    names = sorted(key for key in {*one, *two} if one.get(key) != two.get(key))
    return f"{', '.join(names)} would differ"


def _message(said: Mapping[str, Any]) -> Message:
    """An assistant's message as a tito handler gives it."""
    made: dict[str, Any] = {"role": "assistant", "content": said.get("content") or ""}
    for name in ("reasoning_content", "tool_calls"):
        if said.get(name):
            made[name] = said[name]
    return made
