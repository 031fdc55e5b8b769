"""Watches a simulation: where the time of trainer and engines goes, by cause, and a timeline.

It changes nothing; seconds are virtual.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from miles.simulate.engine import ModelledEngine

__all__ = ["BUSY", "Engines", "Timeline", "Trainer"]

BUSY = "busy"


@dataclass(slots=True)
class Timeline:
    """What happened when, until `until`."""

    until: float = float("inf")
    """Nothing later is kept."""
    trainer: list[tuple[str, float, float]] = field(default_factory=list)
    """(cause, begin, end)."""
    engines: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """(when, requests that run from then on), by engine."""
    steps: list[float] = field(default_factory=list)
    """When each step ended."""


class Trainer:
    """The trainer's side: everything that the loop times, and the rest as `other`."""

    def __init__(self, timeline: Timeline) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._timeline = timeline
        self._inside = 0

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Count the time inside, unless it is inside another."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            now = loop.time()
            if not self._inside and now > began:
                cause = BUSY if what == "train" else what
                self.seconds[cause] += now - began
                if now <= self._timeline.until:
                    self._timeline.trainer.append((cause, began, now))


class Engines:
    """The engines' side: each is busy or idle for one cause at a time."""

    def __init__(self, why_idle: Callable[[ModelledEngine], str], timeline: Timeline) -> None:
        """`why_idle` says what an engine that does not compute waits for."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.engines: Sequence[ModelledEngine] = ()
        self._why_idle = why_idle
        self._timeline = timeline
        self._cause: dict[str, str] = {}
        self._since: dict[str, float] = {}

    def watch(self, engines: Sequence[ModelledEngine]) -> None:
        """These are all there are."""
        self.engines = engines
        now = asyncio.get_running_loop().time()
        for engine in engines:
            self._cause[engine.name], self._since[engine.name] = self._why_idle(engine), now

    def changed(self, engine: ModelledEngine) -> None:
        """It may do something else now."""
        cause = BUSY if engine.computing else self._why_idle(engine)
        name = engine.name
        timeline = self._timeline
        if engine.traced:
            series = timeline.engines[name]
            running = engine.running if engine.computing else 0
            if not series or series[-1][1] != running:
                series.append((asyncio.get_running_loop().time(), running))
        if self._cause.get(name) != cause:
            self._turn(name, cause)

    def idle_changed(self) -> None:
        """Something happened that idle engines may be waiting for."""
        for engine in self.engines:
            if not engine.computing:
                self.changed(engine)

    def settle(self) -> None:
        """Count everything up to now."""
        for name, cause in self._cause.items():
            self._turn(name, cause)

    def _turn(self, name: str, cause: str) -> None:
        now = asyncio.get_running_loop().time()
        if name in self._cause:
            self.seconds[self._cause[name]] += now - self._since[name]
        self._cause[name], self._since[name] = cause, now
