"""What the tests of a task have beside them in the box: expectations, commands, files.

It is copied there and runs alone, with Python's standard library. The agent's code only ever runs
in processes of its own, so that it cannot end the tests as if they had passed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["expect", "finish", "json_of", "lines", "names", "run", "text", "write"]

_faults: list[str] = []


def expect(what: str, found: Any, wanted: Any) -> None:
    """Note a fault unless they are equal."""
    if found != wanted:
        _faults.append(f"{what}: {found!r} instead of {wanted!r}")


def finish() -> NoReturn:
    """Print the faults, end with 1 if there are any."""
    print("\n".join(_faults) or "good")
    sys.stdout.flush()
    os._exit(1 if _faults else 0)


def run(*argv: str, stdin: str = "", timeout_s: float = 10.0) -> subprocess.CompletedProcess[str]:
    """Run a command in the work directory; one that cannot run or takes too long ends with 127."""
    try:
        return subprocess.run(
            argv, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, 127, "", str(error))


def text(path: str) -> str:
    """A file's text; a note in its place when it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError as error:
        return f"(cannot be read: {error.strerror})"


def lines(path: str) -> Sequence[str]:
    """A file's lines without their ends; a last empty line is not one."""
    found = text(path).split("\n")
    return found[:-1] if found[-1] == "" else found


def json_of(path: str) -> Any:
    """A file's JSON; an object that holds nothing wanted when it is none."""
    try:
        return json.loads(text(path))
    except ValueError as error:
        _faults.append(f"{path}: no JSON: {error}")
        finish()


def names(folder: str) -> list[str]:
    """Names in a folder, sorted; none when there is no folder."""
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def write(path: str, content: str) -> None:
    """A file to test with, folders made as needed."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content)
