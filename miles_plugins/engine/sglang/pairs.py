"""Prefill and decode on two servers: every request goes to both, under one number by which they
find each other.

The decoding server answers; what the other says is looked at only for its errors.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from miles_plugins.engine.sglang.http import Http

__all__ = ["Pair"]


class Pair:
    """The server that computes prompts for one that decodes."""

    def __init__(self, http: Http) -> None:
        self.http = http
        self._port = 0

    def meet(self, port: int) -> None:
        """`port` is where the decoding server asks for keys and values."""
        self._port = port

    @asynccontextmanager
    async def prefilled(
        self, body: Mapping[str, Any], *, limit: float
    ) -> AsyncIterator[dict[str, Any]]:
        """The body for the decoding server, while this one computes the prompt. Raises
        `EngineError` of either."""
        both = {
            **body,
            "bootstrap_host": urlsplit(self.http.url).hostname,
            "bootstrap_port": self._port,
            "bootstrap_room": secrets.randbits(62),
        }
        first = {**both, "stream": False}
        prompt = asyncio.create_task(self.http.ask("POST", "/generate", first, limit=limit))
        try:
            yield both
            await prompt
        finally:
            prompt.cancel()
            await asyncio.gather(prompt, return_exceptions=True)
