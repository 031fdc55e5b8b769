"""Affinity is worth it: prefix-cache hits of multi-turn conversations, small.

`tests/bench/router_hit_rate.py` measures it at full size.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from miles.router import Router
from miles.testing import CachingEngine
from miles.types import Completion, Request, Sampling


class Anywhere:
    """Places every request on some engine."""

    def __init__(self, engines: list[CachingEngine]) -> None:
        self.engines = engines
        self.rng = np.random.default_rng(0)

    async def generate(self, request: Request) -> Completion:
        return await self.engines[self.rng.integers(len(self.engines))].generate(request)


async def hit_rate(engine: Any, sessions: int = 16, turns: int = 12) -> float:
    """Conversations that share a system prompt of 256 tokens, all at once."""
    sums = [0, 0]
    system = np.arange(256, dtype=np.int32)  # (tokens,) int32

    async def play(number: int) -> None:
        rng = np.random.default_rng(number)
        tokens = system
        for turn in range(turns):
            tokens = np.concatenate([tokens, rng.integers(0, 2**31 - 1, 30, dtype=np.int32)])
            key = f"k{number}"
            completion = await engine.generate(
                Request(
                    id=f"{key}/{turn}",
                    key=key,
                    tokens=tokens,
                    sampling=Sampling(max_new_tokens=20),
                    seed=number,
                )
            )
            sums[0] += len(tokens)
            sums[1] += completion.cached_tokens
            tokens = np.concatenate([tokens, completion.tokens])

    await asyncio.gather(*(play(number) for number in range(sessions)))
    return sums[1] / sums[0]


def test_router_hits_nearly_as_often_as_one_unlimited_cache() -> None:
    """Four engines of two ranks, each of which holds two conversations and little more."""
    limited = CachingEngine.Config(page=16, capacity=2048, dp_ranks=2)
    single = CachingEngine.Config(page=16, capacity=2048)

    async def play() -> tuple[float, float, float]:
        router = Router({f"engine{i}": CachingEngine(limited) for i in range(4)})
        unlimited = CachingEngine(CachingEngine.Config(page=16))
        spread = Anywhere([CachingEngine(single) for _ in range(8)])
        rates = [await hit_rate(engine) for engine in (unlimited, router, spread)]
        assert router.metrics()["router/prefix_hit_rate"] == rates[1]
        return rates[0], rates[1], rates[2]

    unlimited, routed, spread = asyncio.run(play())
    assert routed > 0.94 * unlimited  # eight ranks each prefill the system prompt once
    assert spread < 0.75 * unlimited
