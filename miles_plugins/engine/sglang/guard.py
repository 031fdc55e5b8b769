"""Runs one command in a process group of its own and ends all of it when whoever started it is
gone.

`python guard.py COMMAND...`: the end of its standard input, which its starter holds open, is the
order to stop; so is any death of that starter, whom the kernel then closes the pipe for. Standard
library alone, and no import of miles: it runs by its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 3.0  # between asking and killing


def _die_with(parent: int) -> None:
    """In the child: the kernel kills it when the guard is gone (Linux)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def main(command: list[str]) -> int:
    """Run until the command ends, giving its exit status, or standard input does."""
    own = os.getpid()
    if os.getpgrp() != own:
        os.setsid()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _die_with(own))
    while child.poll() is None:
        ready, _, _ = select.select([sys.stdin], [], [], 0.2)
        if ready and not os.read(sys.stdin.fileno(), 4096):
            break
    if child.poll() is None:
        child.terminate()
        end = time.monotonic() + GRACE_S
        while child.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
    status = child.poll()
    print(f"guard: the server ended with {status}", flush=True)
    _end_others(own)
    return 1 if status is None or status < 0 else status


def _end_others(own: int) -> None:
    """Kill what is left of the group; the guard itself only stops at the very end."""
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not entry.isdigit() or int(entry) == own:
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours
            if os.getpgid(int(entry)) == own:
                os.kill(int(entry), signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main(sys.argv[1:]))
