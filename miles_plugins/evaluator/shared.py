"""The `shared` evaluator: plays held-out tasks on the engines that training uses.

It starts no engine and moves no weights, and it never scores a mixture of versions.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from miles import (
    Attempt,
    ConfigError,
    Context,
    Drop,
    Group,
    RolloutError,
    Sampling,
    Score,
    Skipped,
    Task,
    Trajectory,
    derive_seed,
)


class Shared:
    """Mean reward on a fixed choice of the environment's held-out tasks, greedy by default.

    Every version sees the same tasks with the same seeds: scores differ by the weights alone.
    The set is skipped, with the reason, when any token was sampled by another version than the
    one asked for, when more than `max_failures` of the attempts failed, or when time ran out.
    Besides the score it reports `stderr` (of the mean, over tasks), `failures`, `length` (sampled
    tokens of a sample), `truncated` (share ended by the length limit), `seconds`, and the
    environment's own metrics under `env/`.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        set: str = "heldout"
        """Name of the set, as in `eval/<set>/score`."""
        tasks: int = 128
        """How many held-out tasks, chosen once by the run's seed; 0 takes all."""
        samples: int = 1
        """Attempts at each task."""
        temperature: float = 0.0
        """Sampling temperature; 0 is greedy."""
        max_new_tokens: int | None = None
        """Tokens one assistant turn may take; None is as in training."""
        concurrency: int = 128
        """Attempts in flight at most."""
        timeout_s: float = 600.0
        """Seconds one evaluation may take."""
        max_failures: float = 0.05
        """Share of the attempts that may fail; failed ones are left out of the mean and counted."""

    def __init__(self, config: Config, context: Context) -> None:
        _check(config)
        self._config = config
        self._seed = context.seed
        self._environment = context.environment
        limit = config.max_new_tokens or context.settings.max_new_tokens
        self._sampling = Sampling(max_new_tokens=limit, temperature=config.temperature)
        self._chosen: list[Task] | None = None

    async def evaluate(self, version: int, attempt: Attempt) -> Sequence[Score | Skipped]:
        """One `Score`, or one `Skipped` with the reason. Bugs in the environment are raised."""
        began = time.monotonic()
        tasks = self._tasks()
        if not tasks:
            return [self._skip("the environment has no held-out tasks")]
        back: list[Group] = []
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._attempt_all(tasks, attempt, back)
        except TimeoutError:
            late = f"{len(back)} of {len(tasks)} tasks were done after {self._config.timeout_s:g} s"
            return [self._skip(late)]
        return [self._judge(version, back, time.monotonic() - began)]

    def _tasks(self) -> list[Task]:
        if self._chosen is None:
            found = self._environment.tasks("heldout")
            count = min(self._config.tasks or len(found), len(found))
            choice = random.Random(derive_seed(self._seed, "evaluate", self._config.set))
            # Sorted, so that neighbours in a lazy or on-disk data set are read in order.
            self._chosen = [found[i] for i in sorted(choice.sample(range(len(found)), count))]
        return self._chosen

    async def _attempt_all(
        self, tasks: Sequence[Task], attempt: Attempt, back: list[Group]
    ) -> None:
        """All tasks, a few at a time; finished groups are appended to `back`."""
        todo = iter(enumerate(tasks))

        async def work() -> None:
            for index, task in todo:
                seed = derive_seed(self._seed, "evaluate", self._config.set, index)
                back.append(await self._one(task, attempt, seed))

        lanes = max(1, self._config.concurrency // self._config.samples)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(lanes, len(tasks))):
                group.create_task(work())

    async def _one(self, task: Task, attempt: Attempt, seed: int) -> Group:
        samples = self._config.samples
        try:
            return await attempt(task, samples=samples, sampling=self._sampling, seed=seed)
        except RolloutError as error:
            drop = Drop(reason=error.reason, detail=error.detail)
            failed = Trajectory(id=task.id, samples=(), failure=drop)
            return Group(id=-1, task=task, trajectories=(failed,) * samples)

    def _judge(self, version: int, groups: Sequence[Group], seconds: float) -> Score | Skipped:
        scored = [[t for t in g.trajectories if _usable(t)] for g in groups]
        failures = Counter(_reason(t) for g in groups for t in g.trajectories if not _usable(t))
        attempts = sum(len(g.trajectories) for g in groups)
        failed = sum(failures.values())
        if failed > self._config.max_failures * attempts or failed == attempts:
            first = next(t.failure for g in groups for t in g.trajectories if not _usable(t))
            reasons = ", ".join(f"{reason} {n}" for reason, n in failures.most_common())
            detail = f" (the first: {first.detail})" if first and first.detail else ""
            return self._skip(f"{failed} of {attempts} attempts failed: {reasons}{detail}")
        flat = [t for per_task in scored for t in per_task]
        others = {s.version for t in flat for x in t.samples for s in x.spans} - {version}
        if others:
            names = ", ".join(map(str, sorted(others)))
            return self._skip(f"tokens of version {names} among those of version {version}")
        means = np.array([np.mean([t.reward for t in x]) for x in scored if x])  # (tasks,) float64
        metrics = {
            "failures": float(failed),
            "length": _mean(int(s.sampled.sum()) for t in flat for s in t.samples),
            "truncated": _mean(s.finish == "length" for t in flat for s in t.samples[-1:]),
            "seconds": seconds,
            **_environment_means(flat),
        }
        if len(means) > 1:
            metrics["stderr"] = float(means.std(ddof=1) / math.sqrt(len(means)))
        return Score(
            set=self._config.set,
            version=version,
            score=float(np.mean([t.reward for t in flat])),
            samples=len(flat),
            metrics=metrics,
        )

    def _skip(self, reason: str) -> Skipped:
        return Skipped(set=self._config.set, reason=reason)


def _check(config: Shared.Config) -> None:
    least = {"tasks": 0, "samples": 1, "temperature": 0, "concurrency": 1, "max_failures": 0}
    for key, low in least.items():
        if getattr(config, key) < low:
            raise ConfigError(f"evaluator shared: {key}: {getattr(config, key)} is below {low}")
    if config.timeout_s <= 0:
        raise ConfigError(f"evaluator shared: timeout_s: {config.timeout_s} is not above 0")
    if config.max_new_tokens is not None and config.max_new_tokens < 1:
        raise ConfigError(f"evaluator shared: max_new_tokens: {config.max_new_tokens} is below 1")
    if not config.set or "/" in config.set:
        raise ConfigError(f"evaluator shared: set: {config.set!r} is empty or contains '/'")


def _usable(trajectory: Trajectory) -> bool:
    return trajectory.failure is None and math.isfinite(trajectory.reward)


def _reason(trajectory: Trajectory) -> str:
    return trajectory.failure.reason if trajectory.failure is not None else "bad_reward"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else 0.0


def _environment_means(trajectories: Iterable[Trajectory]) -> Mapping[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values[f"env/{name}"].append(value)
    return {name: float(np.mean(found)) for name, found in values.items()}
