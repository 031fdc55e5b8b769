"""What every sandbox must do: run commands, keep boxes apart, kill what runs too long, and leave
nothing behind.

How strongly it isolates is its own tests' business; commands here need a POSIX shell and nothing
else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from miles.errors import SandboxError
from miles.protocols import ExecResult
from miles.testing.contract.case import Case, expect, raises
from miles.types import Task

BYTES = bytes(range(256)) * 33


async def check_exec(case: Case) -> None:
    """It runs argv as it is and a string in a shell; both streams and the exit code come back."""
    async with _box(case) as box:
        await _says(box, ["echo", "a  b", "$HOME;"], "a  b $HOME;\n")
        await _says(box, "echo one; echo two | tr a-z A-Z", "one\nTWO\n")
        result = await _exec(box, "echo out; echo err >&2; exit 3")
        found = (result.stdout, result.stderr, result.exit_code, result.timed_out)
        expect(found == ("out\n", "err\n", 3, False), f"a command that exits with 3 gave {found}")
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
        await _says(box, 'echo "$MILES_WORD"', "é $x\n", env={"MILES_WORD": "é $x"})
        await _says(box, 'echo "[$MILES_WORD]"', "[]\n")
        await _says(box, "cat", "line\nno end", stdin="line\nno end")
        await _says(box, "cat", "")


async def check_state_stays(case: Case) -> None:
    """Files stay from one command to the next."""
    async with _box(case) as box:
        await _says(box, "echo kept > kept.txt", "")
        await _says(box, "cat kept.txt", "kept\n")


async def check_read_write(case: Case) -> None:
    """Files go in and out byte for byte, folders made as needed; a file that is not there is a
    `SandboxError`."""
    async with _box(case) as box:
        for path, data in (("plain", BYTES), ("new/folder/é b", b"x"), ("plain", b"")):
            await box.write(path, data)
            back = await box.read(path)
            expect(back == data, f"{len(data)} bytes written to {path!r}, {len(back)} read")
        await box.write("seen", b"from outside\n")
        await _says(box, "cat seen", "from outside\n")
        await _says(box, "printf 'from inside' > made", "")
        expect(await box.read("made") == b"from inside", "a file made by a command reads otherwise")
        with raises(SandboxError, "reading a file that is not there"):
            await box.read("no/such/file")


async def check_timeout(case: Case) -> None:
    """A command that runs too long is killed with everything it started; the box lives on."""
    async with _box(case) as box:
        began = time.monotonic()
        ticking = "(for _ in $(seq 200); do echo x >> ticks; sleep 0.05; done) & "
        result = await _exec(box, "echo early; " + ticking + "sleep 60", timeout=1.0)
        took = time.monotonic() - began
        expect(result.timed_out, "a command past its timeout is not marked as timed out")
        expect(took < 20, f"a timeout of 1 s took {took:.0f} s")
        expect("early" in result.stdout, "what was said before the timeout is lost")
        one = len(await box.read("ticks"))
        await asyncio.sleep(0.5)
        two = len(await box.read("ticks"))
        expect(one == two, "a process that the command had started went on after the timeout")
        await _says(box, "echo alive", "alive\n")


async def check_much_output(case: Case) -> None:
    """Endless output is capped, not fatal: the command ends, and what comes back is bounded."""
    async with _box(case) as box:
        result = await _exec(box, "yes miles | head -c 50000000", timeout=60.0)
        expect(result.exit_code == 0, f"50 MB of output end with exit code {result.exit_code}")
        size = len(result.stdout)
        expect(0 < size < 50_000_000, f"50 MB of output came back as {size} characters")


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
    """`close` may be called twice; a closed box is a `SandboxError`."""
    box = await case.build().open(_task())
    await box.close()
    await box.close()
    with raises(SandboxError, "a command in a closed box"):
        await box.exec(["true"])


async def check_cancelled(case: Case) -> None:
    """Cancelling a command frees the box: another one runs, and closing is quick."""
    async with _box(case) as box:
        task = asyncio.ensure_future(box.exec("sleep 60"))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.wait([task], timeout=20)
        expect(task.done(), "a cancelled command went on for 20 s")
        await _says(box, "echo alive", "alive\n")


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
