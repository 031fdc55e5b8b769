"""An engine that goes on where it was cut: completions that end by `abort` are asked for again.

Used where publishing aborts what is running (`pause=abort`) and nothing sampled may be lost
(`partial=true`). Aborted by its key, as when nobody waits any more, a completion ends where it is.
It samples nothing itself and keeps nothing between requests.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from miles.errors import GenerationAborted
from miles.types import Array, Completion, Request, Span

__all__ = ["Partial", "joined"]

_MOST_CUTS = 1000  # of one completion; more means that somebody aborts it on purpose


@dataclass(eq=False, slots=True)
class _Asked:
    """A request under way."""

    key: str
    unwanted: bool = False  # it was aborted by its key: the next cut is its end


class Partial:
    """An engine over another. A completion that was aborted n tokens in goes on with its prompt and
    those tokens as the prompt, under the same seed: an engine whose noise depends on seed and
    position then draws what it would have drawn."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.samples: bool = engine.samples
        self._asked: set[_Asked] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Request) -> Completion:
        """The whole completion. Raises as the engine, and `GenerationAborted` when it is aborted
        again and again."""
        done: Completion | None = None
        with self._asking(request) as asked:
            for _ in range(_MOST_CUTS):
                part = await self._engine.generate(_rest(request, done))
                done = part if done is None else joined(done, part)
                if done.finish != "abort" or asked.unwanted:
                    return done
        raise GenerationAborted(f"request {request.id}: aborted {_MOST_CUTS} times")

    async def stream(self, request: Request) -> AsyncGenerator[Array | Completion, None]:
        """As `generate`: tokens as they are decoded, last the whole completion."""
        done: Completion | None = None
        with self._asking(request) as asked:
            for _ in range(_MOST_CUTS):
                part: Completion | None = None
                async with aclosing(self._engine.stream(_rest(request, done))) as items:
                    async for item in items:
                        if isinstance(item, Completion):
                            part = item
                        else:
                            yield item
                if part is None:
                    break
                done = part if done is None else joined(done, part)
                if done.finish != "abort" or asked.unwanted:
                    yield done
                    return
        raise GenerationAborted(f"request {request.id}: aborted {_MOST_CUTS} times")

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """As the engine's; what these keys ask for now is not gone on with."""
        for asked in self._asked:
            asked.unwanted |= keys is not None and asked.key in keys
        count: int = await self._engine.abort(keys)
        return count

    @contextmanager
    def _asking(self, request: Request) -> Iterator[_Asked]:
        asked = _Asked(request.key)
        self._asked.add(asked)
        try:
            yield asked
        finally:
            self._asked.discard(asked)


def _rest(request: Request, done: Completion | None) -> Request:
    if done is None or not len(done.tokens):
        return request
    left = request.sampling.max_new_tokens - len(done.tokens)
    return replace(
        request,
        tokens=np.concatenate([request.tokens, done.tokens]),
        sampling=replace(request.sampling, max_new_tokens=left),
    )


def joined(first: Completion, second: Completion) -> Completion:
    """One completion of two, the second sampled after the first's tokens. Values that only one of
    them has, the whole has not."""
    shift = len(first.tokens)
    moved = [
        Span(start=s.start + shift, stop=s.stop + shift, version=s.version) for s in second.spans
    ]
    return Completion(
        tokens=np.concatenate([first.tokens, second.tokens]),
        logprobs=_concatenated(first.logprobs, second.logprobs),
        spans=_merged([*first.spans, *moved]),
        finish=second.finish,
        truncated_logprobs=_concatenated(first.truncated_logprobs, second.truncated_logprobs),
        cached_tokens=first.cached_tokens,
        experts=_concatenated(first.experts, second.experts),
    )


def _concatenated(first: Array | None, second: Array | None) -> Array | None:
    return None if first is None or second is None else np.concatenate([first, second])


def _merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbours of one version become one span."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].version == span.version and merged[-1].stop == span.start:
            merged[-1] = Span(start=merged[-1].start, stop=span.stop, version=span.version)
        else:
            merged.append(span)
    return tuple(merged)
