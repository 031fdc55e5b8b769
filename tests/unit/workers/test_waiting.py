"""What is said of a trainer that still waits: at a bounded rate, with the engine that is silent."""

from __future__ import annotations

import asyncio
from typing import Any

from miles import Task, WorkerError
from miles.buffer import Buffer, Lease
from miles.workers.waiting import tell, told_while


class Engines:
    async def faults(self, *, within_s: float) -> list[WorkerError | None]:
        return [None, WorkerError(f"engine-1: no answer within {within_s:g} s")]


def waited(seconds: float, *, engines: Any = None, hold: bool = False) -> list[str]:
    """What was said while the trainer waited so long, then got its group, and waited again."""
    said: list[str] = []

    async def main() -> None:
        buffer = Buffer(groups_per_step=1, samples_per_group=1, starved_after_s=60)
        buffer.start(Lease(id=3, task=Task(id="t", prompt="x")))
        if hold:
            buffer.hold()
        beside = asyncio.create_task(tell(buffer, engines, first_s=0.05, say=said.append))
        await asyncio.sleep(0.1)  # nobody waits
        taking = asyncio.create_task(buffer.take(1))
        await asyncio.sleep(seconds)
        said.append("")
        taking.cancel()
        await asyncio.sleep(0.06)
        taking = asyncio.create_task(buffer.take(1))
        await asyncio.sleep(0.09)
        for task in (taking, beside):
            task.cancel()

    asyncio.run(main())
    return said


def test_waiting_is_told_at_doubling_intervals_and_anew_for_every_wait() -> None:
    said = waited(0.7)
    first = said.index("")
    assert 3 <= first <= 4 and len(said) == first + 2  # at 0.05, 0.1, 0.2, 0.4 s, and 0.05 s
    assert said[0].startswith("the trainer waits: 0 of 1 groups in 0 s; 0 dropped: none; 1 in fl")
    assert "longest group 3 (task 't')" in said[0]


def test_waiting_names_the_engine_that_does_not_answer() -> None:
    assert waited(0.1, engines=Engines())[0].endswith("; engine-1: no answer within 5 s")


def test_waiting_is_not_told_while_new_groups_are_held() -> None:
    assert waited(0.2, hold=True) == [""]


def test_start_that_takes_long_is_told_at_doubling_intervals_and_no_more_once_it_is_over() -> None:
    said: list[str] = []

    async def main(seconds: float) -> list[str]:
        said.clear()
        async with told_while("engine: x", say=said.append, first_s=0.1):
            await asyncio.sleep(seconds)
        before = list(said)
        await asyncio.sleep(0.3)
        assert said == before
        return before

    assert asyncio.run(main(0.0)) == []
    assert asyncio.run(main(0.3))[:2] == [
        "waiting for engine: x (0.1 s so far)",
        "waiting for engine: x (0.2 s so far)",
    ]
