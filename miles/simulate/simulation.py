"""One stage in virtual time: `miles.stage` and `miles.loop` as they are, over modelled parts.

Every decision of a schedule (admission, staleness, routing, selection, when to publish and to
evaluate) is taken by the code that runs decide it; what things take is `miles.simulate.keys`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np

from miles import loop
from miles.assemble import make_buffer, make_placement
from miles.batch import Batch, Tokens, Update
from miles.errors import ConfigError
from miles.evaluation.evaluations import Evaluations
from miles.protocols import Context
from miles.router import Router
from miles.seeds import derive_seed
from miles.settings import Settings
from miles.simulate.around import Fleet, Outside, Pool, Rollouts, Worker
from miles.simulate.engine import ModelledEngine
from miles.simulate.environment import ModelledEnvironment
from miles.simulate.evaluating import ModelledCommand, ModelledEvalFleet, NamedSnapshots
from miles.simulate.keys import Keys
from miles.simulate.parts import ModelledTrainer, ModelledWeights
from miles.simulate.requests import blank
from miles.simulate.result import Result, Step
from miles.simulate.watching import Engines, Timeline, Trainer
from miles.stage import Stage
from miles.types import Group
from miles.workers import pool
from miles.workers.probe import few_tokens

__all__ = ["Simulation", "build"]


class Simulation(Stage):
    """A stage whose parts are modelled."""

    def __init__(
        self,
        *,
        name: str,
        settings: Settings,
        keys: Keys,
        outside: Outside | None = None,
        first: int | None = None,
        timeline_steps: int = 12,
    ) -> None:
        """`selector` and `evaluator` are to be set before `main`. `first` is the version at which
        the stage began, when that is not where it begins now."""
        outside = outside or Outside()
        super().__init__(
            name=name,
            settings=settings,
            shared=outside.shared(),
            first=outside.version if first is None else first,
        )
        self.keys = keys
        self.outside = outside
        self.environment = ModelledEnvironment(
            keys, seed=settings.seed, max_turns=settings.max_turns
        )
        self.environment_name = "modelled"
        self.evaluator = None
        self.evaluations = Evaluations(self, NamedSnapshots(self.shared.directory / "snapshots"))
        self.returns: dict[int, Callable[[], None]] = {}
        self.workers: dict[str, Worker] = {}
        """Rollout workers, where they die."""
        self.deaths: Counter[str] = Counter()
        """How often engines and rollout workers died."""
        self.timeline = Timeline()
        self.saved = ""
        """The newest checkpoint."""
        self.stepped: list[Step] = []
        self.watchers: list[Callable[[Simulation], None]] = []
        """Called after every step."""
        self._timeline_steps = timeline_steps
        self._before: Mapping[str, float] = {}
        self._evaluating = False
        self._step_began = 0.0
        self._began = 0.0
        self._rng = Random(derive_seed(settings.seed, "faults", first or 0))

    # ---- building, inside the virtual loop

    def assemble(self) -> None:
        """Make the modelled parts; the loop must run."""
        keys, settings = self.keys, self.settings
        self.idle = Engines(self._why_idle, self.timeline)
        self.busy = Trainer(self.timeline)
        self.timing = self.busy.timing
        count = keys.engine.gpus // keys.engine.gpus_per_engine
        self.fleet = [
            ModelledEngine(f"engine-{i}", keys.engine, self._engine_changed) for i in range(count)
        ]
        self.router = Router(
            {engine.name: engine for engine in self.fleet},
            request_timeout_s=settings.worker_timeout_s,
            check_every_s=30.0,
        )
        trainer = ModelledTrainer(keys, self.fleet, self._rng)
        trainer.version = self.shared.version
        self.trainer = cast(Any, trainer)
        self.weights = cast(
            Any,
            ModelledWeights(
                keys,
                pause=settings.pause,
                trainer=trainer,
                engines=self.fleet,
                router=self.router,
                rng=self._rng,
                changed=self.idle.idle_changed,
            ),
        )
        self.engines = cast(Any, Fleet(self.fleet))
        self.samples = True
        self.pool = cast(Any, self._pool())
        self.buffer = make_buffer(settings, version=self.shared.version, until=self.last)
        self.placement = make_placement(
            settings, buffer=self.buffer, trainer=trainer, engines=self.engines
        )
        self.rollouts = Rollouts(self)
        place = getattr(self.evaluator, "place", "rollout")
        if place == "apart":
            count = int(getattr(self.evaluator, "workers", 1))
            self.eval_fleet = cast(Any, ModelledEvalFleet(self, count=count))
        elif place == "directory" and not isinstance(self.evaluator, ModelledCommand):
            self.evaluator = ModelledCommand(self.evaluator, self)
        self.idle.watch(self.fleet)

    def _pool(self) -> Pool | pool.Pool:
        """The run's own, where workers die."""
        settings, faults = self.settings, self.keys.faults
        if not faults.rollout_every_s:
            return Pool(self)
        names = [f"rollout-{i}" for i in range(max(1, settings.rollout_workers))]
        self.workers = {name: Worker(name, self) for name in names}

        async def restart(handle: Any) -> Worker:
            await asyncio.sleep(faults.rollout_down_s)
            self.workers[handle.name] = Worker(handle.name, self)
            return self.workers[handle.name]

        return pool.Pool(list(self.workers.values()), restart=restart, settings=settings)

    async def main(self, *, stop_after_s: float | None = None) -> Result:
        """The stage to its end, or to the end of the step in which `stop_after_s` falls."""
        if not hasattr(self, "fleet"):
            self.assemble()
        clock = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            if self.keys.faults.engine_every_s:
                await stack.enter_async_context(self.router)
            beside = [
                asyncio.create_task(self._fail(engine), name=f"faults of {engine.name}")
                for engine in self.fleet
                if self.keys.faults.engine_every_s
            ]
            beside += [
                asyncio.create_task(self._fail_worker(name), name=f"faults of {name}")
                for name in self.workers
            ]
            try:
                if stop_after_s is not None:
                    clock.call_later(stop_after_s, self.interrupt)
                await loop.train(self)
                if not self.interrupted and self.shared.version < self.last:
                    await self.end_early()
            finally:
                await self.evaluations.close()
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
        self.idle.settle()
        return self._result()

    async def _fail(self, engine: ModelledEngine) -> None:
        faults = self.keys.faults
        rng = Random(derive_seed(self.settings.seed, "deaths", engine.name, self.shared.version))
        while True:
            await asyncio.sleep(rng.expovariate(1 / faults.engine_every_s))
            engine.die("it died, as modelled")
            self.deaths["engine"] += 1
            await asyncio.sleep(faults.engine_down_s)
            engine.revive(self.weights.version)  # type: ignore[attr-defined]

    async def _fail_worker(self, name: str) -> None:
        every = self.keys.faults.rollout_every_s
        rng = Random(derive_seed(self.settings.seed, "deaths", name, self.shared.version))
        while True:
            await asyncio.sleep(rng.expovariate(1 / every))
            if not self.workers[name].dead:
                self.workers[name].die()
                self.deaths["rollout"] += 1

    # ---- what the loop asks, where that is not the stage's own

    def steps(self) -> Any:
        """As the stage's; what went before the first step is not counted."""
        self._began = self._step_began = asyncio.get_running_loop().time()
        self.idle.settle()
        self.idle.seconds.clear()
        self.busy.seconds.clear()
        self._start = {e.name: (e.tokens, e.busy_s, e.batch_s) for e in self.fleet}
        return super().steps()

    async def prepare(self, groups: Sequence[Group]) -> Batch:
        """Only the lengths of samples, after `trainer.prepare_s`, and `probe_s` where one is
        wanted."""
        keys, version = self.keys.trainer, self.trainer.version
        fresh = self.buffer.published_version == version
        wants = keys.probe_s and fresh and few_tokens(groups, version)
        await asyncio.sleep(keys.prepare_s + (keys.probe_s if wants else 0.0))
        sizes = [int(t.metrics["tokens"]) for g in groups for t in g.trajectories]
        none = blank(0)
        empty = none.astype(bool)
        tokens = Tokens(
            tokens=none,
            lengths=np.array(sizes, np.int32),  # (trajectories,) int32
            sampled=empty,
            trainable=empty,
            versions=none,
        )
        return Batch(tokens=tokens, terms=())

    async def checkpoint(self, step: int, *of: Any) -> None:
        """The trainer's bookkeeping takes its time, then as the stage's."""
        await asyncio.sleep(self.keys.trainer.finish_s)
        await super().checkpoint(step, *of)

    async def save(self) -> Path:
        """As JSON in `saved`, from which `stand_again` goes on; nothing is written to disk."""
        self._write_ledger(self.trainer.version)
        kept = {"selector": self.selector.state_dict(), **self.standing()}
        self.saved = json.dumps(kept)
        return Path()

    async def snapshot(self, folder: Path) -> Path:
        """Its name, after `evaluation.snapshot_s`."""
        version = self.trainer.version
        await asyncio.sleep(self.keys.evaluation.snapshot_s)
        return folder / f"step_{version:06d}"

    def stand_again(self, saved: str) -> None:
        """Go on where `saved` was; the simulation must be of that version and not have begun."""
        state = json.loads(saved)
        self.assemble()
        self.selector.load_state_dict(state["selector"])
        self.stand(state)

    async def score(self, version: int) -> Any:
        self._evaluating = True
        self.idle.idle_changed()
        try:
            return await super().score(version)
        finally:
            self._evaluating = False
            self.idle.idle_changed()

    def finish_step(self, step: int, groups: Sequence[Group], batch: Batch, update: Update) -> None:
        """Account for it."""
        self.shared.version = update.version
        self._write_ledger(step)
        now = asyncio.get_running_loop().time()
        spent, self._before = (
            {k: v - self._before.get(k, 0.0) for k, v in self.busy.seconds.items()},
            dict(self.busy.seconds),
        )
        accounts = self.buffer.accounts
        self.stepped.append(
            Step(
                seconds=now - self._step_began,
                wait_s=spent.get("wait", 0.0),
                train_s=spent.get("busy", 0.0),
                lags=tuple(self.buffer.lags),
                trained=int(batch.tokens.lengths.sum()),
                sampled=sum(len(s.tokens) for g in groups for s in g.samples),
                buffered=accounts.buffered,
                in_flight=accounts.in_flight,
            )
        )
        self._step_began = now
        if len(self.timeline.steps) < self._timeline_steps:
            self.timeline.steps.append(now)
            if len(self.timeline.steps) == self._timeline_steps:
                self.timeline.until = now
                for engine in self.fleet:
                    engine.traced = False
        for watcher in self.watchers:
            watcher(self)

    # ---- watching

    def forget(self, group: int) -> None:
        """A group is over: its keys are free."""
        for name in self.rollouts.attempts.pop(group, ()):
            self.router.release(name)
            for engine in self.fleet:
                engine.ended(name)
        self.idle.idle_changed()

    def _engine_changed(self, engine: ModelledEngine) -> None:
        self.idle.changed(engine)
        self.trainer.engines_changed()  # type: ignore[attr-defined]

    def _why_idle(self, engine: ModelledEngine) -> str:
        if engine.dead:
            return "down"
        if engine.stopped:
            return "publish"
        if engine.resident:
            return "environment"
        if self._evaluating:
            return "evaluation"
        if not hasattr(self, "buffer"):
            return "start"
        buffer = self.buffer
        a = buffer.accounts
        ahead = buffer.published_version + buffer.max_lag + 1 - buffer.trainer_version
        held = a.in_flight + a.buffered + a.training
        if held >= ahead * buffer.groups_per_step + buffer.oversample:
            return "stragglers" if a.buffered + a.training < buffer.groups_per_step else "trainer"
        return "trainer" if a.buffered >= buffer.capacity else "stragglers"

    def _result(self) -> Result:
        counts = self.router.counts()
        new = [
            (e.tokens - t, e.busy_s - b, e.batch_s - n)
            for e in self.fleet
            for t, b, n in [self._start.get(e.name, (0, 0.0, 0.0))]
        ]
        busy = sum(b for _, b, _ in new)
        return Result(
            steps=tuple(self.stepped),
            seconds=asyncio.get_running_loop().time() - self._began,
            engines=len(self.fleet),
            trainer_s=dict(self.busy.seconds),
            engine_s=dict(self.idle.seconds),
            tokens=sum(t for t, _, _ in new),
            hit_rate=counts["cached_tokens"] / max(1.0, counts["prompt_tokens"]),
            batch=sum(n for _, _, n in new) / busy if busy else 0.0,
            turns=int(counts["completed"]),
            started=self.buffer.accounts.started,
            dropped=dict(self.buffer.accounts.dropped),
            evaluations=tuple(self.outside.evaluated),
            timeline=self.timeline,
        )


def build(
    stage: Any, registry: Any, keys: Keys, *, outside: Outside | None = None, **how: Any
) -> Simulation:
    """The simulation of one stage of a plan: selector and evaluator are the chosen ones. Raises
    `ConfigError` when they cannot be used without a run."""
    made = Simulation(name=stage.name, settings=stage.settings, keys=keys, outside=outside, **how)
    context = Context(
        directory=Path("/nonexistent/simulation"),
        seed=stage.settings.seed,
        settings=stage.settings,
        filters=registry.filters(),
        environment=made.environment,
    )
    try:
        made.selector = registry.build(stage.specs["selector"], context)
        if (evaluator := stage.specs["evaluator"]) is not None:
            made.evaluator = registry.build(evaluator, context)
    except OSError as error:
        raise ConfigError(
            f"stage {stage.name}: selector or evaluator needs a run's directory: {error}"
        ) from error
    return made
