"""What the router adds to a request when a thousand are in flight.

    python tests/bench/router_overhead.py [--concurrent 1000] [--rounds 40] [--repeats 5]

Instant engines, eight of them with four data-parallel ranks each: a request yields to the event
loop once and is answered. A thousand tasks, each a conversation with its own key, send one request
after the other; the same tasks ask an engine directly. The difference of process CPU time, divided
by the requests, is what the router costs; the median of the repeats counts. Health checks run.

Limit: 100 µs a request.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from miles.router import Router
from miles.types import Completion, Request, Sampling, Span

LIMIT_S = 100e-6


class Instant:
    """Answers at once, and always the same."""

    samples = True
    dp_ranks = 4

    def __init__(self) -> None:
        tokens = np.zeros(8, np.int32)  # (tokens,) int32
        self._answer = Completion(
            tokens=tokens,
            logprobs=np.zeros(8, np.float32),  # (tokens,) float32
            spans=(Span(start=0, stop=8, version=0),),
            finish="length",
        )

    async def generate(self, request: Request) -> Completion:
        """After everybody else had their turn."""
        await asyncio.sleep(0)
        return self._answer

    async def stream(self, request: Request) -> Any:
        """The tokens, then the completion."""
        await asyncio.sleep(0)
        yield self._answer.tokens
        yield self._answer

    async def health(self) -> Mapping[str, float]:
        """Well."""
        return {}

    async def version(self) -> int:
        """As published."""
        return 0


async def generated(engine: Any, request: Request) -> None:
    """One request."""
    await engine.generate(request)


async def streamed(engine: Any, request: Request) -> None:
    """One request, read piece by piece."""
    async for _ in engine.stream(request):
        pass


async def cpu(engine: Any, concurrent: int, rounds: int, ask: Callable[..., Any]) -> float:
    """CPU seconds a request."""
    tokens = np.zeros(1000, np.int32)  # (tokens,) int32
    sampling = Sampling(max_new_tokens=8)

    async def talk(key: str) -> None:
        request = Request(id=key, key=key, tokens=tokens, sampling=sampling, seed=0)
        for _ in range(rounds):
            await ask(engine, request)

    began = time.process_time()
    async with asyncio.TaskGroup() as tasks:
        for number in range(concurrent):
            tasks.create_task(talk(f"g{number // 8}.{number % 8}"))
    return (time.process_time() - began) / (concurrent * rounds)


async def measure(concurrent: int, rounds: int, ask: Callable[..., Any]) -> float:
    """CPU seconds that the router adds to a request."""
    plain = await cpu(Instant(), concurrent, rounds, ask)
    router = Router({f"engine{i}": Instant() for i in range(8)})
    router.published(0)
    async with router:
        return await cpu(router, concurrent, rounds, ask) - plain


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrent", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    good = True
    for ask in (generated, streamed):
        added = [
            asyncio.run(measure(args.concurrent, args.rounds, ask)) for _ in range(args.repeats)
        ]
        median = statistics.median(added)
        good &= median < LIMIT_S
        spread = f"{min(added) * 1e6:.1f} to {max(added) * 1e6:.1f}"
        print(f"{ask.__name__}: {median * 1e6:.1f} µs a request ({spread}; limit 100)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
