"""Distributions of lengths, turns and delays: named ones, numbers of a file, a recorded run's
metrics.

A draw is a function of the `random.Random` that it is given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from miles.errors import ConfigError, choices

__all__ = ["Distribution", "Draw", "draw", "numbers"]

Draw = Callable[[Random], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """One random quantity."""

    kind: Literal[
        "constant", "uniform", "normal", "lognormal", "exponential", "gamma", "geometric", "file"
    ] = "constant"
    """Its family; `file` draws from the numbers that `path` holds."""
    mean: float = 0.0
    """Its mean, before it is kept between `low` and `high`."""
    spread: float = 0.0
    """sigma of the logarithm (lognormal), standard deviation (normal), half width (uniform), or
    coefficient of variation (gamma)."""
    low: float = 0.0
    """A draw below it becomes it."""
    high: float = 0.0
    """A draw above it becomes it; 0 is no limit."""
    path: str = ""
    """For `file`: one number a line, JSON Lines with `column` in each, or a run's directory, whose
    metric `column` is taken of every step."""
    column: str = ""
    """For `file`: name of the value or metric."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.mean) or self.mean < 0 or self.spread < 0:
            raise ValueError(
                f"mean is {self.mean} and spread {self.spread}; neither may be below 0"
            )
        if 0 < self.high < self.low:
            raise ValueError(f"high ({self.high}) is below low ({self.low})")
        if (self.kind == "file") != bool(self.path):
            raise ValueError("kind=file and path go together: give both or neither")
        if self.kind in ("lognormal", "exponential", "gamma", "geometric") and not self.mean > 0:
            raise ValueError(f"{self.kind} needs a mean above 0; it is {self.mean}")


def draw(what: Distribution) -> Draw:
    """How to draw from it. Raises `ConfigError` for a file that cannot be used."""
    made = _family(what)
    low, high = what.low, what.high or math.inf
    if what.kind == "lognormal":  # by far the most frequent
        location, spread, exp = math.log(what.mean) - what.spread**2 / 2, what.spread, math.exp

        def lognormal(rng: Random) -> float:
            value = exp(rng.gauss(location, spread))
            return low if value < low else high if value > high else value

        return lognormal
    if what.kind == "constant":
        fixed = min(max(what.mean, low), high)
        return lambda rng: fixed

    def clamped(rng: Random) -> float:
        value = made(rng)
        return low if value < low else high if value > high else value

    return clamped


def _family(what: Distribution) -> Draw:
    mean, spread = what.mean, what.spread
    if what.kind == "uniform":
        return lambda rng: rng.uniform(mean - spread, mean + spread)
    if what.kind == "normal":
        return lambda rng: rng.gauss(mean, spread)
    if what.kind == "exponential":
        return lambda rng: rng.expovariate(1 / mean)
    if what.kind == "gamma" and spread:
        shape = 1 / (spread * spread)
        return lambda rng: rng.gammavariate(shape, mean / shape)
    if what.kind == "geometric" and mean > 1:
        scale = 1 / math.log1p(-1 / mean)
        return lambda rng: 1 + math.floor(math.log1p(-rng.random()) * scale)
    if what.kind == "file":
        held = numbers(Path(what.path).expanduser(), what.column)
        return lambda rng: held[int(rng.random() * len(held))]
    return lambda rng: mean


def numbers(path: Path, column: str) -> list[float]:
    """The numbers of a file, or of every step of a run. Raises `ConfigError`."""
    if path.is_dir():
        return _of_run(path, column)
    try:
        found = list(_of_lines(path, column))
    except OSError as error:
        raise ConfigError(f"simulate: {path} cannot be read: {error.strerror}") from error
    if not found:
        raise ConfigError(f"simulate: {path} holds no numbers{f' in {column!r}' * bool(column)}")
    return found


def _of_run(path: Path, column: str) -> list[float]:
    from miles.records.record import read

    steps = read(path).steps
    found = [float(s[column]) for s in steps if isinstance(s.get(column), int | float)]
    if not found:
        known = sorted({k for s in steps for k, v in s.items() if isinstance(v, int | float)})
        raise ConfigError(
            f"simulate: no step of the run {path} has metric {column!r}; {choices(column, known)}"
        )
    return found


def _of_lines(path: Path, column: str) -> Iterator[float]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            yield float(value[column] if column else value)
        except (ValueError, TypeError, LookupError):
            what = f"an object with a number {column!r}" if column else "a number"
            raise ConfigError(f"simulate: {path}:{number} is not {what}: {line[:60]!r}") from None
