"""One engine as the router sees it: whether it may be given requests, and what it is doing.

It chooses nothing; `miles.router.bindings` places keys, `miles.router.watch` asks how engines are.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Seen", "Upstream", "Wait", "Waits"]


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
    waits: Waits
    """Those for its answers."""
    probe: asyncio.Task[Seen] | None = None
    """The check in progress, shared by everybody who wants one."""

    @classmethod
    def of(cls, name: str, engine: Any, *, patience_s: float) -> Upstream:
        """With as many ranks as the engine says it has in `dp_ranks`, or one. No wait for it is
        longer than `patience_s`."""
        ranks = max(1, int(getattr(engine, "dp_ranks", 1) or 1))
        return cls(name=name, engine=engine, active=[0] * ranks, waits=Waits(patience_s))

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
        self.waits.end()

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
    """Around a wait for an engine: `TimeoutError` when it takes longer than the engine's patience,
    or the engine is drained."""

    __slots__ = ("_cancelling", "_task", "_upstream", "expired", "until")

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.expired = False

    def __enter__(self) -> None:
        upstream = self._upstream
        if upstream.drained:
            raise TimeoutError
        waits = upstream.waits
        loop = waits.running()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a wait for an engine belongs to a task, and none is running")
        self._task, self._cancelling = task, task.cancelling()
        self.until = loop.time() + waits.patience_s
        waits.add(self)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._upstream.waits.remove(self)
        if not self.expired:
            return
        asked = self._task.uncancel()
        if kind is asyncio.CancelledError and asked <= self._cancelling:
            raise TimeoutError  # nobody else wants the task to end

    def expire(self) -> None:
        """It has taken too long."""
        self.expired = True
        self._task.cancel()


class Waits:
    """The waits for one engine. All are equally patient, so that they expire in the order in which
    they began, and one timer is enough for them."""

    __slots__ = ("_held", "_loop", "_timer", "patience_s")

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        """Seconds that each may take."""
        self._held: dict[Wait, None] = {}  # the oldest first
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def running(self) -> asyncio.AbstractEventLoop:
        """The event loop, which is the same for all that wait at one time."""
        if not self._held:
            loop = asyncio.get_running_loop()
            if loop is not getattr(self, "_loop", None):
                self._loop, self._timer = loop, None
        return self._loop

    def add(self, wait: Wait) -> None:
        """It has begun."""
        self._held[wait] = None
        if self._timer is None:
            self._timer = self._loop.call_at(wait.until, self._expire)

    def remove(self, wait: Wait) -> None:
        """It is over."""
        del self._held[wait]

    def end(self) -> None:
        """All of them expire, as soon as the event loop comes to it."""
        if self._held:
            self._loop.call_soon(self._cut, tuple(self._held))

    def _cut(self, waits: tuple[Wait, ...]) -> None:
        for wait in waits:
            if wait in self._held and not wait.expired:
                wait.expire()

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        for wait in self._held:
            if wait.expired:
                continue
            if wait.until > now:
                self._timer = self._loop.call_at(wait.until, self._expire)
                return
            wait.expire()
