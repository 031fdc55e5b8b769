"""What every runtime must do: start workers, carry calls and errors, notice deaths, and leave no
process behind.

The suite starts real processes, with parts that need no torch (the default run's model registration
and precision).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from miles.errors import MilesError, PluginError, WorkerError
from miles.identity import process_alive
from miles.protocols import Spec
from miles.testing.contract.case import Case, expect, inapplicable, raises

PARTS = ("model", "precision")


async def check_call(case: Case) -> None:
    """A started worker answers calls on its parts, with what the part answers here."""
    async with _runtime(case) as runtime:
        handle = await _start(case, runtime, "one")
        expect(handle.world == 1, f"one worker was started, world is {handle.world}")
        answer = await handle.call("precision.fingerprint", timeout=60)
        expect(answer == case.companion("precision").fingerprint(), f"fingerprint is {answer!r}")
        config = await handle.call("model.hf_config", timeout=60)
        expect(config == case.companion("model").hf_config(), "hf_config changed on its way")
        many = await asyncio.gather(
            *(handle.call("model.engine_name", f"no.such.{i}", timeout=60) for i in range(20))
        )
        wanted = [case.companion("model").engine_name(f"no.such.{i}") for i in range(20)]
        expect(many == wanted, f"20 calls at once gave {many}")


async def check_ranks(case: Case) -> None:
    """Several workers of one component all answer, each by its own rank too."""
    async with _runtime(case) as runtime:
        handle = await _start(case, runtime, "two", world=2)
        expect(handle.world == 2, f"two workers were started, world is {handle.world}")
        wanted = case.companion("precision").fingerprint()
        answers = await handle.call_all("precision.fingerprint", timeout=60)
        expect(answers == [wanted] * 2, f"call_all gave {answers}")
        for rank in range(2):
            answer = await handle.call("precision.fingerprint", rank=rank, timeout=60)
            expect(answer == wanted, f"rank {rank} answered {answer!r}")


async def check_errors(case: Case) -> None:
    """What a part raises is raised here, as one of miles' errors with a message; the worker lives
    on."""
    async with _runtime(case) as runtime:
        handle = await _start(case, runtime, "errors")
        bad = {
            "an unknown part": ("nobody.home",),
            "an unknown method": ("model.no_such_method",),
            "a private method": ("model.__init__",),
            "wrong arguments": ("precision.fingerprint", 1, 2, 3),
        }
        for what, call in bad.items():
            with raises(MilesError, f"calling {what}"):
                await handle.call(*call, timeout=60)
        answer = await handle.call("precision.fingerprint", timeout=60)
        expect(answer == case.companion("precision").fingerprint(), "the worker did not live on")


async def check_what_cannot_be_built(case: Case) -> None:
    """A part that cannot be built fails `start` with its own error, and nothing is left running
    after `stop`."""
    before = _descendants()
    async with _runtime(case) as runtime:
        bad = Spec(kind="model", name="no-such-model")
        with raises(PluginError, "starting a worker of a part that does not exist"):
            await runtime.start("bad", [bad], _context(case))
    await _expect_gone(before, "after a start that failed")


async def check_rebuild(case: Case) -> None:
    """`rebuild` replaces the parts in the same processes."""
    async with _runtime(case) as runtime:
        handle = await _start(case, runtime, "rebuilt")
        started = await handle.call("worker.identity", timeout=60)
        await runtime.rebuild(handle, [case.companion_spec("precision")], _context(case))
        answer = await handle.call("precision.fingerprint", timeout=60)
        expect(answer == case.companion("precision").fingerprint(), f"fingerprint is {answer!r}")
        with raises(MilesError, "calling a part that a rebuild removed"):
            await handle.call("model.hf_config", timeout=60)
        now = await handle.call("worker.identity", timeout=60)
        expect(now == started, "rebuild started another process")


async def check_log(case: Case) -> None:
    """Every worker has a log file, `logs/<name>.log`, or one for each rank."""
    async with _runtime(case) as runtime:
        await _start(case, runtime, "logged")
        logs = sorted(p.name for p in (case.context.directory / "logs").glob("logged*.log"))
        expect(logs, f"no logs/logged.log in {case.context.directory}")


async def check_death(case: Case) -> None:
    """A worker that is killed makes its calls fail with a `WorkerError` that names it, soon."""
    async with _runtime(case) as runtime:
        handle = await _start(case, runtime, "mortal")
        os.kill(_number(await _here(handle)), signal.SIGKILL)
        try:
            async with asyncio.timeout(30):
                with raises(WorkerError, "calling a worker that was killed"):
                    await handle.call("precision.fingerprint", timeout=20)
        except TimeoutError:
            expect(False, "a call to a worker that was killed hung for 30 s")


async def check_end(case: Case) -> None:
    """`end` ends one handle's processes, however busy, and no other's."""
    async with _runtime(case) as runtime:
        busy = await _start(case, runtime, "busy")
        other = await _start(case, runtime, "other")
        identity = await _here(busy)
        os.kill(_number(identity), signal.SIGSTOP)  # as stuck as a process can be
        await runtime.end(busy)
        expect(not process_alive(identity), "after end() its process is left")
        with raises(MilesError, "calling a worker that was ended"):
            await busy.call("precision.fingerprint", timeout=20)
        expect(
            await other.call("precision.fingerprint", timeout=20), "another worker was ended too"
        )


async def check_stop(case: Case) -> None:
    """After `stop`, which may be called twice, no process is left, and calls fail instead of
    hanging."""
    before = _descendants()
    async with _runtime(case) as runtime:
        handles = [await _start(case, runtime, name) for name in ("first", "second")]
        await runtime.stop()
        await _expect_gone(before, "after stop()")
    for handle in handles:
        with raises(MilesError, "calling a stopped worker"):
            await handle.call("precision.fingerprint", timeout=20)


@asynccontextmanager
async def _runtime(case: Case) -> AsyncIterator[Any]:
    runtime = case.build()
    try:
        yield runtime
    finally:
        await runtime.stop()


def _context(case: Case) -> Any:
    from dataclasses import replace

    registry = case.registry
    plugins: Mapping[str, Any] = {
        "selection": registry.selection,
        "provenance": registry.provenance(),
    }
    return replace(case.context, plugins=plugins)


async def _start(case: Case, runtime: Any, name: str, *, world: int = 1) -> Any:
    specs = [case.companion_spec(kind) for kind in PARTS]
    return await runtime.start(name, specs, _context(case), world=world)


async def _here(handle: Any) -> str:
    """The identity of a worker on this machine."""
    identity: str = await handle.call("worker.identity", timeout=60)
    if not process_alive(identity):
        inapplicable("its workers are on other machines")
    return identity


def _number(identity: str) -> int:
    return int(identity.split(".")[-2])


async def _expect_gone(before: set[int], when: str) -> None:
    left: set[int] = set()
    for _ in range(100):
        left = _descendants() - before
        if not left:
            return
        await asyncio.sleep(0.05)
    expect(not left, f"{when}, processes {sorted(left)} are still there")


def _descendants() -> set[int]:
    """Processes that this one started, and theirs, zombies left out (Linux; empty elsewhere)."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = status.read_text()
        except OSError:
            continue  # it ended while we were looking
        state, parent = text.rpartition(")")[2].split()[:2]
        if state != "Z":
            parents[int(status.parent.name)] = int(parent)
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}
