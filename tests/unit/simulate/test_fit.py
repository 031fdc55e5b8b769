"""Fitting models to recorded runs: what is read, what is found, and how far off it is."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import parts
import pytest
import yaml

from miles.cli import main
from miles.simulate.distributions import Distribution, draw
from miles.simulate.fit import direct, line, minimize, of_mean
from miles.simulate.keys import Keys, PublishKeys
from miles.simulate.recorded import load, together

TURNS = {
    "turns": Distribution(mean=1), "delay_s": Distribution(), "observation_tokens": Distribution(),
    "turn_tokens": parts.lognormal(400, 0.5, low=1, high=2000),
    "prompt_tokens": Distribution(mean=50),
}  # fmt: skip
ENGINE = {"forward_s": 0.02, "sequence_s": 0.0008, "gpus": 1, "trainer_share": 0.7}
TRAINER = {
    "step_s": 3.0, "tokens_per_gpu_s": 4000.0, "probe_s": 2.0, "finish_s": 0.5, "engine_share": 0.7,
}  # fmt: skip


def models() -> Keys:
    made = parts.keys(engine=ENGINE, trainer=TRAINER, **TURNS)
    return replace(made, publish=PublishKeys(fixed_s=0.3, busy_s=0.4))


def recorded(folder: Path, name: str, keys: Keys, **changes: Any) -> Path:
    """A run directory as if what was simulated had been run."""
    settings = parts.settings(steps=18, **changes)
    result = parts.played(keys, steps=18, **changes)
    where = folder / name
    where.mkdir()
    plain = asdict(settings)
    (where / "config.yaml").write_text(yaml.safe_dump({"stages": {"test": json_of(plain)}}))
    with (where / "metrics.jsonl").open("w") as file:
        sampled = 0
        for number, step in enumerate(result.steps, start=1):
            sampled += step.sampled
            groups = settings.groups_per_step
            publish = 0.3 + 0.4 * bool(settings.max_lag)
            other = step.seconds - step.wait_s - step.train_s - publish
            line = {
                "moment": "step_finished", "at": float(number), "step": number, "stage": "test",
                "groups/trained": groups, "session/turns": 1.0, "tokens/sampled": step.sampled,
                "length/mean": step.trained / groups / settings.samples_per_group,
                "length/returned": sampled / number / groups / settings.samples_per_group,
                "tokens/lag_0": 1000 if other < 1.5 else 0, "engine/tokens_per_s": 900.0,
                "time/step_s": step.seconds, "time/wait_s": step.wait_s,
                "time/train_s": step.train_s, "time/publish_s": publish,
                "time/overhead_s": max(0.0, other),
                "engine/idle_s": step.train_s + publish + other + 0.2,
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
    return where


def json_of(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_line_is_not_moved_by_points_far_off() -> None:
    points = [(float(x), 2.0 + 0.5 * x) for x in range(40)]
    points[7] = (7.0, 900.0)
    assert line(points) == pytest.approx((2.0, 0.5))
    assert line([(3.0, 4.0)]) == (4.0, 0.0)


def test_of_mean_undoes_what_limits_take_away() -> None:
    what = Distribution(kind="lognormal", mean=1, spread=1.0, low=1, high=150)
    found = of_mean(what, 60.0)
    rng, one = Random(1), draw(found)
    assert sum(one(rng) for _ in range(20_000)) / 20_000 == pytest.approx(60, rel=0.03)
    assert found.mean > 65


def test_minimize_finds_the_lowest_point() -> None:
    best, tried = minimize(lambda p: (p[0] - 2) ** 2 + (p[1] + 1) ** 2, [0.0, 0.0], evaluations=120)
    assert best == pytest.approx([2.0, -1.0], abs=0.05)
    assert tried <= 124


def test_together_joins_runs_of_the_same_settings(tmp_path: Path) -> None:
    runs = [
        recorded(tmp_path, name, models(), max_lag=lag, seed=seed)
        for name, lag, seed in (("a", 0, 0), ("b", 1, 0), ("c", 0, 5))
    ]
    found = together(map(load, runs))
    assert [run.name for run in found] == ["a c", "b"]
    assert [len(run.steps) for run in found] == [30, 15]


def test_direct_tells_what_engines_and_trainer_do_to_each_other(tmp_path: Path) -> None:
    keys = models()
    runs = [
        load(recorded(tmp_path, "sync", keys, max_lag=0)),
        load(recorded(tmp_path, "async", keys, max_lag=3)),
    ]
    found = direct(runs, Keys(environment=replace(keys.environment)))
    assert found.publish.fixed_s == pytest.approx(0.3)
    assert found.publish.busy_s == pytest.approx(0.4)
    assert found.trainer.probe_s == pytest.approx(2.0, abs=0.3)
    assert found.trainer.finish_s == pytest.approx(0.5, abs=0.1)
    assert found.trainer.step_s == pytest.approx(3.0, rel=0.1)
    assert found.trainer.engine_share == pytest.approx(0.7, abs=0.1)
    assert found.engine.request_s == pytest.approx(0.2)
    assert found.environment.turn_tokens.mean == pytest.approx(400, rel=0.15)


def test_load_refuses_what_is_too_short(tmp_path: Path, capsys) -> None:
    where = recorded(tmp_path, "short", models(), max_lag=0)
    lines = (where / "metrics.jsonl").read_text().splitlines(keepends=True)
    (where / "metrics.jsonl").write_text("".join(lines[:5]))
    assert main(["simulate", "experiment=grpo", "--fit", str(where)]) == 2
    assert "has 2 steps after the first 3" in capsys.readouterr().err


@pytest.mark.slow
def test_fit_predicts_settings_that_it_has_not_seen(tmp_path: Path, capsys) -> None:
    fitted = {"sync": {"max_lag": 0}, "lag2": {"max_lag": 2}}
    unseen = {"lag1": {"max_lag": 1}, "narrow": {"max_lag": 2, "concurrency": 16}}
    for name, changes in {**fitted, **unseen}.items():
        recorded(tmp_path, name, models(), **changes)
    kept = tmp_path / "found.yaml"
    words = [
        "simulate", "experiment=grpo", "selector.admit=[none]",
        "simulate.environment.turn_tokens={kind: lognormal, mean: 1, spread: 0.5, low: 1, "
        "high: 2000}",
        "--fit", *(str(tmp_path / n) for n in fitted),
        "--predict", *(str(tmp_path / n) for n in unseen), "--write", str(kept),
    ]  # fmt: skip
    assert main(words) == 0
    said = capsys.readouterr().out
    worst = float(said.partition("largest error of a prediction: ")[2].partition("%")[0])
    assert worst < 10, said
    engine = yaml.safe_load(kept.read_text())["simulate"]["engine"]
    each = engine["forward_s"] + 20 * engine["sequence_s"]
    assert each == pytest.approx(0.02 + 20 * 0.0008, rel=0.15)
