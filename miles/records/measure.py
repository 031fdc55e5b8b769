"""One flat dictionary of numbers a step, from its groups, its update, the accounts and the clocks.

Names and units are listed in `miles.metrics`; nothing is averaged over steps here.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles.batch import Batch, Update
from miles.buffer import Buffer
from miles.errors import RunError
from miles.types import Group

__all__ = ["Measure"]

_CLOCKS = ("wait", "train", "publish", "eval_wait")
_SILENT_STEPS = 10
_inside: ContextVar[list[float] | None] = ContextVar("inside", default=None)


class Measure:
    """Clocks and counters between two steps."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._step_began = time.perf_counter()
        self._dropped: Counter[str] = Counter()
        self._started = 0
        self._retried = 0
        self._trained = _Lengths()
        self._returned = _Lengths()
        self._back: dict[int, _Lengths] = {}  # groups that came back and have no fate yet
        self._held_s = 0.0  # that the buffer told of
        self._silent = 0  # steps since groups differed
        self._silence_told = _SILENT_STEPS
        self._attempts = self._truncated = 0  # since then
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
        """Add the time spent inside to `time/<what>_s` of the step, less what is timed within."""
        around, within = _inside.get(), [0.0]
        token, began = _inside.set(within), time.perf_counter()
        try:
            yield
        finally:
            _inside.reset(token)
            spent = time.perf_counter() - began
            self._seconds[what] += spent - within[0]
            if around is not None:
                around[0] += spent

    def came_back(self, group: Group) -> None:
        """A group is back, whatever becomes of it."""
        self._back[group.id] = lengths = _lengths(group)
        self._returned.add(lengths)

    def ended(self, fates: Iterable[tuple[int, str]]) -> None:
        """(group id, "trained" or the drop's reason) of groups that were given their fate."""
        for group, fate in fates:
            lengths = self._back.pop(group, None)
            if lengths is not None and fate == "trained":
                self._trained.add(lengths)

    def lengths(self) -> dict[str, list[int]]:
        """What `length/trained` and `length/returned` are means of, (tokens, trajectories), for
        `go_on`: without groups that have no fate yet, which a resumed run plays again."""
        returned = _Lengths(self._returned.tokens, self._returned.trajectories)
        for lengths in self._back.values():
            returned.add(lengths, times=-1)
        each = {"trained": self._trained, "returned": returned}
        return {name: [one.tokens, one.trajectories] for name, one in each.items()}

    def go_on(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """Go on from `lengths` of the run that is resumed."""
        for name, one in (("trained", self._trained), ("returned", self._returned)):
            one.tokens, one.trajectories = lengths.get(name, (0, 0))

    def no_signal(self, groups: Sequence[Group]) -> list[str]:
        """A sentence when the groups of many steps in a row, of which this is one more, taught
        nothing by comparison. Said after 10 such steps, 20, 40, and so on."""
        several = [g for g in groups if len(g.trajectories) > 1]
        equal = [g for g in several if len({t.reward for t in g.trajectories}) == 1]
        if not several or len(equal) < len(several):
            self._silent, self._silence_told = 0, _SILENT_STEPS
            self._attempts = self._truncated = 0
            return []
        self._attempts += sum(len(g.trajectories) for g in groups)
        self._truncated += sum(g.truncated for g in groups)
        self._silent += 1
        if self._silent < self._silence_told:
            return []
        self._silence_told *= 2
        last, cut = groups[0].trajectories[0].reward, self._truncated / self._attempts
        return [
            f"no signal: in {self._silent} steps every group's attempts had equal rewards (zero "
            f"variance 100 %; the last {last:g}); {cut:.0%} of the attempts were truncated by a "
            "length limit"
        ]

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
        """The metrics of the step that just ended; clocks start again.

        Raises `RunError` when the buffer's accounts do not add up to the groups that were started.
        """
        _check(buffer, step)
        now = time.perf_counter()
        whole, self._step_began = now - self._step_began, now
        rewards = np.array(
            [t.reward for g in groups for t in g.trajectories]
        )  # (trajectories,) f64
        sampled = batch.tokens.sampled
        starts = np.count_nonzero(sampled[1:] & ~sampled[:-1]) + int(sampled[0])
        result: dict[str, float | int | str] = {
            "step": step,
            "stage": stage,
            "version": buffer.published_version,
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            **self._fates(len(groups), buffer),
            **_freshness(batch, update.version - 1, buffer),
            "tokens/trained": int(np.count_nonzero(batch.tokens.trainable)),
            "tokens/sampled": int(np.count_nonzero(sampled)),
            "length/mean": float(batch.tokens.lengths.mean()),
            **self._means_of_lengths(),
            "samples/truncated": sum(g.truncated for g in groups) / len(rewards),
            "session/turns": starts / len(batch.tokens.lengths),
            **self._rollouts,
            **batch.metrics,
            **update.metrics,
            **_means(groups),
            **self._times(whole, buffer),
            **self._engine(whole),
        }
        if self._eval_lags:
            result["eval/lag_steps"] = max(self._eval_lags)
            self._eval_lags.clear()
        return result

    def so_far(self, step: Callable[[Measure], Mapping[str, Any]]) -> dict[str, Any]:
        """What `step` would tell by now, as plain values; the step goes on. Raises as `step`."""
        found = step(copy.deepcopy(self))
        return {k: v.item() if hasattr(v, "item") else v for k, v in found.items()}

    def _fates(self, trained: int, buffer: Buffer) -> dict[str, float | int | str]:
        """What became of groups, and of the attempts that they are made of, since the last step;
        and how many are under way."""
        accounts, each = buffer.accounts, buffer.samples_per_group
        groups = {
            "started": accounts.started - self._started,
            "trained": trained,
            "retried": accounts.retried - self._retried,
            "in_flight": accounts.in_flight,
            "buffered": accounts.buffered,
            **{f"dropped/{k}": n for k, n in (accounts.dropped - self._dropped).items()},
        }
        self._started, self._dropped = accounts.started, Counter(accounts.dropped)
        self._retried = accounts.retried
        return {
            **{f"groups/{name}": n for name, n in groups.items()},
            **{f"samples/{name}": n * each for name, n in groups.items()},
            "samples/running": buffer.running,
        }

    def _means_of_lengths(self) -> dict[str, float]:
        trained, returned = self._trained.mean, self._returned.mean
        if not trained or not returned:
            return {}
        return {
            "length/trained": trained,
            "length/returned": returned,
            "length/bias": trained / returned - 1,
        }

    def _times(self, whole: float, buffer: Buffer) -> dict[str, float]:
        known = {k: self._seconds.pop(k, 0.0) for k in _CLOCKS}
        held_s, before = buffer.held_s(), self._held_s
        self._held_s = held_s
        held = min(known["wait"], held_s - before)  # by an evaluation, or nobody would wait
        known["wait"] -= held
        known["eval_wait"] += held
        return {
            **{f"time/{name}_s": seconds for name, seconds in known.items()},
            "time/step_s": whole,
            "time/overhead_s": max(0.0, whole - sum(known.values())),
        }

    def _engine(self, seconds: float) -> dict[str, float]:
        if not self._health:
            return {}
        now, before = self._health, self._health_before
        # an engine that was started again counts from 0
        new = {k: max(0.0, now[k] - before.get(k, 0.0)) for k in now}
        self._health_before = now
        busy = new.get("busy_s", 0.0) / now.get("engines", 1)
        drafted = new.get("drafted", 0.0)  # by engines that decode speculatively
        accepted = {"engine/accept_rate": new.get("accepted", 0.0) / drafted} if drafted else {}
        return {
            "engine/idle_s": max(0.0, seconds - busy),
            "engine/tokens_per_s": new.get("tokens", 0.0) / seconds if seconds else 0.0,
            **accepted,
        }


@dataclass(slots=True)
class _Lengths:
    """Sampled tokens of trajectories, added up."""

    tokens: int = 0
    trajectories: int = 0

    def add(self, more: _Lengths, times: int = 1) -> None:
        """So many times `more`."""
        self.tokens += times * more.tokens
        self.trajectories += times * more.trajectories

    @property
    def mean(self) -> float:
        """Tokens a trajectory; 0 without any."""
        return self.tokens / self.trajectories if self.trajectories else 0.0


def _lengths(group: Group) -> _Lengths:
    """Of a group's trajectories that have samples."""
    played = [t for t in group.trajectories if t.samples]
    spans = (span for t in played for sample in t.samples for span in sample.spans)
    return _Lengths(sum(span.stop - span.start for span in spans), len(played))


def _check(buffer: Buffer, step: int) -> None:
    accounts = buffer.accounts
    if not accounts.balanced:
        raise RunError(f"step {step}: the accounts of groups do not add up: {accounts}")
    oldest = max(buffer.lags, default=0)
    if oldest > buffer.max_lag:
        raise RunError(
            f"step {step}: a trained group was {oldest} versions old; max_lag is {buffer.max_lag}"
        )


def _freshness(batch: Batch, version: int, buffer: Buffer) -> dict[str, float]:
    """How old what was trained is, by group and by token, and what waits; `version` is that of the
    weights that the step began with."""
    lags, tokens = buffer.lags, batch.tokens
    trained = version - tokens.versions[tokens.trainable]  # (trained,) int32
    waiting = buffer.queue()
    ages, older = [age for age, _ in waiting], [lag for _, lag in waiting]
    return {
        "staleness/mean": _mean(lags),
        "staleness/max": max(lags, default=0),
        **{f"staleness/lag_{lag}": n for lag, n in sorted(Counter(lags).items())},
        **{f"tokens/lag_{lag}": int(n) for lag, n in enumerate(np.bincount(trained)) if n},
        "staleness/waiting_mean": _mean(older),
        "staleness/waiting_max": max(older, default=0),
        **{f"staleness/waiting_lag_{lag}": n for lag, n in sorted(Counter(older).items())},
        "buffer/age_mean_s": _mean(ages),
        "buffer/age_max_s": max(ages, default=0.0),
    }


def _means(groups: Sequence[Group]) -> dict[str, float]:
    """Environment metrics, each averaged over the trajectories that report it."""
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for trajectory in group.trajectories:
            for name, value in trajectory.metrics.items():
                values[f"env/{name}"].append(value)
    return {name: _mean(v) for name, v in values.items()}


def _mean(values: Sequence[float]) -> float:
    """0 without any."""
    return sum(values) / len(values) if values else 0.0
