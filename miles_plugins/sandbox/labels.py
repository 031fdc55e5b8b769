"""Finds this machine's boxes again: a label among the words of the process that holds one.

Nothing is kept on disk for that, so nothing can be stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import time
from pathlib import Path

from miles import BoxInfo, SandboxError, process_identity

__all__ = ["end", "label", "running"]

_MARK = "miles-box "
_END_S = 10.0


def label(sandbox: str, id: str, run: str) -> str:
    """A word for the command line of a box's outermost process; it holds no `=`."""
    said = {"sandbox": sandbox, "id": id, "owner": _own(), "run": run, "at": round(time.time())}
    return _MARK + json.dumps(said).replace("=", "~")


@functools.lru_cache(maxsize=1)
def _own() -> str:
    return process_identity()


def running(sandbox: str) -> list[tuple[int, BoxInfo]]:
    """Boxes of a sandbox with the processes that hold them, of every user, oldest number first."""
    found: dict[str, tuple[int, BoxInfo]] = {}
    for pid in sorted(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # gone meanwhile
        if _MARK.encode() not in line:
            continue
        for word in line.decode(errors="replace").split("\0"):
            info = _info(word, sandbox) if word.startswith(_MARK) else None
            if info is not None:
                found.setdefault(info.id, (pid, info))
    return list(found.values())


def _info(word: str, sandbox: str) -> BoxInfo | None:
    try:
        said = json.loads(word.removeprefix(_MARK))
        if said["sandbox"] != sandbox:
            return None
        return BoxInfo(
            id=said["id"], owner=said["owner"], run=said["run"], created=float(said["at"])
        )
    except (ValueError, KeyError, TypeError):
        return None  # a command line that only looks like ours


async def end(sandbox: str, id: str, signal: int) -> None:
    """Signal the process that holds a box until it is gone. Raises `SandboxError` when it stays."""
    until = time.monotonic() + _END_S
    while pids := [pid for pid, info in running(sandbox) if info.id == id]:
        if time.monotonic() > until:
            raise SandboxError(
                f"sandbox {sandbox!r}: box {id} cannot be removed: process {pids[0]} does not end; "
                "is it another user's?"
            )
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pids[0], signal)
        await asyncio.sleep(0.02)
