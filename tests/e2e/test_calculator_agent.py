"""The agentic default, made short: tools in the sandbox, and an outside agent over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest

SHORT = (
    "experiment=calculator_agent",
    "stages.sft.steps=90",
    "stages.sft.groups_per_step=12",
    "stages.grpo.steps=2",
    "stages.grpo.groups_per_step=2",
    "stages.grpo.samples_per_group=4",
    "evaluator.tasks=4",
    "temperature=0.7",
    "tracker=[jsonl]",
)

TIMED = ("time/", "engine/", "router/", "cpu/", "_per_s", "memory", "seconds")
"""Metrics that differ between two runs which trained on the same tokens."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]


@pytest.mark.parametrize("environment", ["tools", "harness"])
def test_calculator_agent_plays_turns_without_a_token_mismatch(
    new_run: Callable[..., Any], environment: str
) -> None:
    chosen = ("environment=harness",) if environment == "harness" else ()
    ran = new_run(*SHORT, *chosen)
    rows = [row for row in ran.steps.values() if row["stage"] == "grpo"]
    assert len(rows) == 2
    for row in rows:
        assert row["session/token_mismatches"] == 0
        assert row["mismatch/logprob_abs_max"] < 1e-4
        assert row["tokens/trained"] > 0
        assert row["groups/trained"] == 2
        assert row["env/turns"] == pytest.approx(row["session/turns"])
        assert {"env/tools/calls", "env/tools/errors", "router/prefix_hit_rate"} <= set(row)
    assert max(row["session/turns"] for row in rows) > 1  # it has learned the markup of calls
    page = (ran.directory / "report.html").read_text()
    for words in ("turns", "token mismatches", "tool errors", "prefix-cache hits"):
        assert f"<small>{words}</small>" in page
    kept = [json.loads(x) for x in (ran.directory / "samples.jsonl").read_text().splitlines()]
    assert any("tool" in line.get("conversation", "") for line in kept)
    said = (ran.directory / "logs" / "rollout.log").read_text()
    assert said.count("demonstrated tool calls") + said.count("demonstrations are replayed") == 1
    if environment == "tools":
        here = new_run(*SHORT, "session.through=process")
        assert learned(here) == learned(ran)


def learned(ran: Any) -> list[dict[str, Any]]:
    """Every metric that does not tell of time."""
    return [
        {name: value for name, value in row.items() if not any(part in name for part in TIMED)}
        for row in ran.rows
    ]
