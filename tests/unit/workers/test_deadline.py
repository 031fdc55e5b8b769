"""One timer for many waits: late ones end, early ones do not, and other cancellations pass."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.simulate import clock
from miles.workers.deadline import Deadline


async def _held(deadline: Deadline, seconds: float) -> str:
    wait = deadline.wait()
    try:
        with wait:
            await asyncio.sleep(seconds)
    except TimeoutError:
        assert wait.expired
        return "late"
    assert not wait.expired
    return "in time"


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_deadline_ends_exactly_the_waits_that_take_longer(begins_and_lengths):
    async def main():
        deadline, loop = Deadline(10.5), asyncio.get_running_loop()

        async def one(begin: int, length: int) -> tuple[str, float]:
            await asyncio.sleep(begin)
            said = await _held(deadline, length)
            return said, loop.time()

        began = loop.time()
        ended = await asyncio.gather(*(one(*each) for each in begins_and_lengths))
        assert not deadline._until and deadline._timer is None
        for (begin, length), (said, at) in zip(begins_and_lengths, ended, strict=True):
            assert said == ("late" if length > 10.5 else "in time")
            assert at - began == pytest.approx(begin + min(length, 10.5))

    clock.run(main())


def test_deadline_passes_on_a_cancellation_that_is_not_its_own():
    async def main():
        deadline = Deadline(60.0)
        task = asyncio.create_task(_held(deadline, 60.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not deadline._until

    asyncio.run(main())


def test_deadline_that_ends_with_a_cancellation_from_outside_is_a_cancellation():
    async def main():
        deadline = Deadline(0.01)
        task = asyncio.create_task(_held(deadline, 60.0))
        await asyncio.sleep(0)
        time.sleep(0.02)  # noqa: ASYNC251 - both are due in the loop's next turn
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_deadline_leaves_other_errors_alone():
    async def main():
        with pytest.raises(ValueError, match="mine"), Deadline(60.0).wait():
            raise ValueError("mine")

    asyncio.run(main())


def test_deadline_is_refused_outside_of_a_task():
    async def main():
        said = []

        def callback():
            with pytest.raises(RuntimeError, match="what a task waits for"):
                Deadline(1.0).wait().__enter__()
            said.append(True)

        asyncio.get_running_loop().call_soon(callback)
        await asyncio.sleep(0.01)
        assert said

    asyncio.run(main())
