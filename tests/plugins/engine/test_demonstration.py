"""The engine that replays solutions."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from miles import EngineError, Span
from miles_plugins.engine.demonstration import Demonstration


def _engine():
    return Demonstration(Demonstration.Config(), None)


def test_generate_replays_the_solution_under_the_loaded_version(request_for):
    async def play():
        engine = _engine()
        assert await engine.version() == -1
        await engine.load(7, ())
        asked = replace(request_for(0), demonstration=np.array([1, 2, 3], np.int32))
        got = await engine.generate(asked)
        assert got.tokens.tolist() == [1, 2, 3]
        assert got.logprobs is None
        assert got.spans == (Span(start=0, stop=3, version=7),)
        assert got.finish == "stop"
        assert (await engine.health())["tokens"] == 3

    asyncio.run(play())


def test_generate_cuts_at_the_limit(request_for):
    async def play():
        engine = _engine()
        await engine.load(0, ())
        asked = replace(request_for(0, new=2), demonstration=np.array([1, 2, 3], np.int32))
        got = await engine.generate(asked)
        assert (got.tokens.tolist(), got.finish) == ([1, 2], "length")

    asyncio.run(play())


def test_task_without_a_solution_is_told_what_to_do(request_for):
    async def play():
        with pytest.raises(EngineError, match=r"'r0': the task has no solution; give Task\.solut"):
            await _engine().generate(request_for(0))
        with pytest.raises(EngineError, match="has no weights and cannot score"):
            await _engine().score(np.array([1], np.int32))

    asyncio.run(play())


def test_generate_costs_microseconds(request_for):
    """Best of several batches, so that a busy machine does not decide; 10 µs is what a step can
    spare."""

    async def play():
        engine = _engine()
        await engine.load(0, ())
        asked = replace(request_for(0), demonstration=np.arange(8, dtype=np.int32))
        best = 1.0
        for _ in range(20):
            began = time.process_time()
            for _ in range(200):
                await engine.generate(asked)
            best = min(best, (time.process_time() - began) / 200)
        assert best < 20e-6

    asyncio.run(play())
