"""Colocated trainer and engine take turns; split ones do not."""

from __future__ import annotations

import asyncio

import pytest

from miles import Drop, Group, RunError, Task, Trajectory
from miles.buffer import Buffer, Lease
from miles.placement import Colocated, Split


class Sleeper:
    """Notes who was put to sleep or woken."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    async def sleep(self) -> None:
        self._log.append(f"{self._name} sleeps")

    async def wake(self) -> None:
        self._log.append(f"{self._name} wakes")


def make(log: list[str], drain_timeout_s: float = 5.0) -> tuple[Buffer, Colocated]:
    buffer = Buffer(groups_per_step=2, samples_per_group=1)
    return buffer, Colocated(
        buffer=buffer,
        trainer=Sleeper("trainer", log),
        engine=Sleeper("engine", log),
        drain_timeout_s=drain_timeout_s,
    )


def test_colocated_drains_then_takes_turns() -> None:
    log: list[str] = []

    async def main() -> None:
        buffer, placement = make(log)
        task = Task(id="0", prompt="")
        buffer.start(Lease(id=0, task=task))

        async def come_back() -> None:
            await asyncio.sleep(0.02)
            log.append("group back")
            failed = Trajectory(id="g", samples=(), failure=Drop(reason="x"))
            buffer.finish(Group(id=0, task=task, trajectories=(failed,)), Drop(reason="x"))

        back = asyncio.create_task(come_back())
        async with placement.training():
            assert not buffer.room()  # held
            log.append("train")
        async with placement.publishing():
            assert not buffer.room()
            log.append("publish")
        assert buffer.room()
        await back

    asyncio.run(main())
    assert log == [
        "group back", "engine sleeps", "trainer wakes", "train",
        "engine wakes", "trainer wakes", "publish", "trainer sleeps",
    ]  # fmt: skip


def test_colocated_gives_up_draining_and_releases() -> None:
    async def main() -> Buffer:
        buffer, placement = make([], drain_timeout_s=0.02)
        buffer.start(Lease(id=0, task=Task(id="0", prompt="")))
        with pytest.raises(RunError, match=r"1 groups are still in flight after 0.02 s"):
            async with placement.training():
                raise AssertionError("not drained")
        return buffer

    assert asyncio.run(main()).room()


def test_colocated_recovery_wakes_the_trainer_and_waits_for_a_switch() -> None:
    log: list[str] = []

    async def main() -> None:
        _, placement = make(log)
        async with placement.recovering() as now:
            assert not now  # before the first publish
        async with placement.publishing():
            pass
        log.clear()
        async with placement.recovering() as now:
            assert now
            training = asyncio.create_task(placement.training().__aenter__())
            await asyncio.sleep(0.01)
            log.append("recovered")
        await training
        async with placement.recovering() as now:
            assert not now  # engines sleep

    asyncio.run(main())
    assert log == [
        "trainer wakes", "recovered", "trainer sleeps", "engine sleeps", "trainer wakes",
    ]  # fmt: skip


def test_split_holds_nobody() -> None:
    async def main() -> bool:
        buffer = Buffer(groups_per_step=1, samples_per_group=1)
        async with Split().training(), Split().publishing():
            return buffer.room()

    assert asyncio.run(main())
