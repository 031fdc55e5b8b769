"""The external evaluator: a command is handed a checkpoint, and believed no further than it can be
checked."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from miles import ConfigError, Context, Score, Settings, Skipped
from miles.testing import FakeEnvironment
from miles_plugins.evaluator.external import External


class Handed:
    """Attempts of which only the directory is wanted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory


def make(tmp_path: Path, script: str, **keys: Any) -> External:
    file = tmp_path / "evaluate.py"
    file.write_text("import json, sys, time, os, subprocess\n" + script)
    words = (shlex.quote(sys.executable), shlex.quote(str(file)))
    command = " ".join([*words, "{checkpoint} {version} {sets} {scores}"])
    environment = FakeEnvironment(FakeEnvironment.Config(heldout=3))
    context = Context(
        directory=tmp_path, seed=3, environment=environment, settings=Settings(max_new_tokens=7)
    )
    return External(External.Config(command=command, **keys), context)


def evaluate(external: External, tmp_path: Path) -> Any:
    (result,) = asyncio.run(external.evaluate(7, Handed(tmp_path / "ckpt")))  # type: ignore[arg-type]
    return result


ANSWER = """
where, version, sets, scores = sys.argv[1:]
asked = json.load(open(sets))
def answer(said, version=int(version)):
    json.dump({"version": version, "sets": {"heldout": said}}, open(scores, "w"))
"""


def test_external_scores_what_the_command_earned(tmp_path: Path) -> None:
    script = """
(one,) = asked["sets"]
assert asked["checkpoint"] == where and asked["version"] == 7, asked
assert len(one["seeds"]) == len(one["tasks"]) == 3 and one["tasks"][0]["prompt"], one
assert one["samples"] == 2 and one["sampling"]["max_new_tokens"] == 7, one
answer({"rewards": [[1, 0], [1, 1], [0, None]], "metrics": {"gpu_s": 3, "name": "x"}})
"""
    external = make(tmp_path, ANSWER + script, samples=2, pass_k=[2], max_failures=0.2)
    result = evaluate(external, tmp_path)
    assert isinstance(result, Score), result
    assert (result.score, result.samples, result.version) == (0.6, 5, 7)
    assert result.metrics["failures"] == 1 and result.metrics["gpu_s"] == 3
    assert result.metrics["pass_2"] == 1.0  # of the two tasks with two attempts left
    assert "name" not in result.metrics


def test_external_takes_a_score_that_was_counted_elsewhere(tmp_path: Path) -> None:
    said = 'answer({"score": 0.25, "samples": 12, "metrics": {"low": 0.1}})'
    result = evaluate(make(tmp_path, ANSWER + said), tmp_path)
    assert isinstance(result, Score)
    assert (result.score, result.samples, result.metrics["low"]) == (0.25, 12, 0.1)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sys.exit(3)", "the command ended with exit code 3; see "),
        ("pass", "the command wrote no {scores} file; see "),
        ('open(scores, "w").write("{")', "the command's {scores} file is not JSON: "),
        ('open(scores, "w").write("[]")', "the command's answer is a list, not an object"),
        ("answer({}, version=6)", "the command answers for version 6, not 7"),
        ("answer(None)", "the command's answer says nothing of this set"),
        ('answer({"skipped": "no machine"})', "the command: no machine"),
        ('answer({"rewards": 3})', "the command's `rewards` is not a list of lists"),
        (
            'answer({"rewards": [[1], [1]]})',
            "the command's `rewards` are of 2 tasks with [1] attempts; asked were 3 with 1",
        ),
        ('answer({"rewards": [[None], [1], [1]]})', "1 of 3 attempts failed"),
        ('answer({"score": 1.0})', "the command's `samples` is None, not a number of attempts"),
    ],
)
def test_external_says_why_there_is_no_score(tmp_path: Path, script: str, reason: str) -> None:
    result = evaluate(make(tmp_path, ANSWER + script), tmp_path)
    assert isinstance(result, Skipped)
    assert result.reason.startswith(reason)


def test_external_keeps_what_the_command_prints(tmp_path: Path) -> None:
    evaluate(make(tmp_path, "print('loading the model'); sys.exit(1)"), tmp_path)
    assert "loading the model" in (tmp_path / "logs" / "evaluator.log").read_text()


CHILD = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(os.path.join(os.path.dirname(__file__), "child"), "w").write(str(child.pid))
time.sleep(60)
"""


def gone(pid: int, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return True
        time.sleep(0.02)
    return False


def wait_for(path: Path) -> int:
    end = time.monotonic() + 10
    while time.monotonic() < end and not (path.exists() and path.read_text()):
        time.sleep(0.02)
    return int(path.read_text())


def test_external_ends_a_command_with_its_children_when_time_runs_out(tmp_path: Path) -> None:
    result = evaluate(make(tmp_path, CHILD, timeout_s=1.0), tmp_path)
    reason = "timeout: the command was not done after 1 s"
    assert result == Skipped(set="heldout", reason=reason)
    assert gone(wait_for(tmp_path / "child"))


def test_external_command_dies_with_whoever_started_it(tmp_path: Path) -> None:
    script = tmp_path / "evaluate.py"
    script.write_text("import os, subprocess, sys, time\n" + CHILD)
    words = [
        sys.executable,
        "-m",
        "miles_plugins.evaluator.leash",
        "1",
        sys.executable,
        str(script),
    ]
    starter = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen({words!r}, stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.DEVNULL)
    try:
        child = wait_for(tmp_path / "child")
        assert not gone(child, within_s=0.2)
    finally:
        process.kill()
        process.wait()
    assert gone(child)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "evaluator external: command is empty; it is what scores a checkpoint"),
        ("run {model} {scores}", "cannot be read ('model'); it may hold {checkpoint}, {version}"),
        ("run {checkpoint}", "command: 'run {checkpoint}' has no {scores}, the file it writes"),
        ("run 'x {scores}", "cannot be read (No closing quotation)"),
    ],
)
def test_external_refuses_a_command_that_cannot_answer(
    tmp_path: Path, command: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        External(External.Config(command=command), Context(directory=tmp_path))
    assert said in str(caught.value)
