"""Says which process made something that can outlive it, and whether that process is still there.

For labels of what lives elsewhere (boxes at a provider, folders): it stops nothing and removes
nothing.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

__all__ = ["process_alive", "process_identity"]


def process_identity(pid: int | None = None) -> str:
    """`HOST.PID.START` of a process of this machine, by default this one; START tells it from a
    later process with the same number. Letters, digits, `-`, `_` and `.` only."""
    pid = os.getpid() if pid is None else pid
    return f"{_host()}.{pid}.{_started(pid) or 0}"


def process_alive(identity: str) -> bool | None:
    """Whether the process of `process_identity` still runs; None when that cannot be known: it is
    of another machine, or the text is none of ours."""
    host, _, rest = identity.rpartition(".")[0].rpartition(".")
    start = identity.rpartition(".")[2]
    if host != _host() or not rest.isdigit() or not start.isdigit():
        return None
    found = _started(int(rest))
    if found is not None:
        return int(start) in (0, found)
    if Path("/proc/self/stat").exists():
        return False
    try:  # no /proc: a number in use may be another process's by now, so only absence is sure
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return None


def _host() -> str:
    name = socket.gethostname() or "localhost"
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)[:64]


def _started(pid: int) -> int | None:
    """Clock ticks from boot to its start; None when it is not there, or is only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
