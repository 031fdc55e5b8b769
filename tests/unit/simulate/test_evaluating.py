"""Evaluators of every place in virtual time: the run's own evaluations decide, engines and commands
are modelled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import parts
import pytest

from miles import Context
from miles.simulate import clock
from miles.simulate.distributions import Distribution
from miles.simulate.keys import EvaluationKeys
from miles.simulate.result import Result
from miles.simulate.simulation import Simulation
from miles_plugins.evaluator.external import External
from miles_plugins.evaluator.fleet import Fleet


def made(evaluator: Any, config: Any, *, evaluation: Any = (), **changes: Any) -> Simulation:
    models = dataclasses.replace(parts.keys(), evaluation=EvaluationKeys(**dict(evaluation)))
    chosen = parts.simulation(models, max_lag=2, eval_every=2, **changes)
    context = Context(
        directory=Path("/nonexistent"), seed=0, settings=chosen.settings,
        environment=chosen.environment,
    )  # fmt: skip
    chosen.evaluator = evaluator(config, context)
    return chosen


def scores(result: Result) -> dict[int, Any]:
    """By step: (score, steps later), or the reason why it was skipped."""
    return {
        int(str(one["step"])): one.get("skipped") or (one["score"], one["lag_steps"])
        for one in result.evaluations
    }


def test_fleet_scores_beside_the_training_at_its_own_step() -> None:
    config = Fleet.Config(tasks=8, samples=2, workers=2, snapshots=4)
    result = clock.run(made(Fleet, config, evaluation={"load_s": 100.0}).main(), limit_s=1e6)
    found = scores(result)
    assert sorted(found) == [0, 2, 4, 6]
    assert all(not isinstance(one, str) and 0 <= one[0] <= 1 for one in found.values())
    assert found[2][1] > 0  # loading alone takes longer than a step
    assert found[6][1] == 0  # the last is waited for


def test_fleet_holds_training_up_only_for_the_snapshot() -> None:
    config = Fleet.Config(tasks=8, snapshots=4)
    alone = clock.run(parts.simulation(max_lag=2).main(), limit_s=1e6)
    beside = clock.run(
        made(Fleet, config, evaluation={"snapshot_s": 5.0, "load_s": 10.0}).main(), limit_s=1e6
    )
    first = alone.seconds, beside.seconds
    before = sum(s.seconds for s in alone.steps), sum(s.seconds for s in beside.steps)
    assert 0 < before[1] - before[0] < 3 * 5.0 + 30.0, first
    assert beside.trainer_s["eval_wait"] >= 2 * 5.0


def test_fleet_with_no_snapshot_free_skips_or_waits() -> None:
    slow = {"load_s": 500.0}
    skipping = made(Fleet, Fleet.Config(tasks=4, snapshots=1), evaluation=slow)
    found = scores(clock.run(skipping.main(), limit_s=1e6))
    assert "overflow: snapshots is 1" in found[2] and not isinstance(found[6], str)
    waiting = made(Fleet, Fleet.Config(tasks=4, snapshots=1, overflow="wait"), evaluation=slow)
    result = clock.run(waiting.main(), limit_s=1e6)
    assert not any(isinstance(one, str) for one in scores(result).values())
    assert result.trainer_s["eval_wait"] > 500.0


@pytest.mark.parametrize(("seconds", "limit"), [(200.0, 600.0), (700.0, 600.0)])
def test_external_command_takes_its_time_or_is_skipped(seconds: float, limit: float) -> None:
    config = External.Config(command="score {scores}", snapshots=8, timeout_s=limit)
    evaluation = {"command_s": Distribution(mean=seconds)}
    result = clock.run(made(External, config, evaluation=evaluation).main(), limit_s=1e6)
    found = scores(result)
    assert sorted(found) == [0, 2, 4, 6]
    for one in found.values():
        if seconds > limit:
            assert one == "timeout: the command was not done after 600 s"
        else:
            assert 0 <= one[0] <= 1


def test_evaluating_is_a_function_of_the_seed() -> None:
    def play() -> Any:
        config = Fleet.Config(tasks=8, snapshots=2)
        result = clock.run(made(Fleet, config, evaluation={"load_s": 30.0}).main(), limit_s=1e6)
        return scores(result), [s.seconds for s in result.steps]

    assert play() == play()
