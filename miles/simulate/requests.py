"""Requests of modelled engines, and tokens that are only counted.

How long a request takes is `miles.simulate.engine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from miles.types import Array, Completion, Finish, Sampling, Span

__all__ = [
    "DECODES", "GONE", "PREFILLS", "WAITS", "Job", "ModelledRequest", "answered", "blank", "laid",
    "of_size",
]  # fmt: skip

_blank = np.zeros(1 << 16, np.int32)


def blank(size: int) -> Array:
    """(size,) int32 zeros, of memory that all share."""
    global _blank
    if size > len(_blank):
        _blank = np.zeros(2 * size, np.int32)
    return _blank[:size]


@dataclass(slots=True, kw_only=True, eq=False)
class ModelledRequest:
    """What is read of a `Request` in which `max_new_tokens` are sampled and tokens are only
    counted. One is made every turn, so it is not frozen, which is quicker."""

    id: str
    """Unique in the run."""
    key: str
    """Routing key."""
    tokens: Array
    """(prompt tokens,) int32."""
    sampling: Sampling
    """Of which only `max_new_tokens` is looked at."""
    seed: int = 0
    """Of no effect."""
    dp_rank: int | None = None
    """Set by the router."""
    trajectory: str = ""
    """Whose prefix it extends, whatever key it is routed by."""
    group: str = ""
    """Whose first prompt it shares."""
    shared: int = 0
    """Tokens of that prompt."""


WAITS, PREFILLS, DECODES, GONE = range(4)
"""What becomes of a request in an engine, in this order."""


class Job:
    """A request in an engine."""

    __slots__ = (
        "answer", "cached", "done", "left", "need", "prompt", "request", "spans", "start", "state",
    )  # fmt: skip

    def __init__(self, request: ModelledRequest, answer: asyncio.Future[Completion]) -> None:
        self.request, self.answer = request, answer
        self.prompt = len(request.tokens)
        self.left = request.sampling.max_new_tokens  # tokens still to sample
        self.need = self.prompt + self.left  # tokens of cache that it reserves
        self.cached = 0
        self.done = 0  # tokens sampled before `start`
        self.state = WAITS
        self.start = 0.0  # the token clock when it began to decode
        self.spans: list[tuple[int, int]] = []  # (tokens, version) sampled before `start`


def answered(
    size: int, pieces: Sequence[tuple[int, int]], finish: Finish, cached: int
) -> Completion:
    """The completion of `size` tokens that were sampled in pieces of (tokens, version)."""
    return Completion(
        tokens=blank(size), logprobs=None, spans=laid(pieces), finish=finish, cached_tokens=cached
    )


def laid(pieces: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
    """(tokens, version) laid end to end."""
    if len(pieces) == 1:
        return _one(*pieces[0])
    spans, at = [], 0
    for size, version in pieces:
        spans.append(Span(start=at, stop=at + size, version=version))
        at += size
    return tuple(spans)


@lru_cache(maxsize=65_536)  # most completions have one, of a few thousand sizes
def _one(size: int, version: int) -> tuple[Span, ...]:
    return (Span(start=0, stop=size, version=version),)


@lru_cache(maxsize=65_536)
def of_size(size: int) -> Sampling:
    """Sampling of this many tokens."""
    return Sampling(max_new_tokens=size)
