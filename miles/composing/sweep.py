"""A sweep: every combination of overrides as a run of its own, one after the other.

Each job is a fresh `miles run` process in its own directory; nothing is shared between them. All
jobs are checked before the first one starts.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from miles.check import check
from miles.composing.compose import expand, parse, quoted
from miles.config import compose
from miles.errors import ConfigError
from miles.plugins import Registry

__all__ = ["sweep"]


def sweep(
    overrides: Sequence[str],
    *,
    registry: Registry | None = None,
    folders: Sequence[str] = (),
) -> int:
    """Run every job and print a summary; 1 when any failed, 130 when interrupted.

    Values are swept as in Hydra: `a=1,2`, `a=range(0,4)`, `a=choice(x,y)`. A path is swept only
    with `choice`, because it may hold commas. Raises `ConfigError` for an override that cannot be
    read, and for the faults of any job.
    """
    jobs = expand([quoted(text) for text in overrides])
    given = next((o for o in reversed(overrides) if o.startswith("run.name=")), "")
    stem = str(parse(quoted(given)).value) if given else time.strftime("sweep-%Y%m%d-%H%M%S")
    options = [word for folder in folders for word in ("--config-dir", folder)]
    _refuse_faulty(jobs, registry, folders)
    outcomes: list[tuple[str, str, int, float]] = []
    for number, job in enumerate(jobs):
        name = f"{stem}-{number}"
        swept = _swept(job, jobs)
        print(f"miles: job {number + 1} of {len(jobs)}: {swept or 'one run'}", flush=True)
        words = [o for o in job if not o.startswith("run.name=")]
        began = time.monotonic()
        code = _ended(
            [sys.executable, "-P", "-m", "miles", "run", *options, *words, f"run.name={name}"]
        )
        outcomes.append((name, swept, code, time.monotonic() - began))
        if code == 130:
            break
    _summary(outcomes, len(jobs))
    if any(code == 130 for _, _, code, _ in outcomes):
        return 130
    return 1 if any(code for _, _, code, _ in outcomes) else 0


def _ended(command: Sequence[str]) -> int:
    """The job's exit code, 130 when interrupted. A Ctrl-C reaches the job as well; it is waited for
    while it writes its checkpoint."""
    interrupted = False
    with subprocess.Popen(command) as job:
        while True:
            try:
                code = job.wait()
            except KeyboardInterrupt:
                interrupted = True
            else:
                return 130 if interrupted else code


def _swept(job: Sequence[str], jobs: Sequence[Sequence[str]]) -> str:
    """What tells a job from the others."""
    return " ".join(o for o in job if any(o not in other for other in jobs))


def _refuse_faulty(
    jobs: Sequence[Sequence[str]], registry: Registry | None, folders: Sequence[str]
) -> None:
    faults = [
        f"job {number + 1} of {len(jobs)} ({_swept(job, jobs)}): {fault}"
        for number, job in enumerate(jobs)
        for fault in check(compose(job, registry=registry, folders=folders)).faults
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def _summary(outcomes: Sequence[tuple[str, str, int, float]], jobs: int) -> None:
    table = Table("run", "overrides", "exit", "seconds", box=None, pad_edge=False)
    for name, swept, code, seconds in outcomes:
        table.add_row(name, swept, str(code), f"{seconds:.1f}")
    Console(highlight=False, soft_wrap=True).print(table, markup=False)
    if len(outcomes) < jobs:
        print(f"{jobs - len(outcomes)} jobs were not started")
