"""What a simulation found: its steps as numbers, and the words that a person reads.

It computes medians and shares; nothing is simulated here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from miles.simulate.watching import BUSY, Timeline

__all__ = ["Result", "Step", "lines", "quantile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One trainer step."""

    seconds: float
    """From the end of the step before."""
    wait_s: float
    """Of those, waiting for groups."""
    train_s: float
    """Of those, in the trainer."""
    lags: tuple[int, ...]
    """Staleness of its groups as they were taken."""
    trained: int
    """Tokens of its samples, prompts and observations included."""
    sampled: int
    """Of those, sampled by engines."""
    buffered: int
    """Groups that waited in the buffer when it ended."""
    in_flight: int
    """Groups in flight when it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A simulation that ended."""

    steps: tuple[Step, ...]
    """In order."""
    seconds: float
    """Virtual seconds from the first step's beginning to the last one's end."""
    engines: int
    """How many there were."""
    trainer_s: Mapping[str, float]
    """Where the trainer's time went, by cause."""
    engine_s: Mapping[str, float]
    """Where the engines' time went, by cause, added up over them."""
    tokens: int
    """Sampled in all, whatever became of them."""
    hit_rate: float
    """Prompt tokens that the prefix cache had, as a share."""
    batch: float
    """Mean requests that a busy engine ran at once."""
    turns: int
    """Completions."""
    started: int
    """Groups."""
    dropped: Mapping[str, int]
    """Groups, by reason."""
    evaluations: tuple[Mapping[str, object], ...] = ()
    """Scores and skipped ones, as a run logs them."""
    timeline: Timeline = field(default_factory=Timeline)
    """For a picture."""

    @property
    def steady(self) -> Sequence[Step]:
        """Steps without the first tenth, in which buffers fill; all of fewer than ten."""
        return self.steps[len(self.steps) // 10 :] if len(self.steps) >= 10 else self.steps

    @property
    def median_s(self) -> float:
        """Median seconds of a step, the first tenth left out."""
        return median(s.seconds for s in self.steady)

    @property
    def mean_s(self) -> float:
        """Mean seconds of the same: an hour divided by it is the steps that an hour makes."""
        return mean(s.seconds for s in self.steady)

    @property
    def p90_s(self) -> float:
        """The 90th percentile of the same."""
        return quantile([s.seconds for s in self.steady], 0.9)

    @property
    def tokens_per_s(self) -> float:
        """Tokens sampled a second, over everything."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def trained_per_s(self) -> float:
        """Sampled tokens that were trained on a second."""
        whole = sum(s.seconds for s in self.steady)
        return sum(s.sampled for s in self.steady) / whole if whole else 0.0

    def shares(self, side: str) -> dict[str, float]:
        """Causes of `trainer` or `engine` time as shares of it, largest first, busy before all."""
        seconds = self.trainer_s if side == "trainer" else self.engine_s
        whole = self.seconds * (1 if side == "trainer" else self.engines)
        found = {k: v / whole for k, v in seconds.items() if whole and v > 0}
        if side == "trainer" and (rest := 1 - sum(found.values())) > 1e-9:
            found["other"] = rest
        return dict(sorted(found.items(), key=lambda kv: (kv[0] != BUSY, -kv[1])))


def quantile(values: Sequence[float], share: float) -> float:
    """By linear interpolation between the sorted values."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def lines(result: Result) -> list[str]:
    """The result, for people."""
    steady = result.steady
    lags = [lag for s in steady for lag in s.lags]
    wait, train = (mean(getattr(s, name) for s in steady) for name in ("wait_s", "train_s"))
    counted = ", ".join(f"{n} {lag}" for lag, n in _histogram(lags)) or "none"
    dropped = ", ".join(f"{why} {n}" for why, n in sorted(result.dropped.items())) or "none"
    found = [
        f"step time        median {result.median_s:.1f} s, mean {result.mean_s:.1f} s, 90th "
        f"percentile {result.p90_s:.1f} s "
        f"({len(result.steps)} steps, {result.seconds / 3600:.2f} h)",
        f"of a step        {train:.1f} s training, {wait:.1f} s waiting for groups, on average",
        f"trainer          {_shared(result.shares('trainer'))}",
        f"engines ({result.engines})".ljust(17) + _shared(result.shares("engine")),
        f"tokens           {result.tokens_per_s:,.0f} sampled/s, of which "
        f"{result.trained_per_s:,.0f}/s are trained on; {result.batch:.1f} requests at once in a "
        "busy engine",
        f"prefix cache     {result.hit_rate:.1%} of prompt tokens",
        f"staleness        mean {mean(lags) if lags else 0:.2f}, max {max(lags, default=0)} "
        f"(groups by lag: {counted})",
        f"buffer           {mean(s.buffered for s in steady):.1f} groups waiting and "
        f"{mean(s.in_flight for s in steady):.1f} in flight at the end of a step",
        f"groups           {result.started} started; dropped: {dropped}",
    ]
    for one in result.evaluations:
        said = f"skipped: {one['skipped']}" if "skipped" in one else f"{one.get('score', 0):.3f}"
        late = f" ({lag} steps later)" if (lag := one.get("lag_steps")) else ""
        found.append(f"evaluation       step {one['step']}, {one.get('set')}: {said}{late}")
    return found


def _shared(shares: Mapping[str, float]) -> str:
    busy = shares.get(BUSY, 0.0)
    idle = ", ".join(f"{why} {share:.1%}" for why, share in shares.items() if why != BUSY)
    return f"busy {busy:.1%}; idle: {idle or 'never'}"


def _histogram(values: Sequence[int]) -> list[tuple[str, int]]:
    return [(f"at {v}", values.count(v)) for v in sorted(set(values))]
