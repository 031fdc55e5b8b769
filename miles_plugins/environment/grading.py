"""Slow rewards in a child process that is killed when a deadline passes.

Both ends of the pipe are here: `Grader` for the environment, and `main` for the child. Only
built-in rewards are run this way, by name; a plugin's function has a thread, which can be left
behind but not killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from miles import EpisodeError, Task
from miles_plugins.environment.rewards import REWARDS

_START_S = 120.0  # importing sympy on a busy machine
_GRACE_S = 5  # how long a child whose parent is gone may go on after its deadline

Child = subprocess.Popen[bytes]


class Grader:
    """Runs built-in rewards in child processes, which live from the first call until the grader is
    forgotten.

    A text whose grading takes longer than `deadline_s`, or kills the child, is worth 0 with the
    metric `reward_killed` at 1: it is the policy's doing. One grader may be used from several event
    loops.
    """

    def __init__(self, *, environment: str, deadline_s: float, processes: int = 1) -> None:
        self._environment = environment
        self._deadline_s = deadline_s
        self._children: list[Child] = []
        self._mine = threading.local()  # each thread has a child of its own
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="grader")
        weakref.finalize(self, _stop, self._children, self._threads)

    async def __call__(
        self, reward: str, text: str, task: Task, **options: str
    ) -> tuple[float, Mapping[str, float]]:
        """The reward of that name. Raises `EpisodeError` when it raises or nothing can run it."""
        job = {"reward": reward, "text": text, "answer": task.answer, "options": options}
        line = json.dumps(job, default=str).encode() + b"\n"
        answer = await asyncio.get_running_loop().run_in_executor(
            self._threads, partial(self._ask, line)
        )
        if answer is None:
            return 0.0, {"reward_killed": 1.0}
        found = json.loads(answer)
        if "error" in found:
            raise EpisodeError(
                f"environment {self._environment!r}: reward {reward!r} raised {found['error']}"
            )
        return found["value"], {"reward_killed": 0.0}

    def _ask(self, line: bytes) -> bytes | None:
        """The child's answer, None when it had to be killed. Runs in a thread of its own."""
        child: Child | None = getattr(self._mine, "child", None)
        if child is None or child.poll() is not None:
            child = self._mine.child = self._start()
        answer = None
        try:
            child.stdin.write(line)
            child.stdin.flush()
            answer = _line(child, self._deadline_s)
        except BrokenPipeError:  # it died between two jobs
            pass
        if not answer:
            _end(child)
            self._children.remove(child)
        return answer or None

    def _start(self) -> Child:
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(math.ceil(self._deadline_s) + _GRACE_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        except OSError as error:
            raise EpisodeError(
                f"environment {self._environment!r}: cannot start a grading process: {error}"
            ) from error
        if _line(child, _START_S) != b"ready\n":
            _end(child)
            raise EpisodeError(
                f"environment {self._environment!r}: the grading process did not start; see its "
                "output"
            )
        self._children.append(child)
        return child


def _line(child: Child, seconds: float) -> bytes:
    """The next line, empty when the time is over or the child is gone."""
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)
    return child.stdout.readline() if poll.poll(seconds * 1000) else b""


def _end(child: Child) -> None:
    child.kill()
    child.communicate()  # closes the pipes and waits


def _stop(children: list[Child], threads: ThreadPoolExecutor) -> None:
    for child in children:
        _end(child)
    threads.shutdown(wait=False)


def main() -> None:
    """Answer jobs, one JSON line each, until standard input ends. `argv[1]`: seconds one job may
    take."""
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns at every call that its alarms are off
    seconds = int(sys.argv[1])
    out = sys.stdout
    sys.stdout = sys.stderr  # a library that prints must not answer
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        task = Task(id="", prompt="", answer=job["answer"])
        # no handler: the kernel ends this process even inside one long C call
        signal.alarm(seconds)
        try:
            value = float(REWARDS[job["reward"]](job["text"], task, **job["options"]))
            answer = {"value": value}
        except Exception as error:  # noqa: BLE001 - the boundary; who asked raises it again
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
