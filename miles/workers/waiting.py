"""Says what a trainer waits for while it still waits: who owes what since when, and which engine
does not answer; and what a start waits for.

What ends a wait that is too long is the buffer's affair; who starts engines again,
`miles.workers.weights`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from miles.buffer import Buffer
from miles.workers.engines import Engines

__all__ = ["tell", "told_while"]

_ANSWER_S = 5.0
_START_S = 5.0


async def tell(
    buffer: Buffer, engines: Engines | None, *, first_s: float, say: Callable[[str], None]
) -> None:
    """Call `say` when the trainer has waited `first_s`, twice that, four times that, and so on in
    every wait, except while new groups are held. Ends only when cancelled."""
    due, before = first_s, 0.0
    while True:
        await asyncio.sleep(first_s / 2)
        seen = buffer.standstill()
        if seen is None or seen.seconds < before:
            due = first_s  # the next wait
        before = 0.0 if seen is None else seen.seconds
        if seen is None or seen.seconds < due:
            continue
        due = 2 * max(due, seen.seconds)
        say(f"the trainer waits: {seen}{await _silent(engines)}")


@asynccontextmanager
async def told_while(
    what: str, *, say: Callable[[str], None], first_s: float = _START_S
) -> AsyncGenerator[None, None]:
    """Call `say` with what is waited for when the block has taken `first_s`, twice that, four times
    that, and so on."""

    async def remind() -> None:
        waited, due = 0.0, first_s
        while True:
            await asyncio.sleep(due - waited)
            waited, due = due, 2 * due
            say(f"waiting for {what} ({waited:g} s so far)")

    reminding = asyncio.create_task(remind(), name="say what a start waits for")
    try:
        yield
    finally:
        reminding.cancel()


async def _silent(engines: Engines | None) -> str:
    if engines is None:
        return ""
    found = await engines.faults(within_s=_ANSWER_S)
    return "".join(f"; {fault}" for fault in found if fault is not None)
