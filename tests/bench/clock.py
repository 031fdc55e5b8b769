"""A local miles plugin that writes the CPU seconds of the driver and of its workers after every
step.

`plugins=[tests/bench/clock.py]` adds `cpu.jsonl` to the run directory: a line a step with `step`,
`stage`, `wall` (seconds on the monotonic clock), `driver` and `workers` (user and system CPU
seconds since each process began), and `own`, what reading all that cost the driver. Differences
between lines are what steps cost, so that start-up is never part of a figure. It judges nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import miles

_out: TextIO | None = None


def cpu_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process, to the nanosecond (Linux: the clock id of a pid)."""
    return time.clock_gettime((~pid << 3) | 2)


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`, nearest first; Linux only."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def _name(pid: int) -> str:
    """A worker's own name and its pid, or the program's and its pid."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    at = words.index("--name") + 1 if "--name" in words else 0
    return f"{words[at]} {pid}"


@miles.hookimpl
def miles_run_started(directory: str, config: Mapping[str, Any]) -> None:
    """Open the file."""
    global _out
    _out = (Path(directory) / "cpu.jsonl").open("a", buffering=1)


@miles.hookimpl
def miles_step_finished(
    step: int, groups: Sequence[miles.Group], update: Any, metrics: Mapping[str, float]
) -> None:
    """Write one line."""
    if _out is None:
        return
    driver = cpu_seconds(os.getpid())
    line = {
        "step": step,
        "stage": metrics.get("stage"),
        "wall": time.monotonic(),
        "trajectories": sum(len(group.trajectories) for group in groups),
        "sampled": sum(int(sample.sampled.sum()) for group in groups for sample in group.samples),
        "driver": driver,
        "workers": {_name(pid): cpu_seconds(pid) for pid in descendants(os.getpid())},
    }
    line["own"] = cpu_seconds(os.getpid()) - driver
    _out.write(json.dumps(line) + "\n")


@miles.hookimpl
def miles_run_finished(directory: str, outcome: str) -> None:
    """Close the file."""
    global _out
    if _out is not None:
        _out.close()
        _out = None


def read(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run, in order."""
    return [json.loads(line) for line in (directory / "cpu.jsonl").read_text().splitlines()]


def costs(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """What each step but the first cost: CPU seconds of `driver`, `workers` and `total`, and
    `wall` seconds.

    A worker that appears or disappears between two lines (a change of stage) makes that step
    unusable: it is left out.
    """
    found = []
    for before, after in pairwise(lines):
        if before["stage"] != after["stage"] or before["workers"].keys() != after["workers"].keys():
            continue
        driver = after["driver"] - before["driver"] - before["own"]
        each = {name: after["workers"][name] - before["workers"][name] for name in after["workers"]}
        workers = sum(each.values())
        found.append(
            {
                "driver": driver,
                "workers": workers,
                "total": driver + workers,
                **{f"{name.split()[0]} worker": spent for name, spent in each.items()},
                "wall": after["wall"] - before["wall"],
                "trajectories": after["trajectories"],
                "sampled": after["sampled"],
            }
        )
    return found
