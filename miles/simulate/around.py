"""What a simulated stage finds around it: in the place of a run's directory, processes and workers.

How the stage goes on is `miles.simulate.simulation`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from miles import loop
from miles.batch import Batch
from miles.buffer import Lease
from miles.errors import WorkerError
from miles.protocols import Tools
from miles.seeds import derive_seed
from miles.session.partial import Partial
from miles.simulate.engine import ModelledEngine
from miles.stage import Shared
from miles.types import Group, Sampling
from miles.workers.rollouts import as_they_end

if TYPE_CHECKING:
    from miles.simulate.simulation import Simulation

__all__ = ["Fleet", "MemoryLedger", "Outside", "Pool", "Rollouts", "Worker"]


class MemoryLedger:
    """What a stage asks of a ledger, kept in memory."""

    def __init__(self) -> None:
        self.lines: list[Mapping[str, Any]] = []

    @property
    def offset(self) -> int:
        """Lines written."""
        return len(self.lines)

    def write(self, *, step: int, started: int, ended: Sequence[tuple[int, str]]) -> None:
        """As `Ledger.write`."""
        self.lines.append({"step": step, "started": started, "ended": list(ended)})


class _Quiet:
    """Hooks of a run that nobody watches: what plugins would do to files must not happen."""

    def prepared(self, groups: Sequence[Group], batch: Batch) -> Batch:
        return batch

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda **arguments: None


@dataclass(slots=True)
class Outside:
    """What a simulated stage finds around it in the place of a run's directory and processes."""

    ledger: Any = field(default_factory=MemoryLedger)
    """Where fates are written."""
    evaluated: list[Mapping[str, Any]] = field(default_factory=list)
    """Moments of that name."""
    version: int = 0
    """Version to begin with."""
    next_group: int = 0
    """Id of the next group."""

    def shared(self) -> Shared:
        """As a stage wants it."""

        def moment(name: str, data: Mapping[str, Any]) -> None:
            if name == "evaluated":
                self.evaluated.append(data)

        return Shared(
            directory=Path("/nonexistent/simulation"),  # nothing may be written there
            registry=SimpleNamespace(hook=_Quiet()),
            runtime=None,
            ledger=self.ledger,
            tracking=cast(Any, SimpleNamespace(moment=moment)),
            config={},
            version=self.version,
            next_group=self.next_group,
        )


class Fleet:
    """What a stage asks of `miles.workers.engines`, over modelled ones, dead ones among them."""

    def __init__(self, engines: Sequence[ModelledEngine]) -> None:
        self._engines = engines

    async def sleep(self) -> None:
        """All of them."""
        for engine in self._engines:
            await engine.sleep()

    async def wake(self) -> None:
        """All of them."""
        for engine in self._engines:
            await engine.wake()

    async def health(self) -> Mapping[str, float]:
        """Sums over those that live."""
        total: dict[str, float] = {}
        for engine in self._engines:
            if not engine.dead:
                for name, value in (await engine.health()).items():
                    total[name] = total.get(name, 0.0) + value
        return total


class Pool:
    """What a stage asks of `miles.workers.pool`; `miles.loop.rollout` plays the groups, here."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    async def group(
        self,
        lease: Lease,
        samples: int | None = None,
        sampling: Sampling | None = None,
        *,
        returned: Callable[[], None] | None = None,
    ) -> Group:
        """Play one group."""
        simulation = self._simulation
        if returned is not None:
            simulation.returns[lease.id] = returned
        how = {} if sampling is None else {"sampling": sampling}
        try:
            return await loop.rollout(cast(Any, simulation.rollouts), lease, samples, **how)
        finally:
            simulation.returns.pop(lease.id, None)
            simulation.forget(lease.id)

    async def metrics(self) -> Mapping[str, float]:
        """None: the result counts by itself."""
        return {}


class Worker:
    """Implements `miles.Handle` over the rollouts of a simulation, for `miles.workers.pool` itself
    where workers die: what it plays is lost with it."""

    world = 1

    def __init__(self, name: str, simulation: Simulation) -> None:
        self.name = name
        self.dead = False
        self._pool = Pool(simulation)
        self._playing: set[asyncio.Task[Group]] = set()

    async def call(
        self, target: str, *args: Any, rank: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Play a group, or answer that it lives. Raises `WorkerError` when dead."""
        if target == "rollouts.group":
            group, task, samples, sampling, _ = args
            return await self._group(Lease(id=group, task=task), samples, sampling)
        self._refuse_dead()
        return {"session": {}, "router": {}} if target == "rollouts.counts" else None

    async def call_all(self, target: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The same: there is one."""
        return [await self.call(target, *args, **kwargs)]

    async def stream(self, target: str, *args: Any, rank: int = 0) -> AsyncIterator[Group | None]:
        """As `miles.workers.rollouts.Rollouts.returning`."""
        lease = Lease(id=args[0], task=args[1])

        async def play(tell: Callable[[], None]) -> Group:
            return await self._group(lease, returned=tell)

        async with aclosing(as_they_end(play, name=f"group {lease.id}")) as ends:
            async for each in ends:
                yield each

    async def _group(self, lease: Lease, *how: Any, **more: Any) -> Group:
        self._refuse_dead()
        task = asyncio.create_task(self._pool.group(lease, *how, **more))
        self._playing.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            asked = asyncio.current_task()
            if asked is not None and not asked.cancelling():  # not whoever waits for it
                self._refuse_dead()
            raise
        finally:
            self._playing.discard(task)

    def _refuse_dead(self) -> None:
        if self.dead:
            raise WorkerError(f"{self.name}: it died, as modelled")

    def die(self) -> None:
        """Lose everything it plays, and answer nothing from now on."""
        self.dead = True
        for task in self._playing:
            task.cancel()


class Rollouts:
    """Implements `miles.loop.Rollouts`."""

    def __init__(self, simulation: Simulation, *, router: Any = None) -> None:
        """`router` is for evaluations on engines of their own; without it, attempts are on the
        engines that train."""
        self._simulation = simulation
        self.settings = simulation.settings
        self.environment = simulation.environment
        self.attempts: dict[int, list[str]] = {}
        """Names of attempts by group in flight."""
        self._sampler: Any = router or simulation.router
        self._engine = Partial(self._sampler) if self.settings.partial else self._sampler
        self._sampling = Sampling(max_new_tokens=self.settings.max_new_tokens)

    def tools(self, lease: Lease, index: int | None, sampling: Sampling | None = None) -> Tools:
        name = f"g{lease.id}.{index}"
        self.attempts.setdefault(lease.id, []).append(name)
        return cast(
            Tools,
            SimpleNamespace(
                id=name,
                group=lease.id,
                seed=derive_seed(self.settings.seed, "rollout", lease.id, index or 0),
                sampling=sampling or self._sampling,
                engine=self._engine if sampling is None else self._sampler,
            ),
        )

    def returned(self, lease: Lease) -> None:
        if (tell := self._simulation.returns.get(lease.id)) is not None:
            tell()
        self._simulation.idle.idle_changed()
