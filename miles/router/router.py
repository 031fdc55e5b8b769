"""One engine over several: each routing key stays with the engine that holds its KV cache.

It adds no meaning to requests and keeps no tokens. Weights do not pass here, but it is told which
version was published, so that no engine comes back with another.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any, Self

from miles.errors import ConfigError, EngineError, RoutingError, WorkerError
from miles.router.accounts import ACTIVE, Account, Accounts, summarize
from miles.router.bindings import Binding, Bindings, InFlight, place
from miles.router.upstream import Upstream, Wait
from miles.router.watch import Watch
from miles.types import Array, Completion, Request

__all__ = ["Router"]

_FAILURES = (EngineError, WorkerError, OSError, TimeoutError)
"""What says that an engine did not serve a request. Anything else is not its fault."""


class Router:
    """Implements `Engine` over named engines.

    A new key goes to the engine with the fewest active requests (then the rank), ties by the key's
    hash, and stays there until `release`. `async with router:` runs the health checks; without them
    a drained engine stays out.
    """

    def __init__(
        self,
        engines: Mapping[str, Any],
        *,
        max_keys: int = 65_536,
        attempts: int = 3,
        request_timeout_s: float = 600.0,
        control_timeout_s: float = 60.0,
        check_every_s: float = 5.0,
        check_timeout_s: float = 10.0,
        failures: int = 3,
        readmission_timeout_s: float = 60.0,
    ) -> None:
        """`engines` by name. `max_keys`: keys bound at once; the least recently used expires.
        `attempts`: engines one request may try. `request_timeout_s`: longest wait for a completion,
        or for the next tokens of a stream. `control_timeout_s`: for abort, score, pause and the
        like. `check_every_s`, `check_timeout_s`: health checks. `failures`: failed checks in a row,
        or keys failed in a row by an engine that says it is well, that drain it.
        `readmission_timeout_s`: how long a request waits when no engine serves.

        Raises `ConfigError` without engines, without keys, or when only some engines sample.
        """
        if not engines:
            raise ConfigError("router: there is no engine to route to; give at least one")
        if max_keys < 1:
            raise ConfigError(f"router: max_keys is {max_keys}; it must be at least 1")
        sampling = {name: bool(getattr(e, "samples", True)) for name, e in engines.items()}
        if len(set(sampling.values())) > 1:
            raise ConfigError(f"router: engines that sample and that replay together: {sampling}")
        self.samples: bool = next(iter(sampling.values()))
        self._upstreams = [
            Upstream.of(name, engine, patience_s=request_timeout_s)
            for name, engine in engines.items()
        ]
        self._accounts = Accounts()
        self._bindings = Bindings(self._upstreams, max_keys=max_keys)
        self._attempts = max(1, attempts)
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self._readmission_timeout_s = readmission_timeout_s
        self._failures = failures
        self._watch = Watch(
            self._upstreams,
            self._accounts,
            every_s=check_every_s,
            timeout_s=check_timeout_s,
            failures=failures,
        )
        self._before: dict[str, float] = {}
        if all(hasattr(engine, "stream") for engine in engines.values()):
            self.stream = self._stream
            """As the engines' own; absent when one of them cannot stream."""

    async def __aenter__(self) -> Self:
        self._watch.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._watch.stop()

    def published(self, version: int) -> None:
        """This weight version is published: an engine that serves an older one is drained, and one
        that was drained comes back only with exactly this one."""
        self._watch.publish(version)

    def release(self, key: str) -> bool:
        """Forget a key whose trajectory has ended; whether it was bound."""
        return self._bindings.release(key)

    def counts(self) -> dict[str, float]:
        """Sums since the router was made, beside `keys` and `active/<engine>` as they are now."""
        bindings = self._bindings
        return {
            **asdict(self._accounts),
            "rebinds": bindings.rebinds,
            "keys_released": bindings.released,
            "keys_expired": bindings.expired,
            "keys": len(bindings),
            **{f"{ACTIVE}{u.name}": u.load for u in self._upstreams},
        }

    def metrics(self) -> dict[str, float]:
        """`router/...` as in `miles.metrics`, since the call before."""
        counts = self.counts()
        metrics = summarize([counts], [self._before])
        self._before = counts
        return metrics

    # ---- requests

    async def generate(self, request: Request) -> Completion:
        """Sample one completion on the engine that the key is bound to.

        When that engine is found dead or unwell, it is drained and the request tried on another. An
        error of an engine that is well is the request's own, and raised. Raises `RoutingError`
        without a key, or when no engine serves; `EngineError`, and what else a well engine raises.
        """
        with Account(self._accounts, request) as account:
            attempt = 0
            while True:
                attempt += 1
                binding = self._bindings.bind(request.key) or await self._place(request)
                upstream, rank = binding.upstream, binding.rank
                with InFlight(binding):
                    try:
                        with Wait(upstream):
                            completion: Completion = await upstream.engine.generate(
                                _addressed(request, upstream, rank)
                            )
                    except _FAILURES as error:
                        failure = error
                    else:
                        account.complete(completion, binding)
                        upstream.answered()
                        return completion
                what, final = f"request {request.id!r}", self._last(attempt)
                await self._judge(upstream, request.key, what, failure, final)

    async def _stream(self, request: Request) -> AsyncGenerator[Array | Completion, None]:
        """As `generate`: (new tokens,) int32 arrays as they are decoded, then the whole
        `Completion`. Once something was given out, no other engine is tried."""
        with Account(self._accounts, request) as account:
            attempt = 0
            while True:
                attempt += 1
                binding = self._bindings.bind(request.key) or await self._place(request)
                upstream, rank, given = binding.upstream, binding.rank, False
                with InFlight(binding):
                    items = upstream.engine.stream(_addressed(request, upstream, rank))
                    try:
                        async with aclosing(self._items(upstream, items)) as limited:
                            async for item in limited:
                                if isinstance(item, Completion):
                                    account.complete(item, binding)
                                    upstream.answered()
                                    yield item
                                    return
                                given = True
                                yield item
                        raise EngineError(
                            f"engine {upstream.name}: the stream of request {request.id!r} ended "
                            "without its completion"
                        )
                    except _FAILURES as error:
                        failure = error
                final = "tokens of it were streamed" if given else self._last(attempt)
                await self._judge(upstream, request.key, f"request {request.id!r}", failure, final)

    async def _items(
        self, upstream: Upstream, items: AsyncIterator[Any]
    ) -> AsyncGenerator[Any, None]:
        """Items of an engine's stream, each within the time limit and until a drain. The limit
        covers only the waiting: what the reader does in between takes as long as it takes."""
        try:
            while True:
                with Wait(upstream):
                    try:
                        item = await anext(items)
                    except StopAsyncIteration:
                        return
                yield item
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    async def _place(self, request: Request) -> Binding:
        """Where the key is bound, once an engine serves: waits a while for one to come back."""
        binding = None
        if self._watch.running:
            try:
                async with asyncio.timeout(self._readmission_timeout_s):
                    while (binding := self._bindings.bind(request.key)) is None:
                        await self._watch.some.wait()
            except TimeoutError:
                pass
        if binding is None:
            raise self._nobody(f"request {request.id!r} of {request.key!r}")
        return binding

    def _nobody(self, what: str) -> RoutingError:
        why = "; ".join(f"{u.name}: {u.drained}" for u in self._upstreams)
        return RoutingError(f"router: no engine can take {what}: all are drained ({why})")

    async def _judge(
        self, upstream: Upstream, key: str, what: str, error: Exception, final: str
    ) -> None:
        """Find out whose failure it was: an engine that is unwell is drained. Returns when `what`
        may be tried on another; raises when the engine is well, so that this is what it cannot
        serve, and when there is a reason, `final`, to try no other."""
        if not upstream.drained:
            wrong = await self._watch.ask(upstream)
            if wrong:
                self._watch.drain(upstream, f"it failed {what}, and {wrong} ({_words(error)})")
            elif not upstream.drained and not self._relapsed(upstream, key):
                if isinstance(error, EngineError):  # a `WorkerError` would end the run
                    raise error
                raise self._unserved(upstream, what, error, "it says that it is well") from error
        if final:
            raise self._unserved(upstream, what, error, f"not tried elsewhere: {final}") from error
        self._accounts.retries += 1

    def _last(self, attempt: int) -> str:
        return f"it was attempt {attempt} of {attempt}" if attempt >= self._attempts else ""

    def _unserved(self, upstream: Upstream, what: str, error: Exception, why: str) -> EngineError:
        text = _words(error)
        if isinstance(error, TimeoutError) and not str(error):
            limit = f"no answer within {self._request_timeout_s:g} s"
            text = "the engine was drained" if upstream.drained else limit
        return EngineError(f"engine {upstream.name}: {what}: {text}; {why}")

    def _relapsed(self, upstream: Upstream, key: str) -> bool:
        """Whether an engine that says it is well has failed too many keys in a row, and is drained
        for it. It would fail fast, look idle, and draw every new key. The last one that serves is
        kept."""
        if len(upstream.failed_keys) < self._failures:
            upstream.failed_keys.add(key)
        others = any(u.serving for u in self._upstreams if u is not upstream)
        if len(upstream.failed_keys) < self._failures or not others:
            return False
        upstream.relapses += 1
        keys = ", ".join(sorted(upstream.failed_keys))
        self._watch.drain(upstream, f"it says that it is well and failed in a row: {keys}")
        return True

    # ---- the rest of `Engine`, over all that serve

    async def score(self, tokens: Array) -> Array:
        """(tokens,) float32 of the least busy engine; no key, as nothing of it is used again."""
        attempt = 0
        while True:
            attempt += 1
            serving = [u for u in self._upstreams if u.serving]
            if not serving:
                raise self._nobody("a score")
            upstream, _ = place("", serving)
            try:
                async with asyncio.timeout(self._control_timeout_s):
                    values: Array = await upstream.engine.score(tokens)
                return values
            except _FAILURES as error:
                failure = error
            what = f"a score of {len(tokens)} tokens"
            await self._judge(upstream, "a score", what, failure, self._last(attempt))

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """End requests of these keys (None: all), each where it is bound; how many there were."""
        if keys is None:
            return sum(await self._each(lambda u: u.engine.abort(None)))
        bound = self._bindings.bound(keys)
        return sum(await self._each(lambda u: u.engine.abort(bound[u]), bound))

    async def pause(self) -> None:
        """Stop decoding everywhere."""
        await self._each(lambda u: u.engine.pause())

    async def resume(self) -> None:
        """Go on everywhere."""
        await self._each(lambda u: u.engine.resume())

    async def sleep(self) -> None:
        """Free device memory everywhere."""
        await self._each(lambda u: u.engine.sleep())

    async def wake(self) -> None:
        """Take it back everywhere."""
        await self._each(lambda u: u.engine.wake())

    async def load(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Always raises `TypeError`."""
        raise TypeError("weights do not pass through the router: publish them with a transport")

    async def version(self) -> int:
        """The oldest version that is served. Raises `RoutingError` when no engine serves."""
        versions: list[int] = await self._each(lambda u: u.engine.version())
        if not versions:
            raise self._nobody("a question for its version")
        return min(versions)

    async def health(self) -> Mapping[str, float]:
        """Sums over the engines that serve, except `max_len`, the smallest. Raises `RoutingError`
        when none serves."""
        answers: list[Mapping[str, float]] = await self._each(lambda u: u.engine.health())
        if not answers:
            raise self._nobody("a question for its health")
        total: dict[str, float] = {}
        for name in {name for answer in answers for name in answer}:
            values = [answer[name] for answer in answers if name in answer]
            total[name] = min(values) if name == "max_len" else sum(values)
        return total

    async def _each(
        self, call: Callable[[Upstream], Awaitable[Any]], among: Iterable[Upstream] | None = None
    ) -> list[Any]:
        """Answers of the given engines, or of all, that serve; who fails and is unwell is drained
        and left out."""

        async def ask(upstream: Upstream) -> list[Any]:
            try:
                async with asyncio.timeout(self._control_timeout_s):
                    return [await call(upstream)]
            except _FAILURES as error:
                if not upstream.drained:
                    if not (wrong := await self._watch.ask(upstream)):
                        raise
                    self._watch.drain(upstream, f"{wrong} ({_words(error)})")
                return []

        serving = [u for u in (self._upstreams if among is None else among) if u.serving]
        answers = await asyncio.gather(*(ask(u) for u in serving))
        return [one for answer in answers for one in answer]


def _addressed(request: Request, upstream: Upstream, rank: int) -> Request:
    return replace(request, dp_rank=rank) if len(upstream.active) > 1 else request


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
