"""A process that does not go on says where it stands, and one that is asked goes on."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles import Context, Settings, Spec, WorkerError, log_tail
from miles.cli import main
from miles.plugins import Registry
from miles.stacks import _TITLE, _threads, _told
from miles.wire.calls import whereabouts

PLUGIN = '''
"""A precision whose methods wait for what never comes."""
import asyncio, subprocess, threading, time
from dataclasses import dataclass
from miles import Budget

never = threading.Lock()
never.acquire()


def descend(depth):
    if depth:
        descend(depth - 1)
    else:
        never.acquire()  # in C, without the interpreter's lock


class Stuck:
    """Waits."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Nothing."""

    def __init__(self, config, context):
        self.rank = context.rank
        self.master = self.compute = self.engine = self.export = "float32"
        self.residual = self.logits = "float32"
        self.budget = Budget(max=1.0, mean=1.0)
        self.scaling = None

    def fingerprint(self): return "stuck"

    async def in_the_loop(self):
        time.sleep(1000)  # blocks the event loop, and the heartbeats with it

    def in_a_call(self):
        descend(2)

    def deep(self):
        descend(20)

    async def awaiting(self):
        await asyncio.sleep(1000)

    def apart(self):
        descend(1) if self.rank == 1 else self.together()

    def together(self):
        never.acquire()

    def work(self):
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            exec(compile("def f(x): return [x] * 9", "made", "exec"), {})  # and throws it away
        return "done"

    def child(self):
        return subprocess.Popen(["sleep", "60"]).pid


miles_components = {"precision": {"stuck": Stuck}}
'''
STOP = {"stop_timeout_s": 0.2}
PARTS = [Spec(kind="precision", name="stuck")]


def run(tmp_path: Path, body: Callable[[Any, Context], Any], *, silent_after_s: float = 60) -> None:
    """`body(runtime, context)`, with a local runtime that is stopped afterwards."""
    (plugin := tmp_path / "stuck_plugin.py").write_text(PLUGIN)
    registry = Registry.load(files=[plugin])
    context = Context(
        directory=tmp_path,
        settings=Settings(silent_after_s=silent_after_s),
        plugins={"selection": registry.selection},
    )

    async def main() -> None:
        runtime = registry.build(Spec(kind="runtime", name="local", config=STOP), context)
        try:
            await body(runtime, context)
        finally:
            await runtime.stop()

    asyncio.run(main())


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def status(number: int) -> str:
    return Path(f"/proc/{number}/status").read_text()


# ---------------------------------------------------------------- given up


@pytest.mark.slow
def test_worker_that_blocks_its_event_loop_says_where(tmp_path: Path) -> None:
    """It was "still running", for as long as nobody killed it."""

    async def body(runtime: Any, context: Context) -> None:
        handle = await runtime.start("one", PARTS, context)
        with pytest.raises(WorkerError) as found:
            await handle.call("precision.in_the_loop")
        said = (
            r"one: the worker process sent nothing for \d s \(silent_after_s is 3\) and owes "
            r"precision\.in_the_loop, \d s, at .+/stuck_plugin\.py:\d+ in_the_loop "
            r"\(is still running\); see .*/logs/one\.log$"
        )
        assert re.match(said, str(found.value)), str(found.value)
        assert "most recent call" not in found.value.detail  # the note has what it said before
        assert "in in_the_loop\n" in (tmp_path / "logs" / "one.log").read_text()

    run(tmp_path, body, silent_after_s=3)


def test_call_past_its_limit_says_where_and_spares_children(tmp_path: Path) -> None:
    async def body(runtime: Any, context: Context) -> None:
        handle = await runtime.start("one", PARTS, context)
        child = await handle.call("precision.child")
        late = r"one: precision\.{0} did not answer within 0\.2 s, at {1}; see .*/one\.log$"
        with pytest.raises(
            WorkerError, match=late.format("awaiting", "no call: its event loop .*")
        ):
            await handle.call("precision.awaiting", timeout=0.2)
        at = r".+/stuck_plugin\.py:\d+ descend < descend < descend < in_a_call"
        with pytest.raises(WorkerError, match=late.format("in_a_call", at)):
            await handle.call("precision.in_a_call", timeout=0.2)
        assert re.match(r"at .*descend < in_a_call$", await handle.where())
        state = status(child)
        assert "SigBlk:\t0000000000000000" in state and "State:\tS" in state

    run(tmp_path, body)


def test_ranks_that_wait_for_one_another_tell_which_is_elsewhere(tmp_path: Path) -> None:
    async def body(runtime: Any, context: Context) -> None:
        handle = await runtime.start("rank", PARTS, context, world=3)
        with pytest.raises(WorkerError, match=r"rank-\d: precision\.apart did not") as found:
            await handle.call_all("precision.apart", timeout=0.3)
        (note,) = found.value.__notes__
        said = (
            r"what its ranks are at: rank-1: at \S+:\d+ descend < descend < apart; "
            r"rank-0, rank-2: at \S+:\d+ together < apart"
        )
        assert re.fullmatch(said, note), note

    run(tmp_path, body)


def test_worker_that_can_answer_says_where_it_is_without_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ends one that works now and then, as all that are slow do."""

    def signalled(self: Any, number: int) -> None:
        raise AssertionError(f"signal {number}")

    async def body(runtime: Any, context: Context) -> None:
        handle = await runtime.start("busy", PARTS, context)
        said = [await handle.where()]
        async with asyncio.timeout(20):
            while said[-1] != "at no call: its event loop waits, and no thread works":
                said.append(await handle.where())  # the thread that built it is at its last words
        working = asyncio.create_task(handle.call("precision.work"))
        while not working.done():
            said.append(await handle.where())
            await asyncio.sleep(0.05)
        assert await working == "done"
        assert any(re.match(r"at .*stuck_plugin.py:\d+ .*work$", words) for words in said), said
        log = (tmp_path / "logs" / "busy.log").read_text()
        assert log.count(_TITLE) == len(said) and "in work" in log

    monkeypatch.setattr(subprocess.Popen, "send_signal", signalled)
    run(tmp_path, body)


@pytest.mark.slow
def test_worker_that_takes_no_signal_is_not_waited_for_long(tmp_path: Path) -> None:
    async def body(runtime: Any, context: Context) -> None:
        handle = await runtime.start("one", PARTS, context)
        handle.ranks[0]._process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(
            WorkerError, match=r"within 0\.1 s, no stacks within 2 s, as of a process"
        ):
            await handle.call("precision.fingerprint", timeout=0.1)
        assert time.monotonic() - began < 4

    run(tmp_path, body)


# ---------------------------------------------------------------- asked


def test_sigusr1_leaves_a_worker_working_from_before_it_can_answer(tmp_path: Path) -> None:
    """Its default would end a process that has not said yet what to do about it."""

    async def body(runtime: Any, context: Context) -> None:
        starting = asyncio.create_task(runtime.start("one", PARTS, context))
        await asyncio.sleep(0)
        (process,) = runtime._processes
        process._process.send_signal(signal.SIGUSR1)  # Python itself has hardly begun
        handle = await starting
        log = tmp_path / "logs" / "one.log"
        assert " in _run_module_as_main\n" in (before := log.read_text())
        process._process.send_signal(signal.SIGUSR1)
        until(lambda: log.read_text().count(" in _run_module_as_main\n") == 2)
        assert log.read_text().startswith(before)
        assert await handle.call("precision.fingerprint") == "stuck"

    run(tmp_path, body)
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_sigusr1_leaves_the_driver_working_with_its_stacks_in_its_log(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib, logging.config, miles.cli, miles.run\n"
        "miles.cli.main(['--version'])\n"
        "sys.stdin.readline()\n"
        "miles.run.log_to(pathlib.Path('logs/driver.log'))\n"
        "logging.config.dictConfig({'version': 1})\n"  # as libraries do: it closes all handlers
        "other = open('other', 'w')\n"
        "print('logs', flush=True)\n"
        "print(sys.stdin.readline())\n"
    )
    pipe = subprocess.PIPE
    driver = subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        cwd=tmp_path,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )
    assert driver.stdout is not None and driver.stdin is not None and driver.stderr is not None
    assert driver.stdout.readline().startswith("miles ")
    driver.send_signal(signal.SIGUSR1)
    assert "most recent call first" in driver.stderr.readline()
    driver.stdin.write("\n")
    driver.stdin.flush()
    assert driver.stdout.readline() == "logs\n"
    driver.send_signal(signal.SIGUSR1)
    until(lambda: " in <module>\n" in (tmp_path / "logs" / "driver.log").read_text())
    out, _ = driver.communicate("goes on", timeout=20)
    assert (out.strip(), driver.returncode) == ("goes on", 0)
    assert (tmp_path / "other").read_text() == ""  # it was where the log's descriptor had been


def test_commands_work_where_there_is_no_such_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On Windows even `miles plugins list` ended with an `AttributeError`."""
    monkeypatch.delattr(signal, "SIGUSR1")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("miles ")


# ---------------------------------------------------------------- what is read in a log

DUMP = """\
Thread 0x00007f0000000003 [call_0] (most recent call first):
  File "/x/site-packages/torch/distributed/c10d.py", line 9 in wait
  File "/x/miles_plugins/transport/broadcast.py", line 96 in _reached
  File "/x/miles/wire/calls.py", line 252 in _called
  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 58 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 81 in _worker
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f0000000004 (most recent call first):
  <no Python frame>

Current thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "<frozen runpy>", line 198 in _run_module_as_main
"""


def test_threads_that_wait_for_work_are_not_told() -> None:
    assert _told(_threads(DUMP)) == "at distributed/c10d.py:9 wait < _reached"
    no_work = DUMP[DUMP.index("Thread 0x00007f0000000002") :]
    assert _told(_threads(no_work)) == "at no call: its event loop waits, and no thread works"
    deep = DUMP.replace("in select", "in select\n" + '  File "/x/y.py", line 1 in f\n' * 9)
    deep = deep.replace("/usr/lib/python3.11/selectors.py", "/x/z/own.py")
    assert _told(_threads(deep)).startswith("at z/own.py:468 select < f < f < f < f < f < ... and ")


def test_worker_that_several_ask_at_once_says_where_it_is_once() -> None:
    """Its log has an answer to each, and every one of them was told, by who asked first."""
    cut = DUMP[DUMP.index("line 96") :]  # the question came in the middle of another's answer
    assert _told(_threads(cut + DUMP + DUMP)) == "at distributed/c10d.py:9 wait < _reached"


@given(st.lists(st.text("ab\n:", max_size=9)), st.lists(st.text("ab ", max_size=9), min_size=1))
def test_log_tail_is_that_of_a_log_without_stacks(
    tmp_path_factory: pytest.TempPathFactory, before: list[str], after: list[str]
) -> None:
    log = tmp_path_factory.getbasetemp() / "tail.log"
    first, last = "".join(f"{line}\n" for line in before), "".join(f"x{line}\n" for line in after)
    log.write_text(first + last)
    plain = log_tail(log)
    log.write_text(f"{first}\n{_TITLE}\n{DUMP}{last}")
    assert log_tail(log) == plain
    log.write_text(f"{first}x\n{_TITLE}\n{DUMP}")  # x was half a line
    assert log_tail(log).splitlines() == [*first.splitlines(), "x"][-15:]
    assert log_tail(log.with_name("none.log")).startswith(f"({log.parent}/none.log cannot be read")


@given(st.lists(st.sampled_from(["at a", "at b", "no stacks"]), min_size=2, max_size=20))
def test_whereabouts_count_every_rank_once(words: list[str]) -> None:
    class Rank:
        def __init__(self, name: str, words: str) -> None:
            self.name, self.words = name, words

        async def where(self) -> str:
            return self.words

    said = asyncio.run(whereabouts([Rank(f"r{i}", w) for i, w in enumerate(words)]))
    told = [part.split(": ") for part in said.split("; ")]
    assert sorted(w for _, w in told) == sorted(set(words))
    counts = [
        len(re.findall(r"r\d", names)) + sum(map(int, re.findall(r"and (\d+) more", names)))
        for names, _ in told
    ]
    assert counts == sorted(counts) == [words.count(w) for _, w in told]
