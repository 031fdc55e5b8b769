"""One policy, one score: on the engines that train, on a fleet, by a command, and by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SETS = (
    "evaluator.sets.plain={}",
    "evaluator.sets.tried={tasks: 24, samples: 4, temperature: 1.0, pass_k: [1, 4]}",
    "evaluator.sets.other={environment: {name: arithmetic, digits: 1}, tasks: 6}",
)
SHORT = (
    "stages.sft.steps=60",
    "stages.sft.eval_every=20",
    "stages.grpo.steps=1",
    "stages.grpo.groups_per_step=4",
    "stages.grpo.selector.admit=[none]",
    "evaluator.tasks=24",
    "evaluator.max_new_tokens=8",
    "tracker=[jsonl]",
)


def scores(directory: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """By step and set, what depends on the policy alone."""
    found = {}
    for line in lines(directory):
        if line["moment"] == "evaluated":
            name = line["set"]
            own = {k.removeprefix(f"eval/{name}/"): v for k, v in line.items()}
            rest = ("moment", "at", "step", "set", "evaluator", "seconds", "lag_steps")
            found[line["step"], name] = {k: v for k, v in own.items() if k not in rest}
    return found


def lines(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    found = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in found if line.endswith("}")]


def pid_of(worker: str, driver: int) -> int | None:
    """Of a worker of this driver, by its name."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == driver and worker.encode() in words:
            return int(entry.name)
    return None


def test_every_evaluator_gives_a_version_the_same_score(
    new_run: Callable[..., Any], command: Callable[..., Any]
) -> None:
    shared = new_run(*SHORT, "evaluator=shared", *SETS, name="shared")
    fleet = new_run(*SHORT, "evaluator=fleet", "evaluator.overflow=wait", *SETS, name="fleet")
    expected = scores(shared.directory)
    assert sorted(expected) == [
        (step, name) for step in (0, 20, 40, 60, 61) for name in ("other", "plain", "tried")
    ]
    assert all("score" in row for row in expected.values()), expected
    lengths = {row["length"] for (_, name), row in expected.items() if name == "tried"}
    assert len(lengths) >= 4  # versions differ
    assert all("pass_4" in row for (_, name), row in expected.items() if name == "tried")
    assert scores(fleet.directory) == expected
    assert not list((fleet.directory / "snapshots").iterdir())

    where = shared.directory.parent
    out = where / "scores.json"
    by_hand = command("eval", shared.directory, "run.name=by-hand", "--scores", out, cwd=where)
    assert by_hand.code == 0, by_hand.text
    assert "plain, version 61: " in by_hand.out and " · pass@4 " in by_hand.out
    said = json.loads(out.read_text())
    assert said["version"] == 61
    for name, one in said["sets"].items():
        row = dict(expected[61, name])
        assert one["score"] == row["score"] and one["samples"] == row["samples"]
        assert all(one["metrics"][k] == row[k] for k in ("low", "high", "length"))
    assert (where / "by-hand" / "metrics.jsonl").is_file()


def test_eval_hands_a_checkpoint_to_a_command(
    tiny: Any, command: Callable[..., Any], tmp_path: Path
) -> None:
    """The external evaluator, asked by hand, asks `miles eval` in turn: another process, or
    another machine."""
    inner = f"{sys.executable} -m miles eval {{checkpoint}} evaluator=shared evaluator.tasks=8"
    inner += f" run.dir={tmp_path} run.name=inner --scores {{scores}}"
    outer = command(
        "eval", tiny.directory, "evaluator=external", f"evaluator.command='{inner}'",
        "run.name=outer", f"run.dir={tmp_path}", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert outer.code == 0, outer.text
    said = json.loads(outer.out)
    last = scores(tiny.directory)[said["version"], "heldout"]
    assert said["sets"]["heldout"]["score"] == last["score"]
    missing = command("eval", tmp_path / "inner" / "logs", cwd=tmp_path)
    assert missing.code == 2 and "holds no checkpoint: neither state.json" in missing.err


def test_training_goes_on_when_an_evaluation_engine_dies(tmp_path: Path) -> None:
    """Killed for real, again and again: scores are skipped, steps are not."""
    overrides = [
        "stages.sft.steps=5",
        "stages.grpo.steps=40",
        "stages.grpo.selector.admit=[none]",
        "stages.grpo.groups_per_step=4",
        "evaluator=fleet",
        "evaluator.overflow=wait",
        "evaluator.tasks=256",
        "stages.grpo.eval_every=5",
        "stages.grpo.max_lag=1",
        "tracker=[jsonl]",
        "run.name=run",
    ]
    run = subprocess.Popen(
        [sys.executable, "-m", "miles", "run", *overrides, f"run.dir={tmp_path}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    killed = 0
    try:
        until = time.monotonic() + 150
        while run.poll() is None and time.monotonic() < until:
            begun = any(x["moment"] == "step_finished" for x in lines(tmp_path / "run"))
            pid = pid_of("eval-engine", run.pid)
            if begun and pid is not None and killed < 3:
                os.kill(pid, signal.SIGKILL)
                killed += 1
            time.sleep(1.0)
        said, _ = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
    assert run.returncode == 0, said
    assert killed
    found = lines(tmp_path / "run")
    steps = [x["step"] for x in found if x["moment"] == "step_finished"]
    assert steps == list(range(1, 46))
    evaluated = {x["step"]: x for x in found if x["moment"] == "evaluated"}
    assert sorted(evaluated) == [0, *range(5, 46, 5)]
    assert "eval/heldout/score" in evaluated[45], evaluated[45]
    assert not list((tmp_path / "run" / "snapshots").iterdir())
