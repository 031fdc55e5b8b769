"""A request's tokens and log-probs are a function of weights, prompt, sampling and seed: bit for
bit, on one thread."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def _requests(request_for, count):
    """Lengths from 1 to 40, groups of equal prompts, every way of sampling."""
    ways = [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}]
    ways.append({"top_k": 20, "top_p": 0.9, "temperature": 1.3})
    made = []
    for i in range(count):
        prompt = i // 4
        rng = np.random.default_rng(prompt)
        tokens = rng.integers(0, 256, 1 + (prompt * 7) % 40).astype(np.int32)
        made.append(
            request_for(i, tokens=tokens, new=4 + i % 29, **ways[i % len(ways)], stop_ids=(3, 77))
        )
    return made


async def _together(engine, requests):
    return await asyncio.gather(*(engine.generate(r) for r in requests))


@pytest.mark.parametrize(
    ("shape", "rows", "chunk"),
    [
        ("qwen3", 16, 0),
        pytest.param("qwen3", 64, 0, marks=pytest.mark.slow),
        ("qwen3", 24, 5),
        pytest.param("llama-one-key-head", 16, 0, marks=pytest.mark.slow),
    ],
)
def test_generate_64_requests_alone_together_and_shuffled_are_bit_equal(
    make_tiny, request_for, assert_equal, shape, rows, chunk
):
    tiny = make_tiny(shape)
    requests = _requests(request_for, 64)

    async def play():
        fresh = tiny.engine(rows=rows, chunk=chunk, key_block=16, prefix_reuse=False)
        await fresh.load(0, tiny.weights())
        alone = [await fresh.generate(r) for r in requests]
        engine = tiny.engine(rows=rows, chunk=chunk, key_block=16)
        await engine.load(0, tiny.weights())
        together = await _together(engine, requests)
        order = np.random.default_rng(5).permutation(len(requests))
        shuffled = await _together(engine, [requests[i] for i in order])
        staggered = []
        for at in range(0, 64, 7):  # newcomers join while others decode
            staggered += [asyncio.ensure_future(engine.generate(r)) for r in requests[at : at + 7]]
            await asyncio.sleep(0.002)
        staggered = [await s for s in staggered]
        assert (await engine.health())["cached_tokens"] > 0
        return alone, together, order, shuffled, staggered

    alone, together, order, shuffled, staggered = asyncio.run(play())
    for place, index in enumerate(order):
        assert_equal(alone[index], together[index])
        assert_equal(alone[index], shuffled[place])
        assert_equal(alone[index], staggered[index])
    assert len({c.tokens.tobytes() for c in alone}) > 40
    assert {c.finish for c in alone} == {"stop", "length"}


def test_score_is_bit_equal_to_what_sampling_reported(tiny, request_for):
    async def play():
        engine = tiny.engine()
        await engine.load(0, tiny.weights())
        for index in range(8):
            asked = request_for(index, size=1 + 5 * index, new=20)
            others = [engine.generate(request_for(90 + i, size=11)) for i in range(index)]
            completion, *_ = await asyncio.gather(engine.generate(asked), *others)
            scored = await engine.score(np.concatenate([asked.tokens, completion.tokens]))
            assert scored.dtype == np.float32
            assert scored[0] == 0
            assert scored[len(asked.tokens) :].tobytes() == completion.logprobs.tobytes()

    asyncio.run(play())


def test_next_turn_reuses_sampled_tokens_without_a_trace(tiny, request_for, assert_equal):
    async def play():
        engine, fresh = tiny.engine(), tiny.engine(prefix_reuse=False)
        await engine.load(0, tiny.weights())
        await fresh.load(0, tiny.weights())
        first = request_for(0, size=20, new=15)
        said = await engine.generate(first)
        more = np.array([9, 8, 7], np.int32)
        asked = request_for(1, tokens=np.concatenate([first.tokens, said.tokens, more]))
        reused, computed = await engine.generate(asked), await fresh.generate(asked)
        assert reused.cached_tokens == 20 + 15 - 1  # the last sampled token was never run
        assert computed.cached_tokens == 0
        assert_equal(reused, computed)

    asyncio.run(play())


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.integers(1, 9),
    chunk=st.integers(4, 12),
    events=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 24), st.integers(0, 3)), min_size=1, max_size=14
    ),
)
def test_generate_is_unmoved_by_arrivals_aborts_and_reloads(
    tiny, request_for, assert_equal, rows, chunk, events
):
    """Whatever joins, leaves or reloads meanwhile, a request that ends normally is what it is
    alone."""
    requests = [
        request_for(prompt, size=1 + prompt * 3, new=new, seed=n)
        for n, (prompt, new, _) in enumerate(events)
    ]

    async def play():
        engine = tiny.engine(rows=rows, chunk=chunk, key_block=8)
        reference = tiny.engine(rows=1, chunk=chunk, key_block=8, prefix_reuse=False)
        await engine.load(0, tiny.weights())
        await reference.load(0, tiny.weights())
        running = []
        for asked, (prompt, _, event) in zip(requests, events, strict=True):
            running.append(asyncio.ensure_future(engine.generate(asked)))
            for _ in range(event):
                await asyncio.sleep(0)
            if event == 3:
                await engine.abort([f"k{prompt}"])
            if event == 2:
                await engine.load(0, tiny.weights())
        for asked, task in zip(requests, running, strict=True):
            got, alone = await task, await reference.generate(asked)
            if got.finish == "abort":
                size = len(got.tokens)
                assert got.tokens.tolist() == alone.tokens[:size].tolist()
                assert got.logprobs.tobytes() == alone.logprobs[:size].tobytes()
            else:
                assert_equal(got, alone)
        health = await engine.health()
        assert (health["active"], health["waiting"]) == (0, 0)

    asyncio.run(play())
