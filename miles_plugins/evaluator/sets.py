"""What every built-in evaluator has in common: sets of tasks, how they are attempted, and what the
attempts come to.

Where they are played is the evaluators' affair, and which version is due the run's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
    version_fault,
)
from miles_plugins.evaluator.intervals import interval, pass_at_k

__all__ = ["Keys", "Plan", "Playing", "Set", "judge", "plans"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Set:
    """One evaluation set; what it leaves out (null) is as the evaluator's own key says."""

    environment: Mapping[str, Any] = field(default_factory=dict)
    """`name` and keys of an environment of its own; empty is the run's."""
    split: Literal["heldout", "train"] = "heldout"
    """Which of the environment's tasks."""
    tasks: int | None = None
    """How many, chosen once by the run's seed; 0 takes all."""
    samples: int | None = None
    """Attempts at each task."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = None
    """Nucleus."""
    top_k: int | None = None
    """Top-k; 0 keeps all."""
    max_new_tokens: int | None = None
    """Tokens one assistant turn may take."""
    pass_k: tuple[int, ...] | None = None
    """For which k to report pass@k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What every built-in evaluator can be told."""

    sets: Mapping[str, Set] = field(default_factory=dict)
    """Several sets by name, each with what differs from the keys below; empty makes one of them."""
    set: str = "heldout"
    """Name of the one set, as in `eval/<set>/score`."""
    tasks: int = 128
    """How many held-out tasks, chosen once by the run's seed; 0 takes all."""
    samples: int = 1
    """Attempts at each task."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus."""
    top_k: int = 0
    """Top-k; 0 keeps all."""
    max_new_tokens: int | None = None
    """Tokens one assistant turn may take; None is as in training."""
    pass_k: tuple[int, ...] = ()
    """For which k to report pass@k, by the unbiased estimator; at most `samples`."""
    passing: float = 1.0
    """Reward from which an attempt counts as passed, for pass@k."""
    concurrency: int = 128
    """Attempts in flight at most."""
    timeout_s: float = 600.0
    """Seconds one evaluation may take, all sets together; a publish waits no longer for it."""
    max_failures: float = 0.05
    """Share of the attempts that may fail; failed ones are left out of the mean and counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One set with everything filled in."""

    name: str
    """As in `eval/<set>/score`."""
    environment: Mapping[str, Any]
    """Empty is the run's."""
    split: Literal["heldout", "train"]
    """Of the environment's tasks."""
    tasks: int
    """0 takes all."""
    samples: int
    """Attempts at each task."""
    sampling: Sampling
    """How tokens are drawn."""
    pass_k: tuple[int, ...]
    """For which k to report pass@k."""


def plans(config: Keys, *, max_new_tokens: int, who: str) -> tuple[Plan, ...]:
    """Every set of a configuration, by name. Raises `ConfigError` saying which key of which set is
    of no use."""
    _check(config, who)
    made = []
    for name, own in (config.sets or {config.set: Set()}).items():

        def chosen(key: str, own: Set = own) -> Any:
            value = getattr(own, key)
            return getattr(config, key) if value is None else value

        at = f"sets.{name}." if config.sets else ""
        limit = chosen("max_new_tokens")
        plan = Plan(
            name=name,
            environment=own.environment,
            split=own.split,
            tasks=chosen("tasks"),
            samples=chosen("samples"),
            sampling=Sampling(
                max_new_tokens=max_new_tokens if limit is None else limit,
                temperature=chosen("temperature"),
                top_p=chosen("top_p"),
                top_k=chosen("top_k"),
            ),
            pass_k=tuple(chosen("pass_k")),
        )
        _check_plan(plan, f"evaluator {who}: {at}")
        made.append(plan)
    return tuple(made)


def _check(config: Keys, who: str) -> None:
    for key, low in {"concurrency": 1, "max_failures": 0}.items():
        if getattr(config, key) < low:
            raise ConfigError(f"evaluator {who}: {key}: {getattr(config, key)} is below {low}")
    if config.timeout_s <= 0:
        raise ConfigError(f"evaluator {who}: timeout_s: {config.timeout_s} is not above 0")
    for name in config.sets or (config.set,):
        if not name or "/" in name:
            key = "sets" if config.sets else "set"
            raise ConfigError(f"evaluator {who}: {key}: {name!r} is empty or contains '/'")


def _check_plan(plan: Plan, at: str) -> None:
    sampling = plan.sampling
    least = (
        ("tasks", plan.tasks, 0),
        ("samples", plan.samples, 1),
        ("temperature", sampling.temperature, 0),
        ("top_k", sampling.top_k, 0),
        ("max_new_tokens", sampling.max_new_tokens, 1),
    )
    for key, value, low in least:
        if value < low:
            raise ConfigError(f"{at}{key}: {value} is below {low}")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"{at}top_p: {sampling.top_p} is not in (0, 1]")
    for k in plan.pass_k:
        if not 1 <= k <= plan.samples:
            raise ConfigError(
                f"{at}pass_k: {k} is not from 1 to samples ({plan.samples}): pass@k needs k "
                "attempts at each task"
            )
    if plan.environment and not isinstance(plan.environment.get("name"), str):
        raise ConfigError(f"{at}environment: name is missing; it says which environment plays")


class Playing:
    """An evaluator that plays its sets, one after the other, by the attempts it is given.

    Every version sees the same tasks with the same seeds: scores differ by the weights alone. A set
    is skipped, with the reason, when any sample was served by another version than the one asked
    for, when too many attempts failed, or when time ran out. Besides the score a set reports `low`
    and `high` (95 % interval of it), `stderr` (of the mean, over tasks), `pass_<k>` with its own
    interval, `failures`, `length` (sampled tokens of a sample), `truncated` (share ended by the
    length limit), `seconds`, and the environment's own metrics under `env/`.
    """

    def __init__(self, config: Any, context: Context) -> None:
        self.config = config
        self.seed = context.seed
        self.timeout_s: float = config.timeout_s
        self.plans = plans(
            config, max_new_tokens=context.settings.max_new_tokens, who=type(self).__name__.lower()
        )
        self._own = context.environment
        self._others = context.environments
        self._chosen: dict[str, list[Task]] = {}

    @classmethod
    def environments(cls, config: Keys) -> Mapping[str, Mapping[str, Any]]:
        """By set, `name` and keys of the environments that are not the run's."""
        return {n: s.environment for n, s in config.sets.items() if s.environment}

    async def evaluate(self, version: int, attempt: Attempt) -> Sequence[Score | Skipped]:
        """One result a set: a `Score`, or a `Skipped` with the reason. A set whose environment
        raises leaves the others alone."""
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        return [await self._evaluate(plan, version, attempt, deadline) for plan in self.plans]

    async def _evaluate(
        self, plan: Plan, version: int, attempt: Attempt, deadline: float
    ) -> Score | Skipped:
        clock = asyncio.get_running_loop().time
        began = clock()
        back: list[Group] = []
        tasks: Sequence[Task] = ()
        try:
            tasks = self.tasks(plan)
            if not tasks:
                return Skipped(set=plan.name, reason=_no_tasks(plan))
            async with asyncio.timeout_at(deadline):
                await self._attempt_all(plan, tasks, attempt, back)
        except TimeoutError:
            late = (
                f"timeout: {len(back)} of {len(tasks)} tasks were done after {self.timeout_s:g} s"
            )
            return Skipped(set=plan.name, reason=late)
        except Exception as error:  # noqa: BLE001 - an environment is other people's code: one set's fault is not the others'
            first = _first(error)  # of a bug, every attempt in flight has a copy
            _log.error("evaluation set %s of version %d", plan.name, version, exc_info=first)
            return Skipped(set=plan.name, reason=f"{type(first).__name__}: {first}")
        return judge(
            plan, version, back, config=self.config, seed=self.seed, seconds=clock() - began
        )

    def tasks(self, plan: Plan) -> list[Task]:
        """Those of a set, chosen once."""
        if plan.name not in self._chosen:
            found = self._others.get(plan.name, self._own).tasks(plan.split)
            count = min(plan.tasks or len(found), len(found))
            choice = random.Random(derive_seed(self.seed, "evaluate", plan.name))
            # Sorted, so that neighbours in a lazy or on-disk data set are read in order.
            places = sorted(choice.sample(range(len(found)), count))
            self._chosen[plan.name] = [found[i] for i in places]
        return self._chosen[plan.name]

    def task_seed(self, plan: Plan, index: int) -> int:
        """What the attempts at one task of a set derive from."""
        return derive_seed(self.seed, "evaluate", plan.name, index)

    async def _attempt_all(
        self, plan: Plan, tasks: Sequence[Task], attempt: Attempt, back: list[Group]
    ) -> None:
        """All tasks, a few at a time; finished groups are appended to `back`."""
        todo = iter(enumerate(tasks))

        async def work() -> None:
            for index, task in todo:
                back.append(await self._one(plan, task, attempt, self.task_seed(plan, index)))

        lanes = max(1, self.config.concurrency // plan.samples)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(lanes, len(tasks))):
                group.create_task(work())

    async def _one(self, plan: Plan, task: Task, attempt: Attempt, seed: int) -> Group:
        try:
            return await attempt(
                task, samples=plan.samples, sampling=plan.sampling, seed=seed, of=plan.name
            )
        except RolloutError as error:
            drop = Drop(reason=error.reason, detail=error.detail)
            failed = Trajectory(id=task.id, samples=(), failure=drop)
            return Group(id=-1, task=task, trajectories=(failed,) * plan.samples)


def judge(
    plan: Plan, version: int, groups: Sequence[Group], *, config: Keys, seed: int, seconds: float
) -> Score | Skipped:
    """What the attempts of a set come to."""
    scored = [[t for t in g.trajectories if _usable(t)] for g in groups]
    failures = Counter(_reason(t) for g in groups for t in g.trajectories if not _usable(t))
    attempts = sum(len(g.trajectories) for g in groups)
    failed = sum(failures.values())
    if failed > config.max_failures * attempts or failed == attempts:
        first = next(t.failure for g in groups for t in g.trajectories if not _usable(t))
        reasons = ", ".join(f"{reason} {n}" for reason, n in failures.most_common())
        detail = f" (the first: {first.detail})" if first and first.detail else ""
        why = f"{failed} of {attempts} attempts failed: {reasons}{detail}"
        return Skipped(set=plan.name, reason=why)
    flat = [t for per_task in scored for t in per_task]
    if fault := version_fault(flat, version):
        return Skipped(set=plan.name, reason=fault)
    rewards = [[t.reward for t in per_task] for per_task in scored if per_task]
    metrics = {
        **summary(rewards, plan, passing=config.passing, seed=seed),
        "failures": float(failed),
        "length": _mean(int(s.sampled.sum()) for t in flat for s in t.samples),
        "truncated": _mean(s.finish == "length" for t in flat for s in t.samples[-1:]),
        "seconds": seconds,
        **_environment_means(flat),
    }
    return Score(
        set=plan.name,
        version=version,
        score=float(np.mean([t.reward for t in flat])),
        samples=len(flat),
        metrics=metrics,
    )


def summary(
    rewards: Sequence[Sequence[float]], plan: Plan, *, passing: float, seed: int
) -> dict[str, float]:
    """Error and 95 % interval of the mean, and pass@k with its interval; `rewards` holds those of
    each task's attempts, at least one. Tasks with fewer than k attempts left count for no pass@k.
    """
    means = np.array([np.mean(each) for each in rewards])  # (tasks,) float64
    low, high = interval(means.tolist(), seed=seed)  # of tasks: attempts at one are not independent
    found = {"low": low, "high": high}
    if len(means) > 1:
        found["stderr"] = float(means.std(ddof=1) / math.sqrt(len(means)))
    for k in plan.pass_k:
        chances = [
            pass_at_k(len(each), sum(r >= passing for r in each), k)
            for each in rewards
            if len(each) >= k
        ]
        if chances:
            low, high = interval(chances, seed=seed)
            found[f"pass_{k}"] = float(np.mean(chances))
            found |= {f"pass_{k}_low": low, f"pass_{k}_high": high}
    return found


def _no_tasks(plan: Plan) -> str:
    kind = "held-out" if plan.split == "heldout" else "training"
    return f"the environment has no {kind} tasks"


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


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
