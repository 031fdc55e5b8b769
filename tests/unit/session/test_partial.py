"""Completions that are gone on with where they were cut, and those that nobody waits for."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from miles import Completion, Request, Sampling
from miles.session.partial import Partial
from miles.testing import FakeEngine


def request(number, key):
    """Forty tokens after a prompt of three."""
    return Request(
        id=f"{key}-{number}", key=key, tokens=np.arange(3, dtype=np.int32),
        sampling=Sampling(max_new_tokens=40), seed=number,
    )  # fmt: skip


async def streamed(engine, asked):
    async for item in engine.stream(asked):
        if isinstance(item, Completion):
            return item
    raise AssertionError("the stream ended without a completion")


class Streaming(FakeEngine):
    """Streams a completion in one piece."""

    async def stream(self, asked):
        made = await self.generate(asked)
        yield made.tokens
        yield made


@pytest.mark.parametrize("ask", [Partial.generate, streamed])
def test_partial_does_not_ask_again_for_what_nobody_waits_for(ask):
    """Closing a session ended nothing: its abort was taken for that of a publish."""
    inner = Streaming(Streaming.Config(delay_s=0.001))
    engine = Partial(inner)

    async def asked_for(requests):
        """By both, and a few tokens into the last."""
        async with asyncio.timeout(5.0):
            while len(inner.requests) < requests:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)

    async def main():
        closed, other = (
            asyncio.ensure_future(ask(engine, request(n, key))) for n, key in enumerate("ab")
        )
        await asked_for(2)
        await engine.abort()  # a publish: both go on
        await asked_for(4)
        assert not closed.done() and await engine.abort(["a"]) == 1
        async with asyncio.timeout(5.0):
            ended, whole = await closed, await other
        again = await ask(engine, request(2, "a"))  # the key is as good as new
        return ended, whole, again

    ended, whole, again = asyncio.run(main())
    assert ended.finish == "abort" and 0 < len(ended.tokens) < 40
    assert [len(made.tokens) for made in (whole, again)] == [40, 40]
    assert [asked.id for asked in inner.requests] == ["a-0", "b-1", "a-0", "b-1", "a-2"]
    assert not engine._asked
