"""Prefill and decode on two servers: every request goes to both, under one number by which they
find each other.

The decoding server answers; what the other says is looked at only for its errors, as soon as they
come.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from miles_plugins.engine.sglang.http import Http

__all__ = ["Pair", "Prefilled"]

T = TypeVar("T")


class Pair:
    """The server that computes prompts for one that decodes."""

    def __init__(self, http: Http) -> None:
        self.http = http
        self._port = 0

    def meet(self, port: int) -> None:
        """`port` is where the decoding server asks for keys and values."""
        self._port = port

    @asynccontextmanager
    async def prefilled(self, body: Mapping[str, Any], *, limit: float) -> AsyncIterator[Prefilled]:
        """The request, while this server computes the prompt. Raises `EngineError` of either."""
        both = {
            **body,
            "bootstrap_host": urlsplit(self.http.url).hostname,
            "bootstrap_port": self._port,
            "bootstrap_room": secrets.randbits(62),
        }
        first = {**both, "stream": False}
        prompt = asyncio.create_task(self.http.ask("POST", "/generate", first, limit=limit))
        try:
            yield Prefilled(both, prompt)
            await prompt
        finally:
            prompt.cancel()
            await asyncio.gather(prompt, return_exceptions=True)


class Prefilled:
    """One request whose prompt is being computed; `body` is for the server that decodes."""

    def __init__(self, body: dict[str, Any], prompt: asyncio.Task[Any]) -> None:
        self.body = body
        self._prompt = prompt

    async def heard(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What the decoding server answers when it is asked. Without a prompt it would wait for
        ever, so it is given up when the prompt fails first. Raises `EngineError` of either."""
        if self._prompt.done():
            self._prompt.result()  # or what it failed by
            return await ask()
        asked = asyncio.ensure_future(ask())
        try:
            await asyncio.wait((asked, self._prompt), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                self._prompt.result()
            return await asked
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def each(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """The parts of a stream, heard one by one."""
        async with aclosing(items):
            while True:
                try:
                    part = await self.heard(items.__anext__)
                except StopAsyncIteration:
                    return
                yield part
