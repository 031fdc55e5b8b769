"""An engine without a model that has what the router is about: a prefix cache, ranks, and failures.

Its tokens are random and its times are formulas; how many prompt tokens are found in the cache is
exact, for an LRU cache of whole pages. Pages of running requests are not pinned.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from miles.errors import EngineError
from miles.protocols import Context
from miles.types import Array, Completion, Request, Span

__all__ = ["CachingEngine", "PrefixCache"]


class PrefixCache:
    """Pages of tokens, each known by everything from the beginning up to its end; the one used
    longest ago is evicted, always before the pages that it continues."""

    def __init__(self, *, page: int = 64, capacity: int = 0) -> None:
        """`page` tokens a page; at most `capacity` tokens in all, 0 for no limit."""
        self.page = page
        self._limit = capacity // page
        self._pages: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._pages)

    def names(self, tokens: Array, known: Sequence[int] = ()) -> list[int]:
        """One number a whole page; `known` are those of a prefix, which saves computing them."""
        names, size = list(known), self.page
        before = names[-1] if names else 0
        data = tokens[len(names) * size :].tobytes()
        width = size * tokens.itemsize
        for start in range(0, len(data) - width + 1, width):
            before = hash((before, data[start : start + width]))
            names.append(before)
        return names

    def match(self, names: Sequence[int]) -> int:
        """How many tokens of a prompt with these pages are cached."""
        found = 0
        for name in names:
            if name not in self._pages:
                break
            found += 1
        return found * self.page

    def insert(self, names: Sequence[int]) -> None:
        """Keep these pages, and make them the most recently used."""
        for name in reversed(names):  # the beginning last: it is evicted after what continues it
            self._pages[name] = None
            self._pages.move_to_end(name)
        while self._limit and len(self._pages) > self._limit:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, as new weights make an engine do."""
        self._pages.clear()


class CachingEngine:
    """Samples `max_new_tokens` random tokens a request and reports `cached_tokens` as an engine
    with a prefix cache a rank would."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Cache and pace."""

        page: int = 64
        """Tokens a page of the cache."""
        capacity: int = 0
        """Tokens the cache of one rank holds; 0 is no limit."""
        dp_ranks: int = 1
        """Ranks, each with its own cache; a request without a rank takes the first."""
        prefill_s: float = 0.0
        """Seconds a prompt token takes that is not cached; a rank prefills one request at a
        time."""
        decode_s: float = 0.0
        """Seconds a sampled token takes."""
        chunk: int = 16
        """Tokens a piece of a stream."""

    samples: ClassVar[bool] = True

    def __init__(self, config: Config | None = None, context: Context | None = None) -> None:
        self.config = config or self.Config()
        self.dp_ranks = self.config.dp_ranks
        self.caches = [
            PrefixCache(page=self.config.page, capacity=self.config.capacity)
            for _ in range(self.dp_ranks)
        ]
        self.served = 0
        """Version it says that it serves."""
        self.fault: Exception | None = None
        """What every request raises."""
        self.sick: Exception | None = None
        """What health checks raise."""
        self.stuck = asyncio.Event()
        """While it is cleared, requests and health checks hang."""
        self.stuck.set()
        self.requests: list[Request] = []
        """Every request seen, in order."""
        self._prefill = [asyncio.Lock() for _ in self.caches]
        self._active: dict[str, set[asyncio.Event]] = {}

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Raises `fault` when there is one."""
        async with aclosing(self.stream(request)) as items:
            async for item in items:
                if isinstance(item, Completion):
                    return item
        raise EngineError(f"request {request.id!r}: the stream ended without a completion")

    async def stream(self, request: Request) -> AsyncGenerator[Array | Completion, None]:
        """(new tokens,) int32 arrays, then the whole completion. Raises `fault` before the first,
        and when it appears, in between."""
        self.requests.append(request)
        ended = asyncio.Event()
        self._active.setdefault(request.key, set()).add(ended)
        try:
            cache = self.caches[request.dp_rank or 0]
            names, cached = await self._prefilled(request, cache)
            rng = np.random.default_rng(request.seed % 2**63)
            size = request.sampling.max_new_tokens
            tokens = rng.integers(0, 2**31 - 1, size, dtype=np.int32)  # (tokens,) int32
            given = 0
            while given < size and not ended.is_set():
                new = tokens[given : given + self.config.chunk]
                await self._wait(self.config.decode_s * len(new))
                given += len(new)
                yield new
            tokens = tokens[:given]
            cache.insert(cache.names(np.concatenate([request.tokens, tokens]), names))
            yield Completion(
                tokens=tokens,
                logprobs=np.full(given, -1.0, np.float32),  # (tokens,) float32
                spans=(Span(start=0, stop=given, version=self.served),) if given else (),
                finish="abort" if ended.is_set() else "length",
                cached_tokens=cached,
            )
        finally:
            events = self._active[request.key]
            events.discard(ended)
            if not events:
                del self._active[request.key]

    async def _prefilled(self, request: Request, cache: PrefixCache) -> tuple[list[int], int]:
        """Names of the prompt's pages and how many of its tokens were cached; at least the last one
        is computed, as its logits are needed."""
        names = cache.names(request.tokens)
        async with self._prefill[request.dp_rank or 0]:
            cached = min(cache.match(names), len(request.tokens) - 1)
            await self._wait(self.config.prefill_s * (len(request.tokens) - cached))
            cache.insert(names)
        return names, cached

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.stuck.wait()
        if self.fault is not None:
            raise self.fault

    async def score(self, tokens: Array) -> Array:
        """(tokens,) float32."""
        await self._wait(0)
        return np.where(np.arange(len(tokens)) > 0, np.float32(-1), np.float32(0))

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """End requests of these keys after the piece they are at; how many there were."""
        wanted = list(self._active) if keys is None else keys
        ended = [event for key in wanted for event in self._active.get(key, ())]
        for event in ended:
            event.set()
        return len(ended)

    async def pause(self) -> None:
        """Requests hang."""
        self.stuck.clear()

    async def resume(self) -> None:
        """They go on."""
        self.stuck.set()

    async def load(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Serve that version; there are no weights."""
        self.served = version
        for cache in self.caches:
            cache.clear()

    async def version(self) -> int:
        """The version served."""
        return self.served

    async def health(self) -> Mapping[str, float]:
        """Raises `sick` when there is one."""
        await self.stuck.wait()
        if self.sick is not None:
            raise self.sick
        return {"active": float(sum(map(len, self._active.values()))), "max_len": float(2**20)}

    async def sleep(self) -> None:
        """There is nothing to free."""

    async def wake(self) -> None:
        """There is nothing to take back."""
