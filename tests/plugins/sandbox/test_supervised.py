"""A box on this machine, whatever isolates it: Python snippets served by a loaded interpreter, and
a supervisor that misbehaves."""

from __future__ import annotations

import asyncio
import marshal
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from miles import Context, SandboxError, Task
from miles_plugins.sandbox import supervised
from miles_plugins.sandbox.labels import running
from miles_plugins.sandbox.none import Unsandboxed
from miles_plugins.sandbox.supervised import Launch, launch

TASK = Task(id="t", prompt="")


def in_box(tmp_path: Path, do, **config):
    """What `do(box)` gives, in a box of the host's own user."""

    async def run():
        box = await Unsandboxed(Unsandboxed.Config(**config), Context(directory=tmp_path)).open(
            TASK
        )
        try:
            return await do(box)
        finally:
            await box.close()

    return asyncio.run(run())


# ---------------------------------------------------------------- snippets

SNIPPETS = {
    "prints": "print('a', 'é'); import sys; print('b', file=sys.stderr)",
    "raises": """
def f():
    1 / 0
try:
    f()
except ZeroDivisionError as error:
    raise KeyError('k') from error
""",
    "syntax": "x = (",
    "exits": "import sys; sys.exit(7)",
    "exits with words": "raise SystemExit('sorry')",
    "exits at once": "import os; print('lost', end=''); os._exit(3)",
    "leaves a file open": "f = open('out', 'w'); f.write('kept')",
    "atexit": "import atexit; atexit.register(print, 'bye'); print('hi')",
    "thread": """
import threading, time
def late():
    time.sleep(0.05)
    print('late')
threading.Thread(target=late).start()
""",
    "names": "print(__name__, sorted(n for n in globals()), __spec__, __doc__, __package__)",
    "main": """
import __main__, pickle
class A:
    x = 1
print(__main__.A is A, pickle.loads(pickle.dumps(A())).x)
""",
    "input": "print(input(), input()); input()",
    "argv": "import sys; print(sys.argv, sys.path[0], sys.flags.isolated, sys.flags)",
    "folder": "import os; print(os.path.basename(os.getcwd())[:2], os.listdir('.'))",
    "environment": "import os; print(os.environ['WORD'], os.environb[b'WORD'], os.getenv('HOME'))",
    "children": "import os; print(os.popen('echo $WORD').read())",
    "pool": "import multiprocessing as m; print(m.get_context('fork').Pool(1).map(abs, [-1]))",
    "signal": "import os; os.kill(os.getpid(), 9)",
    "interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "dispositions": "import signal; print([signal.getsignal(n) for n in (2, 13, 15, 17, 25)])",
    "asyncio": "import asyncio; print(asyncio.run(asyncio.sleep(0, 5)))",
    "hook": "import sys; sys.excepthook = lambda *a: print('own', a[0].__name__); 1/0",
    "imports": "import json, sys; print(json.dumps([1])); print('miles_plugins' in sys.modules)",
    "collector": "import gc; print(gc.isenabled(), gc.get_threshold())",
    "cycle": """
class File:
    def __init__(self):
        self.file, self.own = open('out', 'w'), self
        self.file.write('in a cycle')
    def __del__(self):
        print('deleted', flush=True)
kept = File()
""",
    "own module": """
open('mine.py', 'w').write("f = open('out', 'w'); f.write('of a module')")
import mine
""",
    "c library": "import ctypes; ctypes.CDLL(None).printf(b'buffered')",
    "full": "import os, sys; os.dup2(os.open('/dev/full', 1), 1); print('lost')",
    "other stream": "import io, sys; sys.stdout = io.StringIO(); print('into the void')",
    "closed stream": "import os; os.close(1); print('lost')",
    "daemon": """
import threading, time
threading.Thread(target=lambda: time.sleep(60), daemon=True).start()
print('done')
""",
    "logging": "import logging; logging.warning('said')",
    "private": """
class Last:
    def __del__(self):
        print('last', _early is None)
_early, late = 1, Last()
""",
    "stdout closed": "import sys; sys.stdout.close()",
    "many bytes": "import sys; sys.stdout.buffer.write(bytes(range(256)))",
    "future": "from __future__ import annotations\nx: nothing = 1\nprint(__annotations__)",
    "limit": "import sys; print(sys.getrecursionlimit(), sys.stdout.encoding, sys.stdin.encoding)",
    "random": "import random; random.seed(1); print(random.random(), hash('a') != hash('b'))",
}


def test_snippet_does_what_a_fresh_interpreter_does(tmp_path: Path) -> None:
    env = {"WORD": "w é", "PATH": os.path.dirname(sys.executable) + ":/usr/bin:/bin"}
    fresh = {"PYTHONFAULTHANDLER": ""}  # any such variable asks for a fresh interpreter

    async def one(box, number: int, name: str, more):
        folder = f"in{number}{len(more)}"
        await box.exec(["mkdir", folder])
        argv = ["python3", "-c", SNIPPETS[name], "one", "two"]
        how = {"env": {**env, **more}, "cwd": folder, "stdin": "1\n2\n", "timeout": 60.0}
        result = await box.exec(argv, **how)
        return result, (await box.exec(f"cat {folder}/* 2>/dev/null")).stdout

    async def all_of(box):
        found = {}
        for number, name in enumerate(SNIPPETS):
            found[name] = await asyncio.gather(*(one(box, number, name, m) for m in ({}, fresh)))
        return found

    found = in_box(tmp_path, all_of)
    assert {name: quick for name, (quick, _) in found.items()} == {
        name: slow for name, (_, slow) in found.items()
    }
    assert found["leaves a file open"][0][1] == "kept"
    assert "ZeroDivisionError" in found["raises"][0][0].stderr


def test_snippet_is_served_by_the_loaded_interpreter(tmp_path: Path) -> None:
    path = os.path.dirname(sys.executable) + ":/usr/bin:/bin"
    code = """
import os
lines = [open(f"/proc/{pid}/cmdline").read() for pid in ("self", os.getppid())]
print(lines[0] == lines[1])
"""

    async def do(box):
        ways = [{}, {"PYTHONHASHSEED": "0"}]
        found = [await box.exec(["python3", "-c", code], env={"PATH": path, **w}) for w in ways]
        await box.exec("mkdir .local")
        found.append(await box.exec(["python3", "-c", code], env={"PATH": path}))
        await box.write("bin/python3", b"#!/bin/sh\necho not python\n")
        await box.exec("chmod +x bin/python3")
        home = (await box.exec("pwd")).stdout.strip()
        env = {"PATH": f"{home}/bin:{path}"}
        found.append(await box.exec(["python3", "-c", code], env=env))
        return [result.stdout.strip() for result in found]

    assert in_box(tmp_path, do) == ["True", "False", "False", "not python"]


def test_snippets_do_not_see_what_others_did(tmp_path: Path) -> None:
    async def do(box):
        env = {"PATH": os.path.dirname(sys.executable)}
        await box.exec(
            ["python3", "-c", "import os, sys; os.x = sys.x = 1; os.chdir('/')"], env=env
        )
        code = "import os, sys; print(hasattr(os, 'x'), hasattr(sys, 'x'), os.getcwd() == '/')"
        return await box.exec(["python3", "-c", code], env=env)

    assert in_box(tmp_path, do).stdout == "False False False\n"


# ---------------------------------------------------------------- commands


def test_command_that_cannot_be_run_is_a_result(tmp_path: Path) -> None:
    async def do(box):
        await box.write("plain", b"echo\n")
        commands = (
            ["./plain"],
            ["missing"],
            ["./missing"],
            ["/"],
            ["a\0b"],
            ["echo", "x" * 200_000],
        )
        return [await box.exec(command) for command in commands]

    results = in_box(tmp_path, do)
    assert [r.exit_code for r in results] == [126, 127, 127, 126, 126, 126]
    assert results[0].stderr == "miles: ./plain: Permission denied\n"
    assert results[1].stderr == "miles: missing: command not found\n"
    assert "Argument list too long" in results[5].stderr


def test_command_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one word"):
        in_box(tmp_path, lambda box: box.exec([]))


def test_lone_surrogates_in_a_command_are_replaced(tmp_path: Path) -> None:
    result = in_box(tmp_path, lambda box: box.exec(["echo", "a\ud800b"]))
    assert result.stdout == "a?b\n"


def test_cut_output_keeps_beginning_and_end(tmp_path: Path) -> None:
    result = in_box(tmp_path, lambda box: box.exec("seq 100000"), output_kb=2)
    head, cut, tail = result.stdout.partition("\n[output cut: 586847 bytes left out here]\n")
    assert cut and head.startswith("1\n2\n") and tail.endswith("99999\n100000\n")
    assert len(head) == len(tail) == 1024


@pytest.mark.parametrize("size", [2047, 2048, 2049])
def test_output_is_cut_at_the_limit_and_not_before(tmp_path: Path, size: int) -> None:
    result = in_box(
        tmp_path, lambda box: box.exec(f"head -c {size} /dev/zero | tr '\\0' x"), output_kb=2
    )
    assert ("[output cut: 1 bytes" in result.stdout) == (size == 2049)
    assert result.stdout.count("x") == min(size, 2048)


def test_large_files_go_through_and_larger_are_refused(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 8

    async def do(box):
        await box.write("big", data)
        assert await box.read("big") == data
        await box.exec("echo >> big")
        with pytest.raises(SandboxError, match="cannot read 'big': it is larger than the 8388608"):
            await box.read("big")

    in_box(tmp_path, do, file_mb=8)


# ---------------------------------------------------------------- a supervisor that lies

START = """
import os, struct, time, marshal
REPLY = struct.Struct("!IIBBiQQI")
def reply(number, kind, body=b"", size=None, split=0, flags=1):
    size = REPLY.size - 4 + len(body) if size is None else size
    os.write(0, REPLY.pack(size, number, kind, flags, 0, 0, 0, split) + body)
def start(setup):
    reply(0, 0)
    os.read(0, 65536)
    {lie}
    time.sleep(60)
"""

LIES = {
    "says nothing": ("pass", "did not answer within"),
    "ends": ("os._exit(3)", "it ended"),
    "ends with words": ("os.write(2, b'out of luck'); os._exit(3)", "it ended: out of luck"),
    "announces too much": ("reply(1, 1, size=2**31)", "announced 2147483648 bytes"),
    "announces too little": ("reply(1, 1, size=3)", "announced 3 bytes"),
    "says what there is not": ("reply(1, 9)", "a frame of kind 9"),
    "splits beyond the end": ("reply(1, 1, b'x', split=7)", "a frame of kind 1"),
    "stops in the middle": ("os.write(0, b'\\0\\0\\1'); os._exit(0)", "it ended"),
    "answers something else": ("reply(77, 1)", "did not answer within"),
    "garbage": ("os.write(0, b'HTTP/1.1 200 OK')", "announced 1213486160 bytes"),
}


def lying(code: str) -> Launch:
    names = "miles_plugins.sandbox.inside.commands"
    compiled = marshal.dumps([(names, compile(code, "lie", "exec"))])
    return Launch(
        title="sandbox 'lying'",
        around=(),
        python=sys.executable,
        code=compiled,
        home="/",
        environment={},
        isolated=True,
        timeout_s=0.1,
        open_timeout_s=5,
        output_bytes=1000,
        file_bytes=1000,
    )


@pytest.mark.parametrize("name", LIES)
def test_supervisor_that_lies_ends_in_an_error(name: str, monkeypatch) -> None:
    lie, said = LIES[name]
    monkeypatch.setattr(supervised, "_GRACE_S", 0.3)
    monkeypatch.setattr(supervised, "_CLOSE_S", 0.2)

    async def run():
        box = await launch(lying(START.format(lie=lie)), id="b")
        began = time.monotonic()
        try:
            with pytest.raises(SandboxError, match=said):
                await asyncio.gather(box.exec("true"))
            with pytest.raises(SandboxError):
                await box.exec("true")
        finally:
            await box.close()
        assert time.monotonic() - began < 3

    asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def start(setup):\n import time; time.sleep(60)", "did not start within 0.5 s"),
        ("def start(setup):\n raise RuntimeError('no luck')", "RuntimeError: no luck"),
        (START.format(lie="pass").replace("reply(0, 0)", "reply(0, 0, flags=0)"), "has no _ctypes"),
    ],
)
def test_supervisor_that_does_not_start_is_an_error(code: str, said: str, monkeypatch) -> None:
    monkeypatch.setattr(supervised, "_CLOSE_S", 0.2)
    with pytest.raises(SandboxError, match=said):
        asyncio.run(launch(replace(lying(code), open_timeout_s=0.5), id="b"))


# ---------------------------------------------------------------- none


def test_box_that_cannot_be_started_for_want_of_descriptors_is_an_error(tmp_path, no_descriptors):
    sandbox = Unsandboxed(Unsandboxed.Config(), Context(directory=tmp_path))

    async def run() -> None:
        await (await sandbox.open(TASK)).close()
        with no_descriptors():
            await sandbox.open(TASK)

    with pytest.raises(SandboxError, match=r"cannot start a box: \[Errno 24\] Too many open files"):
        asyncio.run(run())


def test_box_is_closed_without_a_descriptor_to_spare(tmp_path: Path, no_descriptors) -> None:
    sandbox = Unsandboxed(Unsandboxed.Config(), Context(directory=tmp_path))

    async def run() -> None:
        box = await sandbox.open(TASK)
        with no_descriptors():
            await box.close()
        assert box._process.returncode is not None

    asyncio.run(run())


def test_none_says_loudly_that_it_isolates_nothing(tmp_path: Path, caplog) -> None:
    Unsandboxed(Unsandboxed.Config(), Context(directory=tmp_path))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "sandbox 'none' isolates nothing" in record.message
    assert "NO ISOLATION" in (Unsandboxed.__doc__ or "")


RUN = """
import asyncio, sys
from pathlib import Path
from miles import Context, Task
from miles_plugins.sandbox.none import Unsandboxed
async def main():
    sandbox = Unsandboxed(Unsandboxed.Config(), Context(directory=Path(sys.argv[1])))
    box = await sandbox.open(Task(id="t", prompt=""))
    print((await box.exec("pwd; setsid sleep 4545 & sleep 0.1")).stdout, flush=True, end="")
    await box.exec("sleep 4545")
asyncio.run(main())
"""


def of_run(name: str):
    return [(pid, info) for pid, info in running("none") if info.run == name]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "remove"])
def test_none_leaves_nothing_after_the_run_is_killed(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = Path(run.stdout.readline().strip())
    ((_, info),) = of_run(tmp_path.name)
    assert folder.is_dir() and info.id.removeprefix("miles-") in folder.name
    if how == "kill":
        run.kill()
    else:
        sandbox = Unsandboxed(Unsandboxed.Config(), Context(directory=tmp_path))
        asyncio.run(sandbox.remove(info.id))
    run.communicate()
    until = time.monotonic() + 10
    while folder.exists() or of_run(tmp_path.name) or sleeping("4545"):
        assert time.monotonic() < until, (folder.exists(), sleeping("4545"))
        time.sleep(0.05)


def sleeping(seconds: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_text(errors="replace") == f"sleep\0{seconds}\0":
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_none_leaves_no_folder_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    async def do(box):
        home = Path((await box.exec("pwd")).stdout.strip())
        ((pid, _),) = of_run(tmp_path.name)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="failed: it "):
            await box.exec("sleep 10")
        return home

    assert not in_box(tmp_path, do).exists()


def test_none_lists_and_removes_folders_without_a_process(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "miles-none-0123456789-elsewhere.1.2-abcd"
    (left / "deep").mkdir(parents=True)
    sandbox = Unsandboxed(Unsandboxed.Config(), Context(directory=tmp_path))
    found = {info.id: info for info in asyncio.run(sandbox.list())}["miles-0123456789"]
    assert (found.owner, found.state) == ("elsewhere.1.2", "a folder only")
    asyncio.run(sandbox.remove(found.id))
    assert not left.exists()


def test_none_halts_its_own_processes_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "4646"])

    async def do(box):
        await box.exec("setsid sleep 4647 & sleep 0.1")
        assert sleeping("4647")
        await box.halt()
        assert not sleeping("4647")
        return await box.exec("echo alive")

    try:
        assert in_box(tmp_path, do).stdout == "alive\n"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_none_takes_any_time_limit(tmp_path: Path) -> None:
    said = in_box(tmp_path, lambda box: box.exec("sleep 0.1; echo alive", timeout=1e9))
    assert said.stdout == "alive\n"


def test_none_removes_no_more_than_the_box(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")

    async def do(box):
        await box.exec(f"ln -s {kept} link; mkdir -p a/b; touch a/b/c; chmod 500 a/b")

    in_box(tmp_path, do)
    assert (kept / "file").read_text() == "x"
