"""What every tracker must do: take whatever it is told, and close more than once.

What it draws, writes or sends is its own tests' business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from miles.testing.contract.case import Case, expect

METRICS: Mapping[str, Any] = {
    "step": 1,
    "stage": "grpo",
    "version": 1,
    "reward/mean": 0.5,
    "reward/std": 0.0,
    "loss/policy": -1.5,
    "groups/dropped/zero_variance": 3,
    "time/step_s": 0.01,
    "eval/heldout/skipped": "no tasks",
}
ODD: Mapping[str, Any] = {
    "not a number": math.nan,
    "endless": math.inf,
    "nothing": None,
    "nested": {"deeper": [1, {"still": "é 🦊"}]},
    "flag": True,
    "tuple": (1, 2.5, "x"),
    "long": "x" * 5_000,
    "": 0,
    "huge": 10**30,
    "[markup] {braces} %s": "[/]\x1b[31m",
}

LIFE: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (
        "run_started",
        {
            "directory": "runs/x",
            "name": "x",
            "stages": ["sft", "grpo"],
            "steps": {"sft": 2, "grpo": 3},
            "resumed": None,
            "config": {"seed": 0, "stages": {"grpo": {"steps": 3}}},
        },
    ),
    ("step_restored", {"step": 0, "stage": "grpo", "version": 0, "reward/mean": 0.5}),
    ("stage_started", {"stage": "grpo", "version": 0, "steps": 3, "first": 0}),
    (
        "evaluated",
        {
            "step": 0,
            "set": "heldout",
            "score": 0.5,
            "version": 0,
            "samples": 8,
            "length": 3.5,
        },
    ),
    ("evaluated", {"step": 0, "set": "heldout", "skipped": "no tasks"}),
    ("weights_published", {"version": 1, "digest": "ab", "bytes": 10, "seconds": 0.1}),
    ("step_finished", METRICS),
    ("waited", {"text": "waiting for engine: its server starts (5 s so far)"}),
    ("warned", {"text": "a mismatch over its budget"}),
    ("checkpoint_saved", {"step": 1, "directory": "runs/x/checkpoints/step_000001"}),
    ("run_finished", {"directory": "runs/x", "outcome": "finished", "seconds": 1.5}),
)


def check_takes_every_moment(case: Case) -> None:
    """It takes every moment of a run's life, in order."""
    tracker = case.build()
    for name, data in LIFE:
        _tell(tracker, name, data)
    tracker.close()


def check_takes_odd_values(case: Case) -> None:
    """Values that are not finite, missing, nested, long, or full of markup make no moment fail."""
    tracker = case.build()
    for name, data in LIFE:
        _tell(tracker, name, {**data, **ODD})
    for odd in (math.nan, math.inf, -math.inf, 0, 10**30):
        _tell(tracker, "step_finished", {**METRICS, "reward/mean": odd})
    tracker.close()


def check_takes_any_order(case: Case) -> None:
    """Moments in another order, as after a resume or a failure, or of a name that it does not know,
    are no failure."""
    tracker = case.build()
    for name, data in reversed(LIFE):
        _tell(tracker, name, data)
    _tell(tracker, "no_such_moment", {"x": 1})
    tracker.close()


def check_leaves_data_alone(case: Case) -> None:
    """What it is told, it does not change."""
    tracker = case.build()
    for name, data in LIFE:
        told = dict(data)
        _tell(tracker, name, told)
        expect(told == dict(data), f"moment {name!r} changed its data")
    tracker.close()


def check_closes_twice(case: Case) -> None:
    """`close` may be called twice, and before anything was told."""
    for told in ((), LIFE):
        tracker = case.build()
        for name, data in told:
            _tell(tracker, name, data)
        tracker.close()
        tracker.close()


def _tell(tracker: Any, name: str, data: Mapping[str, Any]) -> None:
    answer = tracker.moment(name, data)
    expect(answer is None, f"moment {name!r} gave {answer!r}; nothing listens to a tracker")
