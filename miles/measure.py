"""One flat dictionary of numbers a step, from its groups, its update, the accounts and the clocks.

Names and units are listed in `miles.metrics`; nothing is averaged over steps here.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from miles.batch import Batch, Update
from miles.buffer import Buffer
from miles.types import Group

__all__ = ["Measure"]


class Measure:
    """Clocks and counters between two steps."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._step_began = time.perf_counter()
        self._dropped: Counter[str] = Counter()
        self._started = 0
        self._rollouts: Mapping[str, float] = {}
        self._eval_lags: list[int] = []
        self._health: Mapping[str, float] = {}
        self._health_before: Mapping[str, float] = {}

    def begin(self) -> None:
        """The first step begins: what went before (starting processes, the first publish and
        evaluation) is no step's."""
        self._seconds.clear()
        self._step_began = time.perf_counter()
        self._health_before = self._health

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Add the time spent inside to `time/<what>_s` of the step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - began

    def engine_health(self, health: Mapping[str, float]) -> None:
        """Counters of the engine since its start, read once a step."""
        self._health = health

    def evaluated(self, lag: int) -> None:
        """A score came in, `lag` trainer steps after the step that it is of."""
        self._eval_lags.append(lag)

    def rollouts(self, metrics: Mapping[str, float]) -> None:
        """Counts of sessions and routers since the last time, read once a step."""
        self._rollouts = metrics

    def step(
        self,
        *,
        step: int,
        stage: str,
        groups: Sequence[Group],
        batch: Batch,
        update: Update,
        buffer: Buffer,
    ) -> dict[str, float | int | str]:
        """The metrics of the step that just ended; clocks start again."""
        now = time.perf_counter()
        whole, self._step_began = now - self._step_began, now
        rewards = np.array(
            [t.reward for g in groups for t in g.trajectories]
        )  # (trajectories,) f64
        lags = buffer.lags
        sampled = batch.tokens.sampled
        starts = np.count_nonzero(sampled[1:] & ~sampled[:-1]) + int(sampled[0])
        known = {k: self._seconds.pop(k, 0.0) for k in ("wait", "train", "publish", "eval_wait")}
        accounts = buffer.accounts
        dropped = accounts.dropped - self._dropped
        result: dict[str, float | int | str] = {
            "step": step,
            "stage": stage,
            "version": buffer.published_version,
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "groups/started": accounts.started - self._started,
            "groups/trained": len(groups),
            "groups/in_flight": accounts.in_flight,
            "groups/buffered": accounts.buffered,
            **{f"groups/dropped/{reason}": n for reason, n in dropped.items()},
            "staleness/mean": float(np.mean(lags)) if lags else 0.0,
            "staleness/max": max(lags, default=0),
            "tokens/trained": int(np.count_nonzero(batch.tokens.trainable)),
            "tokens/sampled": int(np.count_nonzero(sampled)),
            "length/mean": float(batch.tokens.lengths.mean()),
            "session/turns": starts / len(batch.tokens.lengths),
            **self._rollouts,
            **batch.metrics,
            **update.metrics,
            **_means(groups),
            **{f"time/{name}_s": seconds for name, seconds in known.items()},
            "time/step_s": whole,
            "time/overhead_s": max(0.0, whole - sum(known.values())),
            **self._engine(whole),
        }
        self._started, self._dropped = accounts.started, Counter(accounts.dropped)
        return result

    def _engine(self, seconds: float) -> dict[str, float]:
        if not self._health:
            return {}
        now, before = self._health, self._health_before
        new = {k: now[k] - before.get(k, 0.0) for k in now}
        self._health_before = now
        return {
            "engine/idle_s": max(0.0, seconds - new.get("busy_s", 0.0)),
            "engine/tokens_per_s": new.get("tokens", 0.0) / seconds if seconds else 0.0,
        }


def _means(groups: Sequence[Group]) -> dict[str, float]:
    """Environment metrics, each averaged over the trajectories that report it."""
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for trajectory in group.trajectories:
            for name, value in trajectory.metrics.items():
                values[f"env/{name}"].append(value)
    return {name: float(np.mean(v)) for name, v in values.items()}
