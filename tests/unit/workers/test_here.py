"""Rollouts in the driver: calls without a process, and no restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from miles import WorkerError
from miles.workers.here import Here, restart


class Rollouts:
    async def group(self, group: int) -> int:
        return group + 1

    async def slow(self) -> None:
        await asyncio.sleep(60)

    async def late(self) -> None:
        raise TimeoutError("its own")

    async def returning(self, group: int) -> AsyncIterator[Any]:
        yield None
        yield group


def here() -> Here:
    return Here(Rollouts())  # type: ignore[arg-type]


def test_here_calls_and_streams_what_is_in_this_process() -> None:
    async def main() -> None:
        assert await here().call("rollouts.group", 4, timeout=5) == 5
        assert await here().call_all("rollouts.group", 4) == [5]
        assert [item async for item in here().stream("rollouts.returning", 7)] == [None, 7]

    asyncio.run(main())


def test_here_times_out_as_a_worker_does_and_passes_other_timeouts_on() -> None:
    with pytest.raises(WorkerError, match=r"driver: rollouts\.slow did not answer within 0\.02 s"):
        asyncio.run(here().call("rollouts.slow", timeout=0.02))
    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(here().call("rollouts.late", timeout=5))


def test_here_cannot_be_started_again_and_says_what_to_do() -> None:
    with pytest.raises(WorkerError, match="take rollout_workers=1"):
        asyncio.run(restart(here()))
