"""Many simulations of one experiment: sweeps over the schedule, and which assumption matters.

Each is a simulation of its own from the same seed; which is best, and why, is said in words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from miles.check import setting_faults
from miles.errors import ConfigError, MilesError, RunError, choices
from miles.settings import Settings
from miles.simulate.keys import Keys
from miles.simulate.result import Result
from miles.simulate.watching import BUSY

__all__ = ["AXES", "Case", "Outcome", "axis_values", "best", "sensitivity", "sweep", "why"]

_TIE = 0.02  # step times closer than this are the same
_SECTIONS = ("engine", "trainer", "publish", "environment")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is simulated."""

    settings: Settings
    """The loop's keys."""
    keys: Keys
    """The models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One simulation of many."""

    words: str
    """What differs from the base; `base` for that."""
    case: Case
    """What was simulated."""
    result: Result | None
    """None when it failed."""
    failure: str = ""
    """Why it failed."""


Play = Callable[[Case], Result]


def _split(case: Case, value: Any) -> Case:
    keys = case.keys
    whole = keys.trainer.gpus + keys.engine.gpus
    trainer, engine = int(value), whole - int(value)
    if trainer < keys.trainer.least_gpus or engine < keys.engine.gpus_per_engine:
        raise ConfigError(
            f"split={value}: of {whole} GPUs the trainer needs at least {keys.trainer.least_gpus} "
            f"and one engine {keys.engine.gpus_per_engine}"
        )
    made = replace(
        keys,
        trainer=replace(keys.trainer, gpus=trainer),
        engine=replace(keys.engine, gpus=engine),
    )
    return replace(case, keys=made)


def _setting(name: str, kind: type) -> Callable[[Case, Any], Case]:
    def change(case: Case, value: Any) -> Case:
        return replace(case, settings=replace(case.settings, **{name: kind(value)}))

    return change


AXES: Mapping[str, Callable[[Case, Any], Case]] = {
    "split": _split,
    "concurrency": _setting("concurrency", int),
    "max_lag": _setting("max_lag", int),
    "granularity": _setting("granularity", str),
}
"""What can be swept; the value of `split` is the trainer's GPUs, the engines get the others."""


def axis_values(name: str, case: Case) -> Sequence[Any]:
    """Values that are tried when none are given."""
    settings, keys = case.settings, case.keys
    if name == "concurrency":
        least = settings.samples_per_group
        c = settings.concurrency
        return sorted({max(least, c // 2), c, c * 3 // 2, c * 2, c * 4})
    if name == "max_lag":
        return sorted({0, 1, 2, 4, settings.max_lag})
    if name == "granularity":
        return ("sample", "group")
    whole = keys.trainer.gpus + keys.engine.gpus
    unit = keys.engine.gpus_per_engine * (
        keys.trainer.least_gpus // gcd(keys.trainer.least_gpus, keys.engine.gpus_per_engine)
        if keys.trainer.least_gpus < keys.engine.gpus_per_engine
        else 1
    )
    last = whole - keys.engine.gpus_per_engine
    found = [
        whole - n for n in range(unit, whole, unit) if keys.trainer.least_gpus <= whole - n <= last
    ]
    step = max(1, len(found) // 8)
    return sorted({*found[::step], keys.trainer.gpus})


def sweep(base: Case, axes: Mapping[str, Sequence[Any]], play: Play) -> Iterator[Outcome]:
    """The base, every value of every axis alone, and the best of each together.

    Raises `ConfigError` for an axis that there is not.
    """
    for name in axes:
        if name not in AXES:
            raise ConfigError(f"--sweep: there is no axis {name!r}; {choices(name, AXES)}")
    first = _outcome("base", base, play)
    yield first
    together, words = base, []
    for name, values in axes.items():
        tried = [first]
        for value in values:
            try:
                case = AXES[name](base, value)
            except ConfigError as error:
                tried.append(
                    Outcome(words=f"{name}={value}", case=base, result=None, failure=str(error))
                )
                yield tried[-1]
                continue
            if case != base:
                tried.append(_outcome(f"{name}={value}", case, play))
                yield tried[-1]
        winner = best(tried)
        if winner is not None and winner is not first:
            together = AXES[name](together, winner.words.partition("=")[2])
            words.append(winner.words)
    if len(words) > 1:
        yield _outcome(" ".join(words), together, play)


def _outcome(words: str, case: Case, play: Play) -> Outcome:
    if faults := list(setting_faults(case.settings)):
        return Outcome(words=words, case=case, result=None, failure="; ".join(faults))
    try:
        return Outcome(words=words, case=case, result=play(case))
    except RunError as error:
        return Outcome(words=words, case=case, result=None, failure=error.detail)


def best(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The shortest mean step, as the most steps an hour; of those within 2 %, the one with the
    least lag, then with the fewest in flight, then the earliest."""
    good = [o for o in outcomes if o.result is not None]
    if not good:
        return None
    shortest = min(o.result.mean_s for o in good if o.result)
    close = [o for o in good if o.result and o.result.mean_s <= shortest * (1 + _TIE)]
    return min(close, key=lambda o: (o.case.settings.max_lag, o.case.settings.concurrency))


def why(winner: Outcome, base: Outcome) -> str:
    """In words: what the winner wastes less of than the base."""
    if winner.result is None or base.result is None or winner is base:
        return "no other value makes 2 % more steps an hour"
    before, after = base.result, winner.result
    found = []
    for side in ("trainer", "engine"):
        old, new = before.shares(side), after.shares(side)
        for cause in {*old, *new}:
            was, now = old.get(cause, 0.0), new.get(cause, 0.0)
            found.append((abs(now - was), f"{side} {cause} {was:.0%} → {now:.0%}"))
    found.append(
        (
            abs(after.batch / max(before.batch, 0.1) - 1) / 4,
            _change("requests at once in a busy engine", before.batch, after.batch),
        )
    )
    lost = [sum(r.dropped.values()) / max(1, r.started) for r in (before, after)]
    found.append((abs(lost[1] - lost[0]), f"groups dropped {lost[0]:.0%} → {lost[1]:.0%}"))
    ranked = sorted(((size, words) for size, words in found if size >= 0.01), reverse=True)
    said = "; ".join(words for _, words in ranked[:4]) or "by many small differences"
    return f"{before.mean_s / after.mean_s:.2f} times as many steps an hour as the base: {said}"


def _change(what: str, was: float, now: float) -> str:
    return f"{was:.1f} → {now:.1f} {what}"


def sensitivity(
    base: Case, factor: float, play: Play
) -> Iterator[tuple[str, float, Mapping[str, Result | str]]]:
    """Every number of the models, with its value, and the results of it divided and multiplied by
    `factor`; what cannot be is told in words instead."""
    for path, value in _numbers(base.keys):
        found: dict[str, Result | str] = {}
        for words, changed in (("/", value / factor), ("*", value * factor)):
            try:
                keys = _with(base.keys, path, type(value)(changed))
                found[words] = play(replace(base, keys=keys))
            except (ValueError, MilesError) as error:
                found[words] = str(error)
        yield ".".join(path), value, found


_FIXED = {"gpus", "gpus_per_engine", "least_gpus", "low", "high", "tasks", "heldout", "page_tokens"}
"""Sizes of the machine and limits, which are no assumptions about speed."""


def _numbers(keys: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for field in dataclasses.fields(keys):
        value, here = getattr(keys, field.name), (*path, field.name)
        if dataclasses.is_dataclass(value):
            if path or field.name in _SECTIONS:
                yield from _numbers(value, here)
        elif type(value) in (int, float) and value and field.name not in _FIXED:
            yield here, value


def _with(keys: Any, path: Sequence[str], value: Any) -> Any:
    head, *rest = path
    return replace(keys, **{head: _with(getattr(keys, head), rest, value) if rest else value})


def idle(result: Result, side: str) -> float:
    """Share of a side's time that it is not busy."""
    return 1 - result.shares(side).get(BUSY, 0.0)
