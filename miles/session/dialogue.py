"""One turn of a conversation: what to say to an engine, and what to do however that ends.

Tokens are the session's, sampling the engine's; who asks (an episode, a server) is no matter here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache
from typing import Any

from miles.errors import EngineError, WorkerError
from miles.protocols import Engine, Tito, Tool
from miles.seeds import derive_seed
from miles.session.tree import Session
from miles.session.turns import Turn
from miles.types import Array, Completion, Message, Request, Sampling

__all__ = ["stop", "turn", "with_stop_ids"]

_ABORT_S = 10.0  # an engine may take to hear that nobody waits any more


async def turn(
    session: Session,
    messages: str | Sequence[Message],
    *,
    engine: Engine,
    sampling: Sampling,
    seed: int,
    tools: Sequence[Tool] = (),
    append: bool = False,
    on_tokens: Callable[[Array], None] | None = None,
    demonstration: Callable[[int], Array] | None = None,
    timeout_s: float | None = None,
    want_experts: bool = False,
) -> Turn:
    """Prompt, sample, store. `seed` is the session's; every turn derives its own. `sampling` has
    its stop ids (`with_stop_ids`), and gets no more new tokens than the context has room for.
    `on_tokens` is called with (new tokens,) int32 as they are decoded, or once with all where the
    engine has no `stream`. `demonstration` gives what turn n is to say, to an engine that replays.
    `timeout_s` is how long the engine may take, without it `session.upstream_timeout_s`; 0 leaves
    it to the deadline of whoever waits. `want_experts` asks for the routing to replay,
    as `session.experts` does in every turn.

    Raises what `Session.prompt` and `Session.commit` raise, and `EngineError` also when the engine
    takes too long. Whatever is raised, cancellation included, the session is as it was before. When
    nobody waits any more, the engine is told to stop, unless it answers another request of the
    session under the same key.
    """
    prompt = session.prompt(messages, tools=tools, append=append)
    try:
        request = Request(
            id=f"{session.id}/{prompt.index}",
            key=session.id,
            tokens=prompt.tokens,
            sampling=_fitting(sampling, len(prompt.tokens), session.max_tokens),
            seed=derive_seed(seed, prompt.index),
            demonstration=None if demonstration is None else demonstration(prompt.index),
            images=prompt.images,
            want_experts=want_experts or session.rules.experts,
        )
        limit = session.rules.upstream_timeout_s if timeout_s is None else timeout_s
        if limit or on_tokens is not None:
            completion = await _ask(session, engine, request, on_tokens, limit)
        else:
            completion = await engine.generate(request)
        return session.commit(prompt, completion, stop_ids=sampling.stop_ids)
    except BaseException as error:  # cancellation too: a prompt is committed or abandoned
        try:
            late = isinstance(error.__cause__, TimeoutError)
            if (late or isinstance(error, asyncio.CancelledError)) and session.pending == 1:
                await stop(session, engine)
        finally:  # not before: who asks again would be stopped as well
            session.abandon(prompt)
        raise


async def _ask(
    session: Session,
    engine: Engine,
    request: Request,
    on_tokens: Callable[[Array], None] | None,
    limit: float,
) -> Completion:
    try:
        async with asyncio.timeout(limit or None):
            if on_tokens is None:
                return await engine.generate(request)
            return await _stream(engine, request, on_tokens)
    except TimeoutError as error:
        raise EngineError(
            f"session {session.id}: request {request.id} had no answer in {limit:g} s "
            "(session.upstream_timeout_s)"
        ) from error


async def _stream(engine: Any, request: Request, on_tokens: Callable[[Array], None]) -> Completion:
    if (stream := getattr(engine, "stream", None)) is None:
        completion: Completion = await engine.generate(request)
        on_tokens(completion.tokens)
        return completion
    async with aclosing(stream(request)) as parts:
        async for part in parts:
            if isinstance(part, Completion):
                return part
            on_tokens(part)
    raise EngineError(f"request {request.id}: the engine's stream ended without a completion")


async def stop(session: Session, engine: Engine) -> None:
    """Nobody waits any more: end what is being sampled under the session's key."""
    try:
        async with asyncio.timeout(_ABORT_S):
            await engine.abort([session.id])
    except (EngineError, WorkerError, TimeoutError):
        return  # it is gone, or too busy to hear: the request is given up all the same


def _fitting(sampling: Sampling, size: int, limit: int) -> Sampling:
    """The sampling, with no more new tokens than the context still holds."""
    if not limit or size + sampling.max_new_tokens <= limit:
        return sampling
    return replace(sampling, max_new_tokens=limit - size)


@lru_cache(maxsize=64)  # a run has few samplings and one handler, and a conversation per attempt
def _with(sampling: Sampling, stop_ids: tuple[int, ...]) -> Sampling:
    return replace(sampling, stop_ids=stop_ids)


def with_stop_ids(sampling: Sampling, tito: Tito) -> Sampling:
    """The sampling with the handler's stop ids, unless it brings its own."""
    return sampling if sampling.stop_ids else _with(sampling, tito.stop_ids)
