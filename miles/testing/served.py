"""A served session whose replies are a script: what environments that run an outside agent are
tested with.

It speaks the chat completions API alone, over HTTP on the loopback interface. Unlike a real
session it does not match a request with the ones before: every request is a sample of its own.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import time
from typing import Any

import numpy as np
from aiohttp import web

from miles.errors import EpisodeError
from miles.protocols import Tito, Tool
from miles.testing.tasks import FakeTito
from miles.types import Message, Sample, Span, Trajectory

__all__ = ["FakeServedSession", "fake_serve"]

Replies = Callable[[Sequence[Message], Sequence[Tool]], "str | Message"]
"""What to answer to a conversation, offered some tools: a text, or a whole assistant message."""


class FakeServedSession:
    """A `ServedSession` that answers by script and remembers every request."""

    def __init__(
        self, key: str, *, script: Replies | Sequence[str | Message], tito: Tito | None = None
    ) -> None:
        """`script` is a function, or the replies in order, the last of which is repeated."""
        self.key = key
        self.base_url = ""  # known once it is served
        self.api_key = secrets.token_hex(16)
        self.model = "fake"
        self.requests: list[dict[str, Any]] = []
        """Bodies as they came."""
        self._script = script
        self._tito: Tito = tito or FakeTito()
        self._samples: list[Sample] = []
        self._text = ""

    def trajectory(
        self, *, reward: float, metrics: Mapping[str, float] | None = None
    ) -> Trajectory:
        """One sample a request. Raises `EpisodeError` when nothing was asked."""
        if not self._samples:
            raise EpisodeError(f"session {self.key!r}: the agent asked nothing")
        return Trajectory(
            id=self.key,
            samples=tuple(self._samples),
            reward=float(reward),
            text=self._text,
            metrics=dict(metrics or {}),
        )

    @asynccontextmanager
    async def served(self) -> AsyncIterator[FakeServedSession]:
        """Answer on a free port of the loopback interface inside the block."""
        app = web.Application()
        app.router.add_post(f"/sessions/{self.key}/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/sessions/{self.key}"
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "wrong bearer token"}}, status=401)
        body = await request.json()
        self.requests.append(body)
        messages, tools = body["messages"], body.get("tools") or ()
        said = self._reply(messages, tools)
        message = {"role": "assistant", "content": said} if isinstance(said, str) else dict(said)
        usage = self._record(messages, tools, said)
        if body.get("stream"):
            return await _stream(request, message, usage, self.model)
        choice = {"index": 0, "message": message, "finish_reason": _finish(message)}
        return web.json_response(
            _envelope("chat.completion", self.model) | {"choices": [choice], "usage": usage}
        )

    def _reply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str | Message:
        if callable(self._script):
            return self._script(messages, tools)
        return self._script[min(len(self.requests), len(self._script)) - 1]

    def _record(
        self, messages: Sequence[Message], tools: Sequence[Tool], said: str | Message
    ) -> dict[str, int]:
        whole = [{**message, "content": message.get("content") or ""} for message in messages]
        prompt = self._tito.render(whole, tools=tools)
        answer = self._tito.demonstrate(
            said if isinstance(said, str) else {**said, "content": said.get("content") or ""}
        )
        size = len(prompt) + len(answer)
        sampled = np.arange(size) >= len(prompt)  # (tokens,) bool
        self._samples.append(
            Sample(
                tokens=np.concatenate([prompt, answer]).astype(np.int32),
                sampled=sampled,
                trainable=sampled,
                logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32),
                spans=(Span(start=len(prompt), stop=size, version=0),),
            )
        )
        self._text = said if isinstance(said, str) else str(said.get("content") or "")
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(answer),
            "total_tokens": size,
        }


def fake_serve(
    script: Replies | Sequence[str | Message],
    *,
    tito: Tito | None = None,
    into: list[FakeServedSession] | None = None,
) -> Callable[[str], AbstractAsyncContextManager[FakeServedSession]]:
    """What `Tools.serve` is in a test: a fresh `FakeServedSession` under every key.

    Sessions are also appended to `into`, so that a test can look at what an agent asked."""

    def serve(key: str) -> AbstractAsyncContextManager[FakeServedSession]:
        session = FakeServedSession(key, script=script, tito=tito)
        if into is not None:
            into.append(session)
        return session.served()

    return serve


def _envelope(kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": kind,
        "created": int(time()),
        "model": model,
    }


def _finish(message: Message) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


async def _stream(
    request: web.Request, message: Message, usage: Mapping[str, int], model: str
) -> web.StreamResponse:
    """The reply as server-sent events: half of the text, the other half, tool calls, the end."""
    text = message.get("content") or ""
    half = len(text) // 2
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or ())]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": text[:half]}]
    deltas += [{"content": text[half:]}, *([{"tool_calls": calls}] if calls else [])]
    ends = [None] * len(deltas) + [_finish(message)]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    head = _envelope("chat.completion.chunk", model)
    chunks = [
        head | {"choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        for delta, end in zip([*deltas, {}], ends, strict=True)
    ]
    chunks.append(head | {"choices": [], "usage": dict(usage)})
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
