"""An environment takes over at each of three depths, in the real loop with real processes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from miles.plugins import Registry
from miles.testing import contract

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).parent / "depths.py"
DEPTHS = {
    "at_episode": ("turns", 2.0),
    "at_play": ("branches", 2.0),
    "at_rollout": ("distinct", 4.0),
}
"""Environment to what its metric must be: two turns, two branches, four agents that differ."""


@pytest.mark.parametrize("name", DEPTHS)
def test_environment_takes_over(name, new_run) -> None:
    ran = new_run(
        f"plugins=['{PLUGIN}']",
        *("experiment=grpo", "tito=bytes", f"environment={name}"),
        *("steps=2", "groups_per_step=2", "samples_per_group=4", "max_new_tokens=8"),
        *("evaluator.tasks=2", "tracker=[jsonl]"),
    )
    steps = list(ran.steps.values())
    assert [row["step"] for row in steps] == [1, 2]
    metric, value = DEPTHS[name]
    for row in steps:
        assert row[f"env/{metric}"] == value
        assert row["groups/trained"] == 2
        assert row["reward/std"] > 0
        # tokens, log-probs and versions came from the engine, whoever drove
        assert row["mismatch/logprob_abs_max"] < 1e-4
        assert row["staleness/max"] == 0
    scores = [row["eval/heldout/score"] for row in ran.rows if "eval/heldout/score" in row]
    assert len(scores) == 2
    assert all(math.isfinite(score) for score in scores)


@pytest.mark.parametrize("name", DEPTHS)
def test_environment_keeps_the_contract(name) -> None:
    assert contract.check("environment", name, Registry.load(files=[PLUGIN])) == []
