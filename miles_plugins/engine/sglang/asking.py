"""Requests to one server: completions whole and streamed, scores, aborts, and going on after a cut.

Weights and processes are not its affair: it is told which version is served, and when requests are
cut for an update.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from time import monotonic
from typing import Any

from miles import Array, Completion, EngineError, Request
from miles_plugins.engine.sglang import wording
from miles_plugins.engine.sglang.http import Http
from miles_plugins.engine.sglang.pairs import Pair
from miles_plugins.engine.sglang.streamed import Streamed
from miles_plugins.engine.sglang.together import Shared, Together

__all__ = ["Asking"]

_END_S = 1.0  # for what is to end; a pause then ends the rest
_AGAIN_S = 0.01  # until what reached the server too late to be ended is ended as well
_FAILED = 8  # routing keys in a row that a server of ours may fail before it is started again
_COUNTS = ("tokens", "busy_s", "prompt_tokens", "cached_tokens", "verified", "drafted", "accepted")


class Asking:
    """`newest` is the version that requests are sampled under from now on, as far as is known."""

    def __init__(
        self,
        http: Http,
        *,
        timeout_s: float,
        stream_interval: int,
        together: int = 1,
        topk: int,
        pair: Pair | None,
        temperature: float = 1.0,
    ) -> None:
        """`temperature` is the run's; at most `together` requests share a question."""
        self._http = http
        self._timeout_s = timeout_s
        self._stream_interval = stream_interval
        self._topk = topk
        self._pair = pair
        self._temperature = temperature
        self._together = Together(http, most=together, limit=timeout_s)
        self._cut: set[str] = set()  # ids that we ended, to ask for the rest
        self._open = asyncio.Event()
        self._open.set()
        self._none = asyncio.Event()  # nothing runs
        self._none.set()
        self._failed: dict[str, str] = {}  # the first faults by routing key since a good answer
        self._began = 0.0
        self._broken = ""
        self.running: dict[str, str] = {}
        """Id on the server to routing key."""
        self.newest = -1
        self.joins = False
        """Whether the server takes several requests in one question."""
        self.exact = False
        """Whether only this client changes weights, and never while a request runs whose spans are
        not told: a completion is then of the version that its end says."""
        self.salted = False
        """Whether prompts share keys and values only within a version."""
        self.tells_spans: bool | None = None
        """Whether the last reply said which tokens are of which version; None before there was
        one."""
        self.counts = dict.fromkeys(_COUNTS, 0.0)

    async def generate(self, request: Request) -> Completion:
        """Raises `EngineError` when the server refuses, fails, says what cannot be, or is silent
        for `timeout_s`."""
        done: Completion | None = None
        alone = bool(request.images) or request.want_experts
        while True:
            left = wording.rest(request, done)
            before = await self._admitted()
            try:
                async with self._begun(left) as rid:
                    body = wording.generate_body(left, rid, salt=self._salt())
                    with self._judged(request.key):
                        reply = await self._whole(body, alone=alone)
                        part = self._part(left, reply, before)
                    cut = rid in self._cut
            except Shared:
                alone = True
                continue
            done = wording.joined(done, part)
            if (last := _ended(request, done, cut=cut)) is not None:
                return self._finished(request, last)

    async def stream(self, request: Request) -> AsyncGenerator[Array | Completion, None]:
        """As `generate`: (new tokens,) int32 as they come, last the completion. Leaving early
        aborts the request."""
        done: Completion | None = None
        while True:
            left = wording.rest(request, done)
            before = await self._admitted()
            said = Streamed()
            async with self._begun(left) as rid:
                body = wording.generate_body(
                    left, rid, every=self._stream_interval, salt=self._salt()
                )
                with self._judged(request.key):
                    async with aclosing(self._parts(body)) as parts:
                        async for part in parts:
                            if len(tokens := said.add(part)):
                                yield tokens
                    if (last := said.whole()) is None:
                        what = f"request {request.id!r}: the stream held nothing"
                        raise EngineError(f"engine sglang: {what}")
                    whole = self._part(left, last, before)
                cut = rid in self._cut
            done = wording.joined(done, whole)
            if (ended := _ended(request, done, cut=cut)) is not None:
                yield self._finished(request, ended)
                return

    async def score(self, tokens: Array) -> Array:
        """(tokens,) float32: log-prob of each token given those before it, 0 for the first. Raises
        `EngineError`, also where the run samples at another temperature than 1."""
        if self._temperature != 1:
            raise EngineError(
                f"engine sglang: temperature is {self._temperature:g}, and servers score given "
                "tokens at temperature 1 only, so nothing can be compared"
            )
        await self._admitted()
        body = wording.score_body(tokens, salt=self._salt())
        reply = await self._http.ask("POST", "/generate", body, limit=self._timeout_s)
        return wording.scored(reply, tokens)

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """End requests of these routing keys (None: all of this client) with what they have; how
        many there were."""
        chosen = [rid for rid, key in self.running.items() if keys is None or key in keys]
        self._cut.difference_update(chosen)
        unsent = self._together.end_unsent(chosen)
        await asyncio.gather(*(self._abort(rid) for rid in chosen if rid not in unsent))
        return len(chosen)

    async def _abort(self, rid: str) -> None:
        await self._http.ask("POST", "/abort_request", {"rid": rid})
        if self._pair is not None:
            await self._pair.http.ask("POST", "/abort_request", {"rid": rid})

    async def _let_go(self, rid: str) -> None:
        with suppress(EngineError):  # the server is gone, and the request with it
            await self._abort(rid)

    def failing(self) -> str:
        """That no answer was good for many routing keys in a row; empty where one was."""
        if len(self._failed) < _FAILED:
            return ""
        last = list(self._failed.values())[-1]
        return f"none of its last answers, to {_FAILED} routing keys and more, was good: {last}"

    @contextmanager
    def _judged(self, key: str) -> Iterator[None]:
        """An answer to this key is read inside; a request that was refused, or that did not reach
        the server, says nothing of it."""
        try:
            yield
        except EngineError as error:
            others = (Shared, wording.Answered, wording.Unreachable)
            its_own = isinstance(error, wording.Failed) or not isinstance(error, others)
            if its_own and len(self._failed) < _FAILED:
                self._failed[key] = str(error)
            raise
        self._failed.clear()

    # ---- while weights change

    def close(self, *, cut: bool) -> None:
        """Hold new requests, also those that have not gone to the server yet; with `cut`, those
        that run and are now ended will be asked for again."""
        self._open.clear()
        self._cut.update(self._together.end_unsent())
        if cut:
            self._cut.update(self.running)

    async def ended(self) -> None:
        """Have the server end what runs, and wait for it a moment. A pause ends it as well, but
        looks only once a second whether it has (SGLang 0.5.16 to 0.5.23)."""
        if self._pair is not None or not self.running:
            return
        end = monotonic() + _END_S
        while self.running and monotonic() < end:
            await self._abort_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    await self._none.wait()
        await self._together.ended(max(0.0, end - monotonic()))
        # It lets go of a request only after it has answered, and to a pause that comes before
        # that the request runs: one more question leaves it the time.
        await self._abort_all()

    async def _abort_all(self) -> None:
        await self._http.ask("POST", "/abort_request", {"rid": "", "abort_all": True})

    def open(self, broken: str = "") -> None:
        """Let requests go on; or end them, when the server is of no use any more."""
        self._broken = broken
        self._open.set()

    async def _admitted(self) -> int:
        """Wait until requests may go; the version before them."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._open.wait()
        except TimeoutError:
            raise EngineError(
                f"engine sglang: new weights took longer than {self._timeout_s:g} s (timeout_s)"
            ) from None
        if self._broken:
            raise EngineError(f"engine sglang: it cannot be used: {self._broken}")
        return self.newest

    def _salt(self) -> str:
        return f"miles-{self.newest}" if self.salted else ""

    # ---- one request on the server

    @asynccontextmanager
    async def _begun(self, request: Request) -> AsyncIterator[str]:
        """One request on the server, aborted there when the block is left before its end."""
        if not request.key:
            raise EngineError(f"engine sglang: request {request.id!r} has no routing key")
        rid = f"{request.id}.{secrets.token_hex(4)}"
        if not self.running:
            self._began = monotonic()
        self.running[rid] = request.key
        self._none.clear()
        try:
            yield rid
        except (asyncio.CancelledError, GeneratorExit, EngineError):
            with suppress(TimeoutError):  # the server is busy; the caller knows why it left
                async with asyncio.timeout(self._http.connect_s):
                    await asyncio.shield(self._let_go(rid))  # told even if who asks is cancelled
            raise
        finally:
            del self.running[rid]
            self._cut.discard(rid)
            if not self.running:
                self._none.set()
                self.counts["busy_s"] += monotonic() - self._began

    async def _whole(self, body: Mapping[str, Any], *, alone: bool) -> Mapping[str, Any]:
        ask, limit = self._http.ask, self._timeout_s
        if self._pair is None:
            reply = await self._together.ask(body, alone=alone or not self.joins)
        else:
            async with self._pair.prefilled(body, limit=limit) as paired:
                reply = await paired.heard(
                    lambda: ask("POST", "/generate", paired.body, limit=limit)
                )
        if not isinstance(reply, Mapping):
            raise EngineError(f"engine sglang: the reply is no object: {str(reply)[:200]}")
        return reply

    async def _parts(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        limit = self._timeout_s
        async with AsyncExitStack() as held:
            if self._pair is None:
                items = self._http.parts("/generate", body, limit=limit)
            else:
                paired = await held.enter_async_context(self._pair.prefilled(body, limit=limit))
                items = paired.each(self._http.parts("/generate", paired.body, limit=limit))
            async for part in await held.enter_async_context(aclosing(items)):
                yield part

    def _part(self, request: Request, reply: Mapping[str, Any], before: int) -> Completion:
        info = reply.get("meta_info")
        if not isinstance(info, Mapping):
            raise EngineError(f"engine sglang: the reply has no meta_info: {str(reply)[:200]}")
        after = wording.version(info)
        version = after if self.exact or before < 0 else min(before, after)
        made = wording.completion(request, reply, version=version, topk=self._topk)
        if len(made.tokens):
            self.tells_spans = bool(info.get("weight_versions"))
        self.newest = max(self.newest, after)
        for name, value in wording.speculation(info).items():
            self.counts[name] += value
        return made

    def _finished(self, request: Request, made: Completion) -> Completion:
        self.counts["tokens"] += len(made.tokens)
        self.counts["prompt_tokens"] += len(request.tokens)
        self.counts["cached_tokens"] += made.cached_tokens
        return made


def _ended(request: Request, done: Completion, *, cut: bool) -> Completion | None:
    """The completion, unless it was cut for new weights and there is more to sample."""
    if not cut or done.finish != "abort":
        return done
    if len(done.tokens) < request.sampling.max_new_tokens:
        return None
    return replace(done, finish="length")
