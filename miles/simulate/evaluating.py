"""Modelled evaluations apart from training: on engines of their own, by a command, from snapshots.

Which versions are due, what waits and what is skipped is decided by `miles.evaluation.evaluations`,
and a score on engines by the run's own evaluator; of a snapshot there is only a name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

from miles import loop
from miles.batch import Score, Skipped
from miles.buffer import Lease
from miles.evaluation.evaluations import Snapshots
from miles.router import Router
from miles.seeds import derive_seed
from miles.simulate.around import Rollouts
from miles.simulate.distributions import draw
from miles.simulate.engine import ModelledEngine
from miles.types import Group, Sampling, Task

if TYPE_CHECKING:
    from miles.simulate.simulation import Simulation

__all__ = ["ModelledCommand", "ModelledEvalFleet", "NamedSnapshots"]


class NamedSnapshots(Snapshots):
    """Of which nothing is written: they have a name, and take time."""

    sealed = False

    async def left(self, version: int) -> list[tuple[int, Path]]:
        """None: a simulation begins with nothing."""
        return []

    async def remove(self, directory: Path) -> None:
        """Takes no time."""


class ModelledEvalFleet:
    """What evaluations ask of `miles.evaluation.fleet`."""

    def __init__(self, simulation: Simulation, *, count: int) -> None:
        """`count` engines, as fast as those that train. To be made in the loop."""
        self._load_s = simulation.keys.evaluation.load_s
        self._engines = [
            ModelledEngine(f"eval-engine-{i}", simulation.keys.engine, lambda engine: None)
            for i in range(count)
        ]
        for engine in self._engines:
            engine.traced = False
        self._router = Router(
            {engine.name: engine for engine in self._engines},
            request_timeout_s=simulation.settings.worker_timeout_s,
        )
        self._rollouts = Rollouts(simulation, router=self._router)

    async def load(self, directory: Path, version: int, *, sealed: bool = True) -> None:
        """Take the time of it; nothing is cached any more."""
        await asyncio.sleep(self._load_s)
        for engine in self._engines:
            await engine.load(version)
            engine.forget()
        self._router.published(version)

    async def attempt(
        self, task: Task, *, samples: int, sampling: Sampling, seed: int, of: str = ""
    ) -> Group:
        """As `miles.Attempt`."""
        lease = Lease(id=-1 - seed, task=task)
        try:
            return await loop.rollout(cast(Any, self._rollouts), lease, samples, sampling=sampling)
        finally:
            for name in self._rollouts.attempts.pop(lease.id, ()):
                self._router.release(name)
                for engine in self._engines:
                    engine.ended(name)

    async def close(self) -> None:
        """There is nothing to end."""

    @property
    def busy_s(self) -> float:
        """Seconds that its engines computed, added up over them."""
        return sum(engine.busy_s for engine in self._engines)


class ModelledCommand:
    """Stands for an evaluator that is handed a checkpoint directory and scores it elsewhere.

    How many snapshots there may be, what happens when all are taken, and how long one may take is
    as the evaluator itself says; how long its command takes is modelled. Scores are by chance, like
    rewards.
    """

    place = "directory"

    def __init__(self, evaluator: Any, simulation: Simulation) -> None:
        self.timeout_s = float(getattr(evaluator, "timeout_s", 600.0))
        self.snapshots = int(getattr(evaluator, "snapshots", 1))
        self.overflow = str(getattr(evaluator, "overflow", "skip"))
        self._sets = [plan.name for plan in getattr(evaluator, "plans", ())] or ["all"]
        self._seconds = draw(simulation.keys.evaluation.command_s)
        self._success = draw(simulation.keys.environment.success)
        self._seed = simulation.settings.seed

    async def evaluate(self, version: int, attempt: Any) -> Sequence[Score | Skipped]:
        """One result a set; `Skipped` when it takes longer than it may."""
        rng = Random(derive_seed(self._seed, "command", version))
        seconds = self._seconds(rng)
        await asyncio.sleep(min(seconds, self.timeout_s))
        if seconds > self.timeout_s:
            late = f"timeout: the command was not done after {self.timeout_s:g} s"
            return [Skipped(set=name, reason=late) for name in self._sets]
        return [
            Score(set=name, version=version, score=min(1.0, self._success(rng)), samples=1)
            for name in self._sets
        ]
