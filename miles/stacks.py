"""Where a process stands that does not go on: it says so when it is asked, and where it cannot
answer any more it writes the stacks of all its threads at SIGUSR1, and others read in its log.

Who has waited too long, and what follows, is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from miles.threads import in_thread

__all__ = ["answer_with_stacks", "log_tail", "own_stacks", "stacks_held", "stacks_of"]

ASK_S = 2.0
"""Seconds that a process has for its stacks, which takes it milliseconds."""

_POLL_S = 0.05
_FRAMES = 6  # that are told of a thread
_THREADS = 3  # that are told of a process
_TAIL_BYTES = 65536
_TITLE = "--- the stacks of all threads, asked for because something waits too long:"
_DUMP = re.compile(
    rf"(?:^\n)?^{_TITLE}\n(?:(?:Current thread|Thread) 0x.*\n|  .*\n|\n)*", re.MULTILINE
)
_CURRENT = re.compile(r"^Current thread 0x.*\n(?:  .*\n)*", re.MULTILINE)
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'  File "(.*)", line (\S+) in (.*)$')
_POOL = "concurrent/futures/thread.py"
_OURS = "miles/threads.py"
_LOOP = ("/selectors.py", "/asyncio/", "miles/wire/")
_RUNNERS = (_POOL, _OURS, "asyncio/events.py", "miles/wire/calls.py")
"""What is further out than one of these runs any call alike."""

_Frame = tuple[str, str, str]  # file, line, function


def answer_with_stacks(log: TextIO | int = 2) -> None:
    """From now on SIGUSR1 has this process write all stacks to `log`, by default its standard
    error, and go on. It does so in C, whatever its threads wait for; threads that run meanwhile can
    make it crash (python/cpython issue 116008), so that only who hangs should be asked. Where there
    is no such signal (Windows), nothing changes."""
    if not hasattr(signal, "SIGUSR1"):
        return
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


@contextlib.contextmanager
def stacks_held() -> Iterator[None]:
    """A process that is started inside keeps SIGUSR1 waiting, which would end it, until it can
    answer. Nothing may be awaited inside: it is the thread's state."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def own_stacks() -> str:
    """Write the stacks of all threads to standard error; what all but this one are at, in words.
    They stand still meanwhile, so that it does them no harm."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    print(f"\n{_TITLE}\n{text}", end="", file=sys.stderr, flush=True)
    return _work(_threads(_CURRENT.sub("", text)))


async def stacks_of(process: subprocess.Popen[bytes], log: Path) -> str:
    """Have a child that answers write its stacks to its log; what it is at, in words, after
    `ASK_S` seconds at most. Its own children hear nothing."""
    try:
        return await in_thread(partial(_asked, process, log), name="stacks", timeout_s=2 * ASK_S)
    except TimeoutError:
        return f"no stacks, since {log} does not answer"


def _asked(process: subprocess.Popen[bytes], log: Path) -> str:
    try:
        with log.open("a") as file:
            file.write(f"\n{_TITLE}\n")  # the last line may have no end
            start = file.tell()
        process.send_signal(signal.SIGUSR1)  # nothing happens when it has ended
        text, until = "", time.monotonic() + ASK_S
        while time.monotonic() < until and process.poll() is None:
            time.sleep(_POLL_S)
            before, text = text, _since(log, start)
            if text == before and _threads(text):
                break  # it is whole
    except OSError as error:
        return f"no stacks, since {log} cannot be used: {error.strerror}"
    return _told(_threads(text))


def log_tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, without stacks that were asked for; or why it cannot be read."""
    try:
        text = _since(log, max(0, log.stat().st_size - _TAIL_BYTES))
    except OSError as error:
        return f"({log} cannot be read there: {error})"
    return "\n".join(_DUMP.sub("", text).splitlines()[-lines:])


def _since(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def _threads(text: str) -> list[list[_Frame]]:
    """Frames of every thread, innermost first; the main thread comes last."""
    found: list[list[_Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            found.append([])
        elif found and (frame := _FRAME.match(line)):
            found[-1].append((frame[1], frame[2], frame[3]))
    return found


def _told(threads: Sequence[Sequence[_Frame]]) -> str:
    if not threads:
        why = "as of a process that has not begun, is stopped or has ended"
        return f"no stacks within {ASK_S:g} s, {why}"
    return _work(threads)


def _work(threads: Sequence[Sequence[_Frame]]) -> str:
    # threads at the same place are told once, and so is one that somebody else asked for meanwhile
    work = list(dict.fromkeys(_words(f) for f in reversed(threads) if _works(f)))
    return " and ".join(work[:_THREADS]) or "at no call: its event loop waits, and no thread works"


def _works(frames: Sequence[_Frame]) -> bool:
    if not frames:
        return False
    if frames[-1][2] != "_bootstrap":  # the main thread, whose event loop waits or takes frames
        return not any(place in frames[0][0] for place in _LOOP)
    places = ((_POOL, "run"), (_OURS, "_outcome"))
    return any(f.endswith(file) and name == of for f, _, name in frames for file, of in places)


def _words(frames: Sequence[_Frame]) -> str:
    """The innermost frames, as `at folder/file.py:line inner < outer < ...`."""
    ends = (i for i, frame in enumerate(frames) if i and frame[0].endswith(_RUNNERS))
    own = frames[: next(ends, len(frames))]
    calls = [name for _, _, name in own[:_FRAMES]] + ["..."] * (len(own) > _FRAMES)
    return f"at {'/'.join(Path(own[0][0]).parts[-2:])}:{own[0][1]} {' < '.join(calls)}"
