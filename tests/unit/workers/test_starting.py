"""Workers that start together: all of them, or none is left."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miles import WorkerError
from miles.workers.starting import all_or_none


def test_worker_that_cannot_be_ended_leaves_no_other_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its error took the place of the first one, and those after it went on."""
    ended: list[int] = []

    async def start(number: int) -> int:
        if number == 2:
            await asyncio.sleep(0)
            raise WorkerError("worker 2")
        return number

    async def end(number: int) -> None:
        if number == 0:
            raise WorkerError("worker 0 does not end")
        ended.append(number)

    with pytest.raises(WorkerError, match="worker 2"):
        asyncio.run(all_or_none([start(n) for n in range(3)], end))
    assert ended == [1]
    assert "a worker half started was not ended: worker 0 does not end" in caplog.text


@settings(max_examples=40, deadline=None)
@example([(0, False), (0, True)], 1)  # given up while those that started are ended
@example([(0, False), (0, True)], 2)
@example([(0, False), (0, True)], 3)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6),
    st.none() | st.integers(0, 3),
)
def test_all_or_none_leaves_nothing_behind_that_nobody_has(
    workers: list[tuple[int, bool]], cancelled: int | None
) -> None:
    """Each starts after so many turns of the event loop, or fails then; whoever asked may give up
    first."""
    running: set[int] = set()

    async def start(number: int, turns: int, *, fails: bool) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        if fails:
            raise WorkerError(f"worker {number}")
        running.add(number)
        return number

    async def end(number: int) -> None:
        await asyncio.sleep(0)
        running.remove(number)

    async def main() -> None:
        starts = [start(n, turns, fails=fails) for n, (turns, fails) in enumerate(workers)]
        asking = asyncio.create_task(all_or_none(starts, end))
        if cancelled is not None:
            for _ in range(cancelled + 1):
                await asyncio.sleep(0)
            asking.cancel()
        (outcome,) = await asyncio.gather(asking, return_exceptions=True)
        if isinstance(outcome, BaseException):
            assert not running
            assert isinstance(outcome, WorkerError | asyncio.CancelledError)
        else:
            assert outcome == list(range(len(workers))) and running == set(outcome)

    asyncio.run(main())
