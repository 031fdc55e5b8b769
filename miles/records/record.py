"""A run directory, read back: what its files say happened, in order, each step once.

It reads runs that are going on, were killed, or lost a file; it writes nothing and draws nothing.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.errors import ConfigError

__all__ = ["Line", "Record", "read"]

Line = Mapping[str, Any]
"""One object of a file of lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of a run."""

    directory: Path
    """Where it lives."""
    steps: tuple[Line, ...]
    """Metrics of every step, by step."""
    evaluations: tuple[Line, ...]
    """Evaluation lines, by step and set."""
    warnings: tuple[str, ...]
    """Sentences, in order."""
    samples: tuple[Line, ...]
    """Texts kept for people to read."""
    planned: Mapping[str, int]
    """Steps of every stage, in order, as far as announced."""
    outcome: str
    """`finished`, `interrupted`, `failed`; without an end `running` while a process holds the
    directory, otherwise `unfinished` (it was killed); `unrecorded` without `metrics.jsonl`."""
    why: str
    """What ended it, when it failed; why nothing is known of it, when it is unrecorded."""
    seconds: float
    """From the first line to the last, without the pauses before a resume."""
    config: str
    """`config.yaml`, empty when missing."""
    plugins: Mapping[str, Any]
    """`plugins.json`, empty when missing."""
    unreadable: int
    """Lines of `metrics.jsonl` and `samples.jsonl` that are no JSON objects."""

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages that took a step or were announced, in order."""
        return tuple(dict.fromkeys([*self.planned, *(str(s.get("stage", "")) for s in self.steps)]))

    def of(self, stage: str) -> list[Line]:
        """Steps of one stage."""
        return [s for s in self.steps if s.get("stage", "") == stage]


def read(directory: Path | str) -> Record:
    """Everything in the directory. Raises `ConfigError` when there is no run in it."""
    root = Path(directory).expanduser()
    if not any((root / name).exists() for name in ("metrics.jsonl", "config.yaml")):
        raise ConfigError(f"{root}: no run here: neither metrics.jsonl nor config.yaml")
    lines = list(_objects(root / "metrics.jsonl"))
    texts = list(_objects(root / "samples.jsonl"))
    good = [x for x in lines if x is not None]
    steps = {int(x["step"]): x for x in good if _is(x, "step_finished")}
    scores = {(int(x["step"]), str(x.get("set"))): x for x in good if _is(x, "evaluated")}
    samples = {int(x.get("step", 0)): x for x in texts if x is not None}
    return Record(
        directory=root,
        steps=tuple(steps[k] for k in sorted(steps)),
        evaluations=tuple(scores[k] for k in sorted(scores)),
        warnings=tuple(str(x.get("text")) for x in good if x.get("moment") == "warned"),
        samples=tuple(samples[k] for k in sorted(samples)),
        planned=_planned(good),
        outcome=_outcome(root, good),
        why=_why(good) if (root / "metrics.jsonl").exists() else _UNRECORDED,
        seconds=_seconds(good),
        config=_text(root / "config.yaml"),
        plugins=_mapping(root / "plugins.json"),
        unreadable=lines.count(None) + texts.count(None),
    )


_UNRECORDED = (
    "there is no metrics.jsonl: no tracker of this run wrote it, or it was lost, so that steps, "
    "scores and warnings are unknown here (tracker=[console,jsonl] writes it)"
)


def _is(line: Line, moment: str) -> bool:
    return line.get("moment") == moment and isinstance(line.get("step"), int)


def _objects(path: Path) -> Iterator[Line | None]:
    """Every line as a mapping, None for one that is not; a last line being written is no fault."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                if line.endswith("\n") and line.strip():
                    yield None
                continue
            yield found if isinstance(found, dict) else None


def _planned(lines: list[Line]) -> dict[str, int]:
    planned: dict[str, int] = {}
    for line in lines:
        if line.get("moment") == "run_started" and isinstance(line.get("steps"), dict):
            planned |= line["steps"]
        elif line.get("moment") == "stage_started":
            planned[str(line.get("stage"))] = int(line.get("steps", 0))
    return planned


def _outcome(root: Path, lines: list[Line]) -> str:
    if not (root / "metrics.jsonl").exists():
        return "unrecorded"  # no tracker wrote it: nobody can tell from here
    ends = [x for x in lines if x.get("moment") in ("run_started", "run_finished")]
    if ends and "outcome" in ends[-1]:
        return str(ends[-1]["outcome"])
    return "running" if _held(root / "lock") else "unfinished"


def _why(lines: list[Line]) -> str:
    ends = [x for x in lines if x.get("moment") in ("run_started", "run_finished")]
    return str(ends[-1].get("why", "")) if ends else ""


def _held(lock: Path) -> bool:
    """Whether a process holds the run's directory."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or it may not be read
        return False
    return False


def _seconds(lines: list[Line]) -> float:
    total, before = 0.0, None
    for line in lines:
        at = line.get("at")
        if not isinstance(at, (int, float)):
            continue
        if before is not None and line.get("moment") != "run_started":
            total += max(0.0, at - before)
        before = at
    return total


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _mapping(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(_text(path) or "{}")
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
