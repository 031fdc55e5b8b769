"""How much of their prompts engines find in their prefix caches, with the router and without.

    python tests/bench/router_hit_rate.py [--sessions 64 128 256 512] [--capacity TOKENS]
        [--data DIR] [--json FILE]

Eight simulated engines (`miles.testing.CachingEngine`: an LRU cache of 64-token pages each, prompts
prefilled one at a time) play the conversations of `router_traffic.py`, all in flight together, in
virtual time. The same conversations are played with the router, by placing each request at random,
in turn, or on the engine with the fewest active requests, and on one engine with an unlimited cache
that computes as fast as the eight.

A cache holds 1,800,000 tokens: an engine of two H200 (2 x 141 GB, 85 % used) with a model of 30B
parameters in bf16 (61 GB) whose tokens take 96 KiB each (48 layers, 4 key-value heads of 128) has
room for 1.81 million. Pages of running requests are not pinned, and what one replies is cached when
it is complete.

Limits: the router reaches at least 0.98 of the unlimited cache on every trace, and more than 0.96
in absolute terms on the coding agent's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import router_traffic as traffic
from router_traffic import Talk

from miles.router import Router
from miles.testing import CachingEngine
from miles.types import Completion, Request, Sampling

ENGINES = 8
PAGE = 64
CAPACITY = 1_800_000
PREFILL_S = 25e-6  # a token: 40,000 a second
DECODE_S = 10e-3  # a token: 100 a second for each request
SEED = 20
SHARE = 0.98
CODING = 0.96
SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


class _Skipping(selectors.SelectSelector):
    """Waits no time: it moves the clock instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everybody waits and no timer runs")
        self.now += max(0.0, timeout)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while everybody sleeps."""

    def __init__(self) -> None:
        self._clock = _Skipping()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class Spread:
    """Places every request anew."""

    def __init__(self, engines: dict[str, CachingEngine], way: str) -> None:
        self._engines = list(engines.values())
        self._active = [0] * len(self._engines)
        self._next = 0
        self._rng = np.random.default_rng(SEED)
        self._choose: Callable[[], int] = getattr(self, f"_{way}")

    def _random(self) -> int:
        return int(self._rng.integers(len(self._engines)))

    def _round_robin(self) -> int:
        self._next += 1
        return self._next % len(self._engines)

    def _least_loaded(self) -> int:
        least = min(self._active)
        tied = [i for i, active in enumerate(self._active) if active == least]
        return int(self._rng.choice(tied))

    async def generate(self, request: Request) -> Completion:
        """On the engine of the moment."""
        at = self._choose()
        self._active[at] += 1
        try:
            return await self._engines[at].generate(request)
        finally:
            self._active[at] -= 1

    def release(self, key: str) -> None:
        """There is nothing to forget."""


def fleet(count: int, capacity: int, faster: float = 1.0) -> dict[str, CachingEngine]:
    """So many fresh engines."""
    config = CachingEngine.Config(
        page=PAGE,
        capacity=capacity,
        prefill_s=PREFILL_S / faster,
        decode_s=DECODE_S,
        chunk=2**20,
    )
    return {f"engine{i}": CachingEngine(config) for i in range(count)}


WAYS = ("unlimited", "router", "least_loaded", "round_robin", "random")


def placement(way: str, capacity: int) -> Any:
    """What takes the requests."""
    if way == "unlimited":
        return Router(fleet(1, 0, faster=ENGINES))
    engines = fleet(ENGINES, capacity)
    return Router(engines) if way == "router" else Spread(engines, way)


async def play(talk: Talk, engine: Any, sums: list[int]) -> None:
    """One conversation to its end; adds its prompt and cached tokens to the sums."""
    rng = np.random.default_rng([SEED, *talk.key.encode()])
    room = len(talk.prompt) + sum(turn.reply + turn.added for turn in talk.turns)
    tokens = np.zeros(room, np.int32)  # (tokens,) int32
    size = len(talk.prompt)
    tokens[:size] = talk.prompt
    await asyncio.sleep(talk.start)
    for number, turn in enumerate(talk.turns):
        completion = await engine.generate(
            Request(
                id=f"{talk.key}/{number}",
                key=talk.key,
                tokens=tokens[:size],
                sampling=Sampling(max_new_tokens=turn.reply),
                seed=int(rng.integers(2**62)),
            )
        )
        sums[0] += size
        sums[1] += completion.cached_tokens
        for new in (completion.tokens, traffic.ids(rng, turn.added)):
            tokens[size : size + len(new)] = new
            size += len(new)
        await asyncio.sleep(turn.pause)
    engine.release(talk.key)


def hit_rate(talks: Sequence[Talk], way: str, capacity: int) -> float:
    """Share of prompt tokens that were cached."""

    async def all_of_them() -> list[int]:
        engine, sums = placement(way, capacity), [0, 0]
        async with asyncio.TaskGroup() as tasks:
            for talk in talks:
                tasks.create_task(play(talk, engine, sums))
        return sums

    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        prompts, cached = runner.run(all_of_them())
    return cached / prompts


def traces(sessions: Sequence[int], data: Path) -> dict[str, list[Talk]]:
    """Everything to play, by name."""
    found = {}
    for kind in (traffic.CODING, traffic.MIXED):
        for count in sessions:
            found[f"{kind.name}, {count} sessions"] = traffic.generate(kind, count, SEED)
    if not data.is_dir():
        print(f"no recorded conversations in {data}: only generated ones", file=sys.stderr)
        return found
    once = traffic.recorded(data, 1, SEED)
    for copies in (1, traffic.GROUP):
        talks = traffic.recorded(data, copies, SEED)
        found[f"recorded, {len(once)} x {copies}"] = talks
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--capacity", type=int, default=CAPACITY, help="tokens an engine caches")
    parser.add_argument("--data", type=Path, default=SHARED_DATA, help="recorded conversations")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args(argv)
    print("| trace | requests | mean prompt |", *(f"{way} |" for way in WAYS), "of unlimited |")
    print("|---|---|---|" + "---|" * (len(WAYS) + 1))
    result, good = {}, True
    for name, talks in traces(args.sessions, args.data).items():
        began = time.perf_counter()
        rates = {way: hit_rate(talks, way, args.capacity) for way in WAYS}
        share = rates["router"] / rates["unlimited"]
        good &= share >= SHARE
        good &= rates["router"] > CODING or not name.startswith(traffic.CODING.name)
        requests = sum(len(talk.turns) for talk in talks)
        print(f"| {name} | {requests:,} | {mean_prompt(talks):,.0f} |", end=" ")
        print(*(f"{rates[way]:.4f} |" for way in WAYS), f"{share:.4f} |", flush=True)
        result[name] = {**rates, "share": share, "seconds": time.perf_counter() - began}
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if good else 1


def mean_prompt(talks: Sequence[Talk]) -> float:
    """Tokens, over all requests."""
    sizes = []
    for talk in talks:
        size = len(talk.prompt)
        for turn in talk.turns:
            sizes.append(size)
            size += turn.reply + turn.added
    return float(np.mean(sizes))


if __name__ == "__main__":
    sys.exit(main())
