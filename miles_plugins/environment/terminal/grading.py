"""Runs a task's tests in a box and reads what they say.

Where the box comes from, and that the agent cannot reach the tests before, is the environment's.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from miles import Box, SandboxError
from miles_plugins.environment.terminal.layout import Folder, read_file, test_files
from miles_plugins.environment.terminal.places import Places

__all__ = ["Verdict", "grade"]

_CHECKING = Path(__file__).parent / "checking.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of the tests."""

    reward: float
    """What the attempt was worth."""
    timed_out: bool
    """The tests ran out of time."""
    unusable: bool
    """What the agent left could not be graded, or the tests wrote no reward."""


async def grade(box: Box, places: Places, folder: Folder) -> Verdict:
    """Copy the tests, run them in the work directory, read their reward.

    Of miles' own layout that is 1 for exit code 0 and 0 otherwise; of Harbor's the number in
    `/logs/verifier/reward.txt`, or in `reward.json`. Raises `SandboxError` when the box breaks,
    `EpisodeError` when a test cannot be read.
    """
    await box.exec(["rm", "-rf", places.at("/tests"), places.at("/logs")], timeout=60.0)
    await box.exec(["mkdir", "-p", places.at("/logs/verifier")], timeout=60.0)
    for name, data in test_files(folder).items():
        await box.write(places.to_write(f"/tests/{name}"), places.rewritten(data))
    if not folder.harbor:
        await box.write(places.to_write("/tests/checking.py"), read_file(_CHECKING)[0])
    done = await box.exec(
        _command(folder, places),
        cwd=places.workdir,
        env={**folder.env, **folder.verifier_env},
        timeout=folder.verifier_s,
    )
    if done.timed_out:
        return Verdict(reward=0.0, timed_out=True, unusable=False)
    if not folder.harbor:
        return Verdict(reward=float(done.exit_code == 0), timed_out=False, unusable=False)
    reward = await _written(box, places)
    return Verdict(reward=reward or 0.0, timed_out=False, unusable=reward is None)


def _command(folder: Folder, places: Places) -> list[str]:
    if (folder.path / "tests" / "test.sh").is_file():
        return ["bash", places.at("/tests/test.sh")]
    # -E and -s: neither the environment nor a user's folder adds code; -B: it leaves no files
    return ["python3", "-EsB", places.at("/tests/check.py")]


async def _written(box: Box, places: Places) -> float | None:
    """The reward that Harbor's tests wrote; None when there is none, or no finite number."""
    for name in ("reward.txt", "reward.json"):
        try:
            said = (await box.read(places.to_write(f"/logs/verifier/{name}"))).decode()
        except (SandboxError, UnicodeDecodeError):
            continue  # it is not there
        try:
            value = float(said) if name == "reward.txt" else _of_json(json.loads(said))
        except (ValueError, TypeError):
            return None
        return value if math.isfinite(value) else None
    return None


def _of_json(value: object) -> float:
    """`reward`, or the mean of several named rewards."""
    if not isinstance(value, dict):
        return float(value)  # type: ignore[arg-type]  # a TypeError is caught above
    if "reward" in value:
        return float(value["reward"])
    numbers = [float(v) for v in value.values()]
    return sum(numbers) / len(numbers) if numbers else math.nan
