"""A client of an SGLang server that somebody else runs: it samples, scores and aborts over HTTP.

Attach only: it starts no server and moves no weights. What is said on the wire is in `wording`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import msgspec
import numpy as np

from miles import Array, Completion, ConfigError, Context, EngineError, Request, WeightSyncError
from miles_plugins.engine.sglang import wording

__all__ = ["Sglang"]


class Sglang:
    """Any running SGLang server, at `url`: token ids go in, token ids and log-probs come out.

    Log-probs are the server's: under the whole distribution at the sampling temperature. What top-p
    or top-k cut away is not told, so `truncated_logprobs` are None. The version is the server's
    `weight_version`, 0 where that is no number; weights that change while a request runs leave all
    of its tokens with the version from before. Seeds are passed on, and decide only on a server
    that was started with `--enable-deterministic-inference`.
    """

    samples = True
    process = "rollout"
    attached = True

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Where the server is, and how long it may take."""

        url: str = ""
        """Its address, such as `http://127.0.0.1:30000`."""
        api_key_file: str = ""
        """File that holds the server's `--api-key`; empty sends none."""
        timeout_s: float = 600.0
        """Seconds one completion may take."""
        connect_s: float = 10.0
        """Seconds a connection may take, and every question that samples nothing."""
        connections: int = 1024
        """Requests at once; more wait here."""
        stream_interval: int = 4
        """Tokens between two parts of a stream; every part repeats the ones before."""

    @classmethod
    def example_config(cls, directory: Path) -> Mapping[str, Any]:
        """For the contract suite: a server that is not there."""
        return {"url": "http://127.0.0.1:9"}

    def __init__(self, config: Config, context: Context) -> None:
        if not config.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"engine sglang: url is {config.url!r}; give the address of a running server, such "
                "as engine.url=http://127.0.0.1:30000"
            )
        self.config = config
        self._url = config.url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {_key(config)}"} if config.api_key_file else {}
        self._max_len = _context_length(context.model)
        self._http: aiohttp.ClientSession | None = None
        self._running: dict[str, str] = {}  # id on the server to routing key
        self._newest = -1
        self._began = 0.0
        self._counts = dict.fromkeys(("tokens", "busy_s", "prompt_tokens", "cached_tokens"), 0.0)

    # ------------------------------------------------------------ requests

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Raises `EngineError` when the server refuses, fails, says what
        cannot be, or is silent for `timeout_s`."""
        before = await self._version_before()
        async with self._begun(request) as rid:
            body = wording.generate_body(request, rid)
            reply = await self._ask("POST", "/generate", body, limit=self.config.timeout_s)
        return self._finished(request, reply, before)

    async def stream(self, request: Request) -> AsyncIterator[Array | Completion]:
        """As `generate`: (new tokens,) int32 as they come, last the completion. Leaving early
        aborts the request."""
        before = await self._version_before()
        given, last = 0, None
        async with self._begun(request) as rid:
            body = wording.generate_body(request, rid, every=self.config.stream_interval)
            async for part in self._parts(body):
                last = part
                tokens, _ = wording.sampled(part)
                if len(tokens) > given:
                    yield tokens[given:]
                    given = len(tokens)
        if last is None:
            raise EngineError(f"engine sglang: request {request.id!r}: the stream held nothing")
        yield self._finished(request, last, before)

    async def score(self, tokens: Array) -> Array:
        """(tokens,) float32: log-prob of each token given those before it, at temperature 1, 0 for
        the first. Raises `EngineError`."""
        body = wording.score_body(tokens)
        reply = await self._ask("POST", "/generate", body, limit=self.config.timeout_s)
        return wording.scored(reply, tokens)

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """End requests of these routing keys (None: all of this client) with what they have; how
        many there were."""
        chosen = [rid for rid, key in self._running.items() if keys is None or key in keys]
        await asyncio.gather(*(self._abort(rid) for rid in chosen))
        return len(chosen)

    async def _abort(self, rid: str) -> None:
        await self._ask("POST", "/abort_request", {"rid": rid}, limit=self.config.connect_s)

    @asynccontextmanager
    async def _begun(self, request: Request) -> AsyncIterator[str]:
        """One request on the server, aborted there when the block is left before its end."""
        if not request.key:
            raise EngineError(f"engine sglang: request {request.id!r} has no routing key")
        rid = f"{request.id}.{secrets.token_hex(4)}"
        if not self._running:
            self._began = monotonic()
        self._running[rid] = request.key
        try:
            yield rid
        except (asyncio.CancelledError, GeneratorExit, EngineError):
            try:
                async with asyncio.timeout(self.config.connect_s):
                    await asyncio.shield(self._abort(rid))
            except (EngineError, TimeoutError, asyncio.CancelledError):
                pass  # the server is gone or busy; the caller already knows why it left
            raise
        finally:
            del self._running[rid]
            if not self._running:
                self._counts["busy_s"] += monotonic() - self._began

    def _finished(self, request: Request, reply: Mapping[str, Any], before: int) -> Completion:
        after = wording.version(reply.get("meta_info", {}))
        made = wording.completion(request, reply, min(before, after))
        self._newest = max(self._newest, after)
        self._counts["tokens"] += len(made.tokens)
        self._counts["prompt_tokens"] += len(request.tokens)
        self._counts["cached_tokens"] += made.cached_tokens
        return made

    # ------------------------------------------------------------ the server

    async def version(self) -> int:
        """The server's `weight_version`; 0 where that is no number. Raises `EngineError`."""
        limit = self.config.connect_s
        try:
            info = await self._ask("GET", "/model_info", limit=limit)
        except wording.NotFound:  # its name before 0.5.16
            info = await self._ask("GET", "/get_model_info", limit=limit)
        self._newest = max(self._newest, found := wording.version(info))
        return found

    async def _version_before(self) -> int:
        return self._newest if self._newest >= 0 else await self.version()

    async def health(self) -> Mapping[str, float]:
        """`active` requests of this client now; since it was made: `tokens` sampled, `busy_s`,
        `prompt_tokens`, `cached_tokens` of them. Raises `EngineError` when the server is not
        well."""
        await self._ask("GET", "/health", limit=self.config.connect_s)
        longest = {} if self._max_len is None else {"max_len": float(self._max_len)}
        return {"active": float(len(self._running)), "waiting": 0.0, **self._counts, **longest}

    async def pause(self) -> None:
        """Stop decoding in place; requests wait."""
        body = {"mode": "in_place"}
        await self._ask("POST", "/pause_generation", body, limit=self.config.connect_s)

    async def resume(self) -> None:
        """Go on."""
        await self._ask("POST", "/continue_generation", {}, limit=self.config.connect_s)

    async def load(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Always raises `WeightSyncError`: this client moves no weights."""
        raise WeightSyncError(
            f"engine sglang: attached to {self._url}, it cannot load version {version}; its "
            "weights are those that the server was started with"
        )

    async def sleep(self) -> None:
        """Always raises `EngineError`: the server's memory is not this client's."""
        raise EngineError(f"engine sglang: attached to {self._url}, it cannot free its memory")

    async def wake(self) -> None:
        """Nothing was freed."""

    async def close(self) -> None:
        """Hang up."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    # ------------------------------------------------------------ HTTP

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=self.config.connections),
                json_serialize=lambda value: msgspec.json.encode(value).decode(),
            )
        return self._http

    @asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: Any, limit: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        where = f"engine sglang: {method} {self._url}{path}"
        timeout = aiohttp.ClientTimeout(total=limit, sock_connect=self.config.connect_s)
        try:
            async with self._client().request(
                method, self._url + path, json=body, timeout=timeout
            ) as reply:
                if reply.status >= 400:
                    raise wording.failure(where, reply.status, await reply.text())
                yield reply
        except TimeoutError:
            raise EngineError(f"{where}: no answer in {limit:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineError(f"{where}: {type(error).__name__}: {error}") from error

    async def _ask(self, method: str, path: str, body: Any = None, *, limit: float) -> Any:
        async with self._sent(method, path, body, limit) as reply:
            return wording.decoded(await reply.read())

    async def _parts(self, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        async with self._sent("POST", "/generate", body, self.config.timeout_s) as reply:
            rest = b""
            async for chunk in reply.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if (part := wording.event(line)) is not None:
                        yield part


def _key(config: Sglang.Config) -> str:
    try:
        with open(config.api_key_file, encoding="utf-8") as file:
            return file.read().strip()
    except OSError as error:
        raise ConfigError(f"engine sglang: api_key_file: {error}") from error


def _context_length(model: Any) -> int | None:
    """Longest prompt and completion of a checkpoint, in tokens, where it says so."""
    if model is None:
        return None
    config = model.hf_config()
    found = config.get("text_config", config).get("max_position_embeddings")
    return int(found) if isinstance(found, int | np.integer) else None
