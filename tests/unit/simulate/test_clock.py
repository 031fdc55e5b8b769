"""The virtual clock: order, jumps, deadlocks by name, and nothing of the real world."""

from __future__ import annotations

import ast
import asyncio
import threading
import time
from pathlib import Path

import pytest

import miles.simulate
from miles.errors import RunError
from miles.simulate import clock


def test_clock_a_day_takes_no_time_and_timers_come_in_order() -> None:
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> str:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sleeper("late", 86_400))
            tasks.create_task(sleeper("first", 5))
            tasks.create_task(sleeper("second", 5))
        return "done"

    began = time.monotonic()
    assert clock.run(main()) == "done"
    assert time.monotonic() - began < 5
    assert seen == [("first", 5.0), ("second", 5.0), ("late", 86_400.0)]


def test_clock_deadlines_and_cancelling_are_asyncios_own() -> None:
    async def main() -> list[str]:
        said = []
        try:
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        except TimeoutError:
            said.append(f"timed out at {asyncio.get_running_loop().time():g}")
        task = asyncio.create_task(asyncio.sleep(100))
        await asyncio.sleep(1)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        said.append(f"{type(result).__name__} at {asyncio.get_running_loop().time():g}")
        return said

    assert clock.run(main()) == ["timed out at 7", "CancelledError at 8"]


def test_clock_names_who_waits_when_nothing_can_happen() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.Event().wait(), name="trainer")
            tasks.create_task(asyncio.Event().wait(), name="engine-0")

    with pytest.raises(clock.Deadlock, match=r"at 0\.000 s nothing.* 3 tasks wait: engine-0, main"):
        clock.run(main())


def test_clock_ends_a_program_that_gets_nowhere() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(10)

    with pytest.raises(clock.OutOfTime, match="not done after 3600 virtual seconds"):
        clock.run(main(), limit_s=3600)


def test_clock_shows_a_failure_that_nobody_awaits() -> None:
    async def fail() -> None:
        raise ValueError("lost")

    async def main() -> None:
        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        del task
        await asyncio.sleep(1)

    with pytest.raises(ValueError, match="lost"):
        clock.run(main())


def test_clock_refuses_threads_and_other_loops() -> None:
    async def thread() -> None:
        await asyncio.to_thread(time.time)

    with pytest.raises(RunError, match=r"a thread for .* does not exist in virtual time"):
        clock.run(thread())

    async def inside() -> None:
        other = asyncio.sleep(0)
        try:
            clock.run(other)
        finally:
            other.close()

    with pytest.raises(RuntimeError, match="inside a running event loop"):
        asyncio.run(inside())


def test_clock_starts_no_thread_and_closes_what_is_left_behind() -> None:
    closed = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append("task")

    async def generator():
        try:
            yield 1
            yield 2
        finally:
            closed.append("generator")

    kept = []

    async def main() -> None:
        kept.append(asyncio.create_task(forever()))
        made = generator()
        kept.append(made)
        assert await anext(made) == 1

    before = threading.active_count()
    clock.run(main())
    assert threading.active_count() == before
    assert sorted(closed) == ["generator", "task"]


def test_clock_forgets_cancelled_timers() -> None:
    async def main() -> int:
        for _ in range(20_000):
            async with asyncio.timeout(1e6):
                await asyncio.sleep(0.001)
        return len(asyncio.get_running_loop()._timers)

    assert clock.run(main()) < 5000


def test_simulator_imports_no_clock_thread_or_process() -> None:
    """Only the command reads the processor's time, for what it says it took."""
    bad = {"time", "threading", "multiprocessing", "subprocess", "concurrent", "socket", "random"}
    for path in Path(miles.simulate.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            for name in names:
                allowed = name == "random.Random" or (name == "time" and path.stem == "command")
                assert allowed or name.partition(".")[0] not in bad, f"{path.name}: {name}"


def test_after_is_done_in_time_and_survives_who_waited() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        given_up = clock.after(loop, 5.0)
        given_up.cancel()
        await clock.after(loop, 7.0)
        return loop.time()

    assert clock.run(main()) == 7.0
