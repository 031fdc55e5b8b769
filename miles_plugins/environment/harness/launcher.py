"""Runs one command and ends it with everything it started, also when whoever asked is killed.

A script of its own with nothing but the standard library: `launcher.py PARENT_PID COMMAND...`. It
adopts orphans of the command (a "subreaper"), so that none of them escapes. It is two processes,
one above the other: a command that kills its parent leaves its daemons to the one above. Against
one that hunts both nothing here helps: what is hostile belongs in a sandbox.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from types import FrameType

_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl(2)
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def children() -> list[int]:
    """Processes whose parent is this one, ended ones included."""
    found, me = [], os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == me:
            found.append(int(name))
    return found


def end_all(seconds: float = 10.0) -> None:
    """Kill every descendant: orphans come to this process, which kills them in turn."""
    deadline = time.monotonic() + seconds
    while (pids := children()) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _stop(number: int, frame: FrameType | None) -> None:
    end_all()
    os._exit(128 + number)


def _adopt(parent: int) -> None:
    """Die with the parent, and get the orphans of all descendants."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for number in _ASKED:
        signal.signal(number, _stop)
    prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    prctl(_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:  # it died before that was set
        os._exit(128 + signal.SIGTERM)


def _wait_for(child: int) -> int:
    """Its exit code, 128 and the signal's number if it died of one; others that end are reaped."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def run(parent: int, command: list[str]) -> int:
    """The command's exit code, 128 and the signal's number if it died of one, 127 if it could not
    be started."""
    _adopt(parent)
    me = os.getpid()
    child = os.fork()
    if not child:
        os.setsid()
        for number in _ASKED:
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != me:
            os._exit(127)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)
    code = _wait_for(child)
    end_all()
    return code


def main(argv: list[str]) -> int:
    """As `run`, which a child does; what that leaves when it is killed is ended."""
    _adopt(int(argv[1]))
    me = os.getpid()
    child = os.fork()
    if not child:
        os._exit(run(me, argv[2:]))
    code = _wait_for(child)
    end_all()
    return code


if __name__ == "__main__":
    os._exit(main(sys.argv))
