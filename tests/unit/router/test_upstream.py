"""Waits for one engine: one timer for all of them, and none for nobody."""

import asyncio

import pytest

from miles.router.upstream import Upstream, Wait


async def waited(upstream: Upstream, seconds: float) -> str:
    try:
        with Wait(upstream):
            await asyncio.sleep(seconds)
    except TimeoutError:
        return "expired"
    return "done"


def test_wait_expires_in_turn_and_leaves_shorter_ones_alone() -> None:
    async def play() -> list[str]:
        upstream = Upstream.of("a", None, patience_s=0.05)
        early = [asyncio.create_task(waited(upstream, s)) for s in (60.0, 0.0, 60.0)]
        await asyncio.sleep(0.03)
        late = [asyncio.create_task(waited(upstream, s)) for s in (0.04, 60.0)]
        found = [await task for task in (*early, *late)]
        assert not upstream.waits
        return found

    assert asyncio.run(play()) == ["expired", "done", "expired", "done", "expired"]


def test_wait_goes_on_in_another_event_loop() -> None:
    """The timer of a loop that is gone must not be waited for."""
    upstream = Upstream.of("a", None, patience_s=0.02)
    assert asyncio.run(waited(upstream, 0.0)) == "done"
    assert asyncio.run(waited(upstream, 60.0)) == "expired"


def test_wait_that_its_owner_cancels_is_cancelled_not_expired() -> None:
    async def play() -> None:
        upstream = Upstream.of("a", None, patience_s=60.0)
        task = asyncio.create_task(waited(upstream, 60.0))
        await asyncio.sleep(0)
        upstream.drain("unwell")
        task.cancel()  # before the drain is seen
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not upstream.waits

    asyncio.run(play())


def test_drain_ends_waits_and_refuses_new_ones() -> None:
    async def play() -> list[str]:
        upstream = Upstream.of("a", None, patience_s=60.0)
        tasks = [asyncio.create_task(waited(upstream, 60.0)) for _ in range(3)]
        await asyncio.sleep(0)
        upstream.drain("unwell")
        return [*[await task for task in tasks], await waited(upstream, 0.0)]

    assert asyncio.run(play()) == ["expired"] * 4
