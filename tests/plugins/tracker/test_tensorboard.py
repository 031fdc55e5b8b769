"""The tensorboard tracker, read back with TensorBoard's own reader."""

from pathlib import Path
from typing import Any

import pytest

from miles import ConfigError, Context
from miles_plugins.tracker.extra import require
from miles_plugins.tracker.tensorboard import Tensorboard

pytest.importorskip("tensorboard")


def drive(directory: Path, first: int, last: int, reward: float) -> None:
    tracker = Tensorboard(Tensorboard.Config(), Context(directory=directory))
    started = {"name": "n", "config": {"seed": 3}, "resumed": first or None}
    tracker.moment("run_started", started)
    tracker.moment("stage_started", {"stage": "grpo", "version": first, "steps": last})
    for step in range(first + 1, last + 1):
        metrics = {"step": step, "stage": "grpo", "reward/mean": reward, "lr": float("nan")}
        tracker.moment("step_finished", metrics)
    scored = {"set": "heldout", "score": 0.5, "version": last, "samples": 8}
    tracker.moment("evaluated", {"step": last, **scored})
    tracker.moment("evaluated", {"step": last, "set": "other", "skipped": "no tasks"})
    tracker.close()
    tracker.close()


def read(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory / "tensorboard")).Reload()


def test_tensorboard_writes_finite_numbers_under_their_metric_names(tmp_path: Path) -> None:
    drive(tmp_path, 0, 3, 0.25)
    events = read(tmp_path)
    scalars = [(e.step, e.value) for e in events.Scalars("reward/mean")]
    assert scalars == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert set(events.Tags()["scalars"]) == {
        "reward/mean",
        "eval/heldout/score",
        "eval/heldout/version",
        "eval/heldout/samples",
    }
    text = events.Tensors("config")[0].tensor_proto.string_val[0]
    assert text == b'    {\n      "seed": 3\n    }\n'


def test_tensorboard_resumed_run_forgets_later_steps(tmp_path: Path) -> None:
    drive(tmp_path, 0, 6, 0.25)
    # event files are ordered by the second in their names
    first = next((tmp_path / "tensorboard").iterdir())
    first.rename(first.with_name("events.out.tfevents.0000000001.host.1.0"))
    drive(tmp_path, 4, 8, 0.75)
    scalars = [(e.step, e.value) for e in read(tmp_path).Scalars("reward/mean")]
    assert scalars == [(s, 0.25) for s in (1, 2, 3, 4)] + [(s, 0.75) for s in (5, 6, 7, 8)]


def test_tensorboard_has_the_step_whose_run_was_killed_before_it_was_told(tmp_path: Path) -> None:
    drive(tmp_path, 0, 3, 0.25)
    first = next((tmp_path / "tensorboard").iterdir())
    first.rename(first.with_name("events.out.tfevents.0000000001.host.1.0"))
    tracker = Tensorboard(Tensorboard.Config(), Context(directory=tmp_path))
    tracker.moment("run_started", {"name": "n", "config": {}, "resumed": 4})
    for step, moment in ((4, "step_restored"), (5, "step_finished")):
        tracker.moment(moment, {"step": step, "stage": "grpo", "reward/mean": 0.5})
    tracker.close()
    scalars = [(e.step, e.value) for e in read(tmp_path).Scalars("reward/mean")]
    assert scalars == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.5), (5, 0.5)]


def test_tensorboard_refuses_a_useless_interval(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracker tensorboard: flush_s: 0.0 is not above 0"):
        Tensorboard(Tensorboard.Config(flush_s=0.0), Context(directory=tmp_path))


def test_require_names_the_line_to_install() -> None:
    with pytest.raises(ConfigError) as caught:
        require("wandb", distribution="no-such-distribution")
    assert caught.value.detail == (
        "tracker wandb: needs no-such-distribution, which is not installed\n"
        'pip install "miles[wandb]"'
    )
