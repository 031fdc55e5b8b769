"""Distributions: means as they were asked for, numbers of files, and of recorded runs."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import parts
import pytest

from miles.errors import ConfigError
from miles.simulate.distributions import Distribution, draw
from miles.simulate.environment import ModelledEnvironment
from miles.types import Task


@pytest.mark.parametrize(
    ("kind", "mean", "spread"),
    [
        ("constant", 7, 0), ("uniform", 7, 3), ("normal", 70, 5), ("lognormal", 7, 1.0),
        ("exponential", 7, 0), ("gamma", 7, 0.5), ("geometric", 7, 0), ("gamma", 7, 0),
    ],
)  # fmt: skip
def test_distribution_has_the_mean_it_says(kind: str, mean: float, spread: float) -> None:
    made = draw(Distribution(kind=kind, mean=mean, spread=spread))
    rng = Random(1)
    values = [made(rng) for _ in range(40_000)]
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.03)
    if kind == "geometric":
        assert min(values) == 1
        assert all(value == int(value) for value in values)


def test_distribution_is_kept_between_its_limits() -> None:
    made = draw(Distribution(kind="lognormal", mean=10, spread=2, low=5, high=20))
    values = [made(Random(seed)) for seed in range(500)]
    assert (min(values), max(values)) == (5, 20)


def test_distribution_draws_from_files(tmp_path: Path) -> None:
    plain, rows = tmp_path / "n.txt", tmp_path / "n.jsonl"
    plain.write_text("3\n\n5.5\n")
    rows.write_text('{"turns": 2}\n{"turns": 9}\n')
    for path, column, wanted in ((plain, "", {3, 5.5}), (rows, "turns", {2, 9})):
        made = draw(Distribution(kind="file", path=str(path), column=column))
        assert {made(Random(seed)) for seed in range(50)} == wanted
    with pytest.raises(ConfigError, match=r"n.jsonl:1 is not an object with a number 'turn'"):
        draw(Distribution(kind="file", path=str(rows), column="turn"))
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        draw(Distribution(kind="file", path=str(tmp_path / "none")))


def test_distribution_draws_from_a_recorded_run(tmp_path: Path) -> None:
    lines = [{"moment": "step_finished", "step": i, "length/mean": 100.0 + i} for i in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    made = draw(Distribution(kind="file", path=str(tmp_path), column="length/mean"))
    assert {made(Random(seed)) for seed in range(50)} == {100, 101, 102}
    with pytest.raises(ConfigError, match=r"no step .* has metric 'length'.*valid: length/mean"):
        draw(Distribution(kind="file", path=str(tmp_path), column="length"))


def test_environment_replays_recorded_attempts(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    path.write_text('{"turns": [[50, 10, 1.5], [20, 5, 0]]}\n')
    keys = parts.keys(trajectories=str(path))
    made = ModelledEnvironment(keys, seed=0, max_turns=9)
    assert made.plan(Task(id="t", prompt=""), 0, Random(0)) == [(50, 10, 1.5), (20, 5, 0.0)]
    result = parts.played(keys)
    assert result.turns == 2 * result.started * 4
    path.write_text('{"turns": [[0, 10, 1]]}\n')
    with pytest.raises(ConfigError, match=r"attempts.jsonl:1: an attempt has at least one turn"):
        ModelledEnvironment(keys, seed=0, max_turns=9)
