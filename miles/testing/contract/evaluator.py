"""What every evaluator must do: score one version and say which, or say why not; it never stops a
run.

Whether its sets are good ones is not asked here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from miles.batch import Score, Skipped
from miles.errors import EngineError
from miles.testing.contract.case import Case, expect, inapplicable
from miles.testing.samples import make_group
from miles.types import Drop, Group, Sampling, Task, Trajectory

VERSION = 7


@dataclass(slots=True)
class _Attempt:
    """Plays tasks with made-up groups of a given version, or fails in a given way."""

    version: int = VERSION
    failure: str = ""
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    directory: Path | None = None

    async def __call__(
        self, task: Task, *, samples: int, sampling: Sampling, seed: int, of: str = ""
    ) -> Group:
        self.asked.append((task.id, samples, seed))
        if self.failure == "raises":
            raise EngineError("the engine is gone on purpose")
        rewards = np.random.default_rng(seed % 2**63).integers(0, 2, samples)
        if self.failure == "drops":
            failed = Trajectory(id="t", samples=(), failure=Drop(reason="timeout"))
            return Group(id=0, task=task, trajectories=(failed,) * samples)
        return make_group(0, rewards=rewards.tolist(), versions=(self.version,), task=task)


async def check_scores(case: Case) -> None:
    """It gives one result a set: finite scores of the version it was asked about, with their number
    of attempts."""
    attempt = _Attempt()
    results = await _evaluate(case, attempt)
    sets = [r.set for r in results]
    expect(len(set(sets)) == len(sets) and all(sets), f"the sets are named {sets}")
    scores = [r for r in results if isinstance(r, Score)]
    for score in scores:
        expect(
            score.version == VERSION, f"set {score.set!r}: version {score.version}, not {VERSION}"
        )
        expect(math.isfinite(score.score), f"set {score.set!r}: the score is {score.score}")
        expect(score.samples > 0, f"set {score.set!r}: a score of {score.samples} attempts")
    played = sum(samples for _, samples, _ in attempt.asked)
    counted = sum(score.samples for score in scores)
    expect(
        counted <= played or not _plays(case),
        f"scores count {counted} attempts, {played} were played",
    )


async def check_mean(case: Case) -> None:
    """When every attempt earns the same, that is the score."""
    results = await _evaluate(case, _Same())
    for score in results:
        if isinstance(score, Score):
            close = math.isclose(score.score, 0.25, rel_tol=1e-6)
            expect(
                close, f"set {score.set!r}: every attempt earned 0.25, the score is {score.score}"
            )


async def check_repeats(case: Case) -> None:
    """The same version is asked the same tasks with the same seeds and gets the same scores."""
    one, two = _Attempt(), _Attempt()
    first, second = await _evaluate(case, one), await _evaluate(case, two)
    expect(sorted(one.asked) == sorted(two.asked), "the second time it asked other tasks or seeds")
    results = [[(r.set, getattr(r, "score", None)) for r in each] for each in (first, second)]
    expect(results[0] == results[1], f"the results differ: {results[0]} and {results[1]}")


async def check_other_version(case: Case) -> None:
    """Samples of another version than the one asked about never become a `Score` of it."""
    _only_if_it_plays(case)
    for result in await _evaluate(case, _Attempt(version=VERSION - 1)):
        wrong = isinstance(result, Score) and result.version == VERSION
        expect(
            not wrong, f"set {result.set!r}: samples of version {VERSION - 1} scored as {VERSION}"
        )


async def check_failures(case: Case) -> None:
    """When every attempt fails, raising or dropped, each set is `Skipped` with a reason; nothing is
    raised."""
    _only_if_it_plays(case)
    for failure in ("raises", "drops"):
        results = await _evaluate(case, _Attempt(failure=failure))
        for result in results:
            said = isinstance(result, Skipped) and result.reason.strip()
            expect(said, f"every attempt {failure}, yet set {result.set!r} gave {result}")


class _Same(_Attempt):
    """Every attempt earns 0.25."""

    async def __call__(
        self, task: Task, *, samples: int, sampling: Sampling, seed: int, of: str = ""
    ) -> Group:
        return make_group(0, rewards=(0.25,) * samples, versions=(VERSION,), task=task)


def _plays(case: Case) -> bool:
    return getattr(case.component, "place", "rollout") != "directory"


def _only_if_it_plays(case: Case) -> None:
    if not _plays(case):
        inapplicable("it is handed a directory and plays no attempts")


async def _evaluate(case: Case, attempt: _Attempt) -> Sequence[Any]:
    attempt.directory = case.folder("checkpoint")
    results = await case.build().evaluate(VERSION, attempt)
    for result in results:
        good = isinstance(result, Score | Skipped)
        expect(good, f"evaluate gave a {type(result).__name__}, not a Score or Skipped")
    expect(results, "evaluate gave nothing, not even a Skipped")
    return results  # type: ignore[no-any-return]
