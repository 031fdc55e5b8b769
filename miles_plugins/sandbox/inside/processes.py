"""Processes as `/proc` shows them: whose descendants they are, what memory they hold, and killing
them with all that they started.

Knows nothing of commands, limits or the host.
"""

import _signal
import os

__all__ = ["adopt_orphans", "kill_tree", "memory_at_most", "memory_in_all", "set_dumpable"]


def set_dumpable(value):
    """Whether other processes of this user may trace this one, and read its memory and files."""
    return _prctl(4, value)


def adopt_orphans():
    """Make this process the parent of descendants whose own parent ends; stays so over an exec."""
    return _prctl(36, 1)


def end_process():
    """End this process as C's `exit` does, without taking the interpreter apart."""
    _call("exit", 0)
    os._exit(0)


def _prctl(option, value):
    """False where that is not to be had."""
    return _call("prctl", option, value, 0, 0, 0) == 0


def _call(name, *arguments):
    """A function of the C library; None where the interpreter comes without `_ctypes`, or the
    system without the function."""
    try:
        import _ctypes  # ctypes itself takes milliseconds to import

        function = _ctypes.dlsym(_ctypes.dlopen(None, 0), name)
        return _ctypes.call_cdeclfunction(function, arguments)
    except (ImportError, AttributeError, OSError):
        return None


def kill_tree(root):
    """Kill a process with its descendants; of this process, only the descendants.

    All are stopped before any is killed, so that none starts another meanwhile. Returns what was
    killed, and whether that was all: False when new ones kept appearing.
    """
    stopped = set()
    for _ in range(20):
        found = _descendants(root)
        if root != os.getpid():
            found.add(root)
        found -= stopped
        if not found:
            break
        _signal_all(found, _signal.SIGSTOP)
        stopped |= found
    _signal_all(stopped, _signal.SIGKILL)
    return stopped, not found


def memory_in_all():
    """Bytes that all processes shown but this one hold, files left out.

    Pages that processes share are counted once, which is slow; the caller
    asks `memory_at_most` first.
    """
    return _memory("smaps_rollup", (b"Pss_Anon", b"Pss_Shmem"))


def memory_at_most():
    """As `memory_in_all`, quicker: shared pages count for each of their processes."""
    return _memory("status", (b"RssAnon", b"RssShmem"))


def _memory(file, keys):
    total, own = 0, os.getpid()
    for pid in _pids():
        if pid == own:
            continue
        try:
            with open(f"/proc/{pid}/{file}", "rb") as lines:
                for line in lines:
                    if line.startswith(keys):
                        total += int(line.split()[1]) * 1024
        except (OSError, IndexError, ValueError):
            continue  # gone meanwhile
    return total


def _pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _descendants(root):
    parents = {}
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                parents[pid] = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # gone meanwhile
    found = {root}
    while True:
        more = {p for p, parent in parents.items() if parent in found} - found
        if not more:
            return found - {root}
        found |= more


def _signal_all(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue  # gone meanwhile
