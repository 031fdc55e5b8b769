"""What every sandbox must do: run commands, keep boxes apart, kill what runs too long, and leave
nothing behind.

How strongly it isolates is its own tests' business; commands here need a POSIX shell and nothing
else.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from miles.errors import SandboxError
from miles.identity import process_identity
from miles.protocols import ExecResult, Inventory
from miles.testing.contract.case import Case, expect, inapplicable, raises
from miles.types import Task

BYTES = bytes(range(256)) * 33


async def check_exec(case: Case) -> None:
    """It runs argv as it is and a string in a shell; both streams and the exit code come back, and
    a code other than 0, or a signal, is a result."""
    async with _box(case) as box:
        await _says(box, ["echo", "a  b", "$HOME;"], "a  b $HOME;\n")
        await _says(box, "echo one; echo two | tr a-z A-Z", "one\nTWO\n")
        result = await _exec(box, "echo out; echo err >&2; exit 3")
        found = (result.stdout, result.stderr, result.exit_code, result.timed_out)
        expect(found == ("out\n", "err\n", 3, False), f"a command that exits with 3 gave {found}")
        result = await _exec(box, "kill -9 $$")
        killed = result.exit_code == 137 and not result.timed_out
        expect(killed, f"a command that signal 9 ends gave {result.exit_code}, not 128 + 9")
        result = await _exec(box, ["no-such-command-anywhere"])
        expect(result.exit_code != 0, "a command that does not exist exits with 0")
        result = await _exec(box, "printf '\\377\\376ok'")
        expect(result.stdout.endswith("ok"), f"invalid bytes gave {result.stdout!r}")


async def check_exec_around(case: Case) -> None:
    """Working directory, environment and standard input are as asked for, for that command
    alone."""
    async with _box(case) as box:
        await _says(box, "mkdir -p deep/er && cd deep/er && pwd > where", "")
        await _says(box, "cat where | sed 's:.*/deep:deep:'", "deep/er\n", cwd="deep/er")
        place = (await box.read("deep/er/where")).decode().strip()
        await _says(box, "pwd", f"{place}\n", cwd=place)
        result = await _exec(box, "echo in", cwd="no/such/folder")
        expect(result.exit_code != 0, "a command in a folder that does not exist exits with 0")
        await _says(box, 'echo "$MILES_WORD"', "é $x\n", env={"MILES_WORD": "é $x"})
        await _says(box, 'echo "[$MILES_WORD]"', "[]\n")
        await _says(box, "cat", "line\nno end", stdin="line\nno end")
        await _says(box, "cat", "")
        await _says(box, "wc -c | tr -d ' '", "300000\n", stdin="x" * 300_000)
        await _says(box, "head -c 1", "x", stdin="x" * 300_000)


async def check_own_environment(case: Case) -> None:
    """Nothing of this process's environment reaches a command, keys least of all."""
    name, value = "MILES_CONTRACT_KEY", "sk-0123456789abcdef"
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        async with _box(case) as box:
            result = await _exec(box, "env")
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    found = [line for line in result.stdout.splitlines() if value in line]
    expect(not found, f"a command finds {found} in its environment")


async def check_state_stays(case: Case) -> None:
    """Files stay from one command to the next."""
    async with _box(case) as box:
        await _says(box, "echo kept > kept.txt", "")
        await _says(box, "cat kept.txt", "kept\n")


async def check_read_write(case: Case) -> None:
    """Files go in and out byte for byte, folders made as needed; a file that is not there, or is a
    folder, is a `SandboxError`."""
    async with _box(case) as box:
        files = (("plain", BYTES), ("new/folder/é b", b"x"), ("plain", b""), ("big", BYTES * 120))
        for path, data in files:
            await box.write(path, data)
            back = await box.read(path)
            expect(back == data, f"{len(data)} bytes written to {path!r}, {len(back)} read")
        await box.write("seen", b"from outside\n")
        await _says(box, "cat seen", "from outside\n")
        await _says(box, "printf 'from inside' > made", "")
        expect(await box.read("made") == b"from inside", "a file made by a command reads otherwise")
        place = (await _exec(box, "pwd")).stdout.strip()
        await box.write(f"{place}/full", b"path")
        expect(await box.read("full") == b"path", "a file written by its full path is elsewhere")
        with raises(SandboxError, "reading a file that is not there"):
            await box.read("no/such/file")
        with raises(SandboxError, "reading a folder"):
            await box.read("new")
        with raises(SandboxError, "writing to a folder"):
            await box.write("new", b"x")


async def check_timeout(case: Case) -> None:
    """A command that runs too long is killed with everything it started, in other sessions too; the
    box lives on."""
    async with _box(case) as box:
        began = time.monotonic()
        tick = "for _ in $(seq 200); do echo x >> ticks; sleep 0.05; done"
        away = f"if command -v setsid >/dev/null; then setsid sh -c '{tick}' & fi; "
        line = f"echo early; ({tick}) & ({tick} </dev/null >/dev/null 2>&1 &) ; {away}sleep 60"
        result = await _exec(box, line, timeout=0.7)
        took = time.monotonic() - began
        expect(result.timed_out, "a command past its timeout is not marked as timed out")
        expect(took < 20, f"a timeout of 0.7 s took {took:.0f} s")
        expect("early" in result.stdout, "what was said before the timeout is lost")
        await _no_more_ticks(box, "the timeout")
        await _says(box, "echo alive", "alive\n")


async def check_much_output(case: Case) -> None:
    """Endless output is capped, and says so with `[output cut`: the command ends, what comes back
    is bounded, and the other stream is whole."""
    async with _box(case) as box:
        for to, name in (("", "stdout"), (" >&2", "stderr")):
            result = await _exec(box, f"yes miles | head -c 20000000{to}; exit 4", timeout=60.0)
            expect(result.exit_code == 4, f"20 MB of {name} end with exit code {result.exit_code}")
            said = {"stdout": result.stdout, "stderr": result.stderr}
            full = said.pop(name)
            size = len(full)
            expect(0 < size < 5_000_000, f"20 MB of {name} came back as {size} characters")
            expect("[output cut" in full, f"{name} was cut and does not say `[output cut`")
            expect(full.startswith("miles\nmiles\n"), f"{name} does not begin as it began")
            expect(not any(said.values()), f"with much {name}, the other is {said}")
        result = await _exec(box, "echo short")
        expect("output cut" not in result.stdout, "a short output says that it was cut")


async def check_side_by_side(case: Case) -> None:
    """Commands of one box run at the same time, each with its own output and end."""
    async with _box(case) as box:
        began = time.monotonic()
        lines = [f"sleep 0.5; echo {i}; echo {i} >&2; exit {i}" for i in range(4)]
        results = await asyncio.gather(*(_exec(box, line) for line in lines))
        took = time.monotonic() - began
        found = [(r.stdout, r.stderr, r.exit_code) for r in results]
        wanted = [(f"{i}\n", f"{i}\n", i) for i in range(4)]
        expect(found == wanted, f"4 commands at the same time gave {found}")
        expect(took < 1.9, f"4 commands of 0.5 s at the same time took {took:.1f} s")


async def check_boxes_apart(case: Case) -> None:
    """Boxes open at the same time do not see each other's files; commands in them run at the same
    time."""
    sandbox = case.build()
    one, two = await asyncio.gather(sandbox.open(_task()), sandbox.open(_task()))
    try:
        await one.write("secret", b"1")
        result = await _exec(two, "cat secret")
        expect(result.exit_code != 0, "one box sees the other's file")
        began = time.monotonic()
        await asyncio.gather(*(_exec(b, "sleep 1") for b in (one, two)))
        took = time.monotonic() - began
        expect(took < 1.9, f"two commands of 1 s in two boxes took {took:.1f} s")
    finally:
        await asyncio.gather(one.close(), two.close())


async def check_close(case: Case) -> None:
    """`close` may be called twice, also at once; a closed box is a `SandboxError`."""
    box = await case.build().open(_task())
    await asyncio.gather(box.close(), box.close())
    await box.close()
    with raises(SandboxError, "a command in a closed box"):
        await box.exec(["true"])
    with raises(SandboxError, "reading in a closed box"):
        await box.read("file")
    with raises(SandboxError, "writing in a closed box"):
        await box.write("file", b"")


async def check_close_while_busy(case: Case) -> None:
    """Closing does not wait for what runs: that ends, as a result or a `SandboxError`."""
    box = await case.build().open(_task())
    task = asyncio.ensure_future(box.exec("sleep 60"))
    await asyncio.sleep(0.2)
    await asyncio.wait_for(box.close(), 30)
    await asyncio.wait([task], timeout=30)
    expect(task.done(), "a command went on for 30 s after its box was closed")
    error = task.exception()
    expect(
        error is None or isinstance(error, SandboxError),
        f"a command whose box is closed raised {error!r}",
    )


async def check_cancelled(case: Case) -> None:
    """Cancelling a command ends it and frees the box: another one runs, and closing is quick."""
    async with _box(case) as box:
        line = "for _ in $(seq 200); do echo x >> ticks; sleep 0.05; done"
        task = asyncio.ensure_future(box.exec(line))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.wait([task], timeout=20)
        expect(task.cancelled(), "a cancelled command did not end as cancelled within 20 s")
        await _no_more_ticks(box, "it was cancelled")
        await _says(box, "echo alive", "alive\n")


async def check_inventory(case: Case) -> None:
    """Where boxes can be listed: an open one is there with its owner, a closed one is not, and
    `remove` ends one, whoever holds it."""
    sandbox = case.build()
    inventory: Any = sandbox
    if not isinstance(inventory, Inventory):
        inapplicable("it offers no list of its boxes")
    before = {info.id for info in await inventory.list()}
    one, two = await asyncio.gather(sandbox.open(_task()), sandbox.open(_task()))
    try:
        found = [info for info in await inventory.list() if info.id not in before]
        expect(len(found) == 2, f"two boxes were opened, {len(found)} more are listed")
        owners = {info.owner for info in found}
        expect(owners == {process_identity()}, f"boxes of this process are listed as {owners}")
        await one.close()
        left = [info for info in await inventory.list() if info.id not in before]
        expect(len(left) == 1, f"with one of two boxes closed, {len(left)} are listed")
        await inventory.remove(left[0].id)
        expect(
            not {info.id for info in await inventory.list()} - before,
            "a box that was removed is listed",
        )
        with raises(SandboxError, "a command in a box that was removed"):
            await two.exec(["true"], timeout=10.0)
        await inventory.remove(left[0].id)
    finally:
        await asyncio.gather(one.close(), two.close())


async def _no_more_ticks(box: Any, when: str) -> None:
    """What appends to the file `ticks` does so no more, a moment after `when`."""
    await asyncio.sleep(0.1)
    one = len(await box.read("ticks"))
    await asyncio.sleep(0.3)
    two = len(await box.read("ticks"))
    expect(one == two, f"a process that the command had started went on after {when}")


@asynccontextmanager
async def _box(case: Case) -> AsyncIterator[Any]:
    box = await case.build().open(_task())
    try:
        yield box
    finally:
        await box.close()


def _task() -> Task:
    return Task(id="contract", prompt="list the files")


async def _exec(box: Any, command: Any, **how: Any) -> ExecResult:
    result = await box.exec(command, **{"timeout": 30.0, **how})
    expect(
        isinstance(result, ExecResult), f"exec gave a {type(result).__name__}, not an ExecResult"
    )
    return result  # type: ignore[no-any-return]


async def _says(box: Any, command: Any, wanted: str, **how: Any) -> None:
    result = await _exec(box, command, **how)
    found = (result.stdout, result.exit_code)
    expect(found == (wanted, 0), f"{command!r} gave {found} {result.stderr!r}, not {wanted!r}")
