"""One engine as the router sees it: whether it may be given requests, and what it is doing.

It chooses nothing; `miles.router.bindings` places keys, `miles.router.watch` asks how engines are.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Seen", "Upstream", "Wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one check found."""

    published: int | None
    """The published version when it began."""
    version: int
    """The engine's version; -1 when it was not asked."""
    wrong: str
    """Why it is not well; empty when it is."""


@dataclass(slots=True, eq=False, kw_only=True)
class Upstream:
    """An engine and its state; it serves until it is drained."""

    name: str
    """Name among the router's engines."""
    engine: Any
    """The `Engine`, or its mirror."""
    active: list[int] = field(default_factory=lambda: [0])
    """Requests in flight by data-parallel rank."""
    drained: str = ""
    """Why it gets no requests; empty while it serves."""
    drained_at: float = 0.0
    """`loop.time()` of that."""
    failed_checks: int = 0
    """Health checks that failed in a row."""
    failed_keys: set[str] = field(default_factory=set)
    """Keys whose request failed since the last answer, though the engine says that it is well."""
    relapses: int = 0
    """Times it was drained for such failures since it last answered."""
    limits: set[asyncio.Timeout] = field(default_factory=set)
    """Deadlines of the waits in flight."""
    probe: asyncio.Task[Seen] | None = None
    """The check in progress, shared by everybody who wants one."""

    @classmethod
    def of(cls, name: str, engine: Any) -> Upstream:
        """With as many ranks as the engine says it has in `dp_ranks`, or one."""
        ranks = max(1, int(getattr(engine, "dp_ranks", 1) or 1))
        return cls(name=name, engine=engine, active=[0] * ranks)

    @property
    def serving(self) -> bool:
        """Whether it may be given requests."""
        return not self.drained

    @property
    def load(self) -> int:
        """Requests in flight over all ranks."""
        return sum(self.active)

    @property
    def drained_s(self) -> float:
        """Seconds since it was drained last."""
        return asyncio.get_running_loop().time() - self.drained_at

    def drain(self, why: str) -> None:
        """Give it nothing more, and end what it is doing: whoever waits sees `TimeoutError`."""
        now = asyncio.get_running_loop().time()
        self.drained, self.drained_at = why, now
        for limit in self.limits:
            if not limit.expired():
                limit.reschedule(now)

    def readmit(self) -> None:
        """Serve again."""
        self.drained = ""
        self.failed_checks = 0
        self.failed_keys.clear()

    def answered(self) -> None:
        """A request came back whole."""
        if self.failed_keys or self.relapses:
            self.failed_keys.clear()
            self.relapses = 0


class Wait:
    """Around a wait for an engine: `TimeoutError` when it takes too long or the engine is
    drained."""

    __slots__ = ("_limit", "_upstream")

    def __init__(self, upstream: Upstream, seconds: float) -> None:
        self._upstream, self._limit = upstream, asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        if self._upstream.drained:
            raise TimeoutError
        await self._limit.__aenter__()
        self._upstream.limits.add(self._limit)

    async def __aexit__(self, *raised: Any) -> None:
        self._upstream.limits.discard(self._limit)
        await self._limit.__aexit__(*raised)
