"""The client against the real SGLang on a CPU: log-probs, streams, aborts, updates under way with
exact spans, proofs, and a server that is killed.

`tests/sglang_cpu/install.sh` makes its environment; MILES_TEST_SGLANG names its interpreter.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from miles import Context, EngineError, Settings
from miles_plugins.engine.sglang import Sglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

CLOSE = 2e-3  # nats, float32 on both sides
FLAGS = {"max_total_tokens": 8192}


@pytest.fixture
def engine(tiny, tmp_path, sglang_python):
    """Makes an engine with a server of its own."""

    def make(*, incremental=True, **settings):
        config = Sglang.Config(
            python=sglang_python,
            device="cpu",
            memory_fraction=0.1,
            max_running=32,
            flags=FLAGS if incremental else {**FLAGS, "incremental_streaming_output": False},
            environment={"OMP_NUM_THREADS": "1"},
        )
        around = replace(tiny.context, model=tiny.model, settings=Settings(**settings))
        return Sglang(config, replace(around, directory=tmp_path / "run"))

    return make


def _near(tiny, request, made, start=0, stop=None):
    """(tokens,) how far log-probs are from what `transformers` says."""
    whole = np.concatenate([request.tokens, made.tokens])
    said = tiny.logprobs(whole)[len(request.tokens) :]
    return np.abs(made.logprobs - said)[start:stop]


async def _requests(tiny, engine, request_for, ask_natively):
    await engine.load(0, tiny.weights())
    assert await engine.version() == 0
    asked = request_for(0, new=40)
    made = await engine.generate(asked)
    assert (made.finish, len(made.tokens), made.spans[0].version) == ("length", 40, 0)
    assert _near(tiny, asked, made).max() < CLOSE
    parts = [part async for part in engine.stream(request_for(1, new=40))]
    assert np.concatenate(parts[:-1]).tolist() == parts[-1].tokens.tolist()
    stops = (int(made.tokens[10]),)
    greedy = replace(asked, sampling=replace(asked.sampling, temperature=0.0))
    first = await engine.generate(greedy)
    again = [part async for part in engine.stream(greedy)][-1]
    assert (again.tokens.tolist(), again.spans) == (first.tokens.tolist(), first.spans)
    assert np.abs(again.logprobs - first.logprobs).max() < CLOSE
    stops = (int(first.tokens[10]),)
    cut = await engine.generate(replace(greedy, sampling=replace(greedy.sampling, stop_ids=stops)))
    assert cut.finish == "stop"
    assert cut.tokens.tolist() == first.tokens[: len(cut.tokens)].tolist()
    assert cut.tokens[-1] == stops[0]
    scored = await engine.score(np.concatenate([asked.tokens, made.tokens]))
    assert np.abs(scored[len(asked.tokens) :] - made.logprobs).max() < CLOSE
    task = asyncio.create_task(engine.generate(request_for(2, new=80)))
    await asyncio.sleep(0.1)
    assert await engine.abort([request_for(2).key]) == 1
    assert (await task).finish in ("abort", "length")
    with pytest.raises(EngineError, match="HTTP 400"):
        await engine.generate(request_for(3, size=300))
    sums = await engine.checksums()
    assert "model.layers.0.self_attn.qkv_proj.weight" in sums
    await ask_natively(engine._http)
    await engine.flush()


async def _ended_while_it_waits(tiny, engine, request_for):
    """A stream whose request was put back to wait, and is aborted there: it has all its tokens."""
    asked, begun = request_for(9, new=200), asyncio.Event()
    task = asyncio.create_task(_streamed(engine, asked, begun))
    await asyncio.wait_for(begun.wait(), 60)
    await engine.pause("retract")
    await asyncio.sleep(0.2)
    assert await engine.abort([asked.key]) == 1
    await engine.resume()
    made = await task
    assert made.finish == "abort" and 0 < len(made.tokens) < 200
    assert _near(tiny, asked, made).max() < CLOSE


async def _streamed(engine, one, begun):
    """Its completion; `begun` is set at its first tokens."""
    last = None
    async for part in engine.stream(one):
        begun.set()
        last = part
    return last


async def _update(tiny, engine, request_for, pause):
    """Weights change under 16 running requests; every token is checked against its weights."""
    tiny.module, old = tiny.other, tiny.module
    asked = [request_for(i, new=80) for i in range(16)]
    begun = asyncio.Event()
    tasks = [asyncio.create_task(_streamed(engine, asked[0], begun))]
    tasks += [asyncio.create_task(engine.generate(one)) for one in asked[1:]]
    await asyncio.wait_for(begun.wait(), 60)
    before = await engine.version()
    engine.prove_next()  # scrambled and read again while requests wait
    await engine.load(before + 1, tiny.weights(tiny.other))
    done = await asyncio.gather(*tasks)
    straddled = 0
    for one, made in zip(asked, done, strict=True):
        assert (made.finish, len(made.tokens)) == ("length", 80), "a request was lost"
        split = sum(s.stop - s.start for s in made.spans if s.version == before)
        tiny.module, new = old, tiny.other
        assert _near(tiny, one, made, 0, split).max(initial=0) < CLOSE
        if 0 < split < 80:
            straddled += 1
            # one more token under the old weights would be far from what they say
            assert _near(tiny, one, made, split).max() > 0.05
        tiny.module = new
        if pause != "in_place":  # whose caches stay those of the old weights
            assert _near(tiny, one, made, split).max(initial=0) < CLOSE
    assert straddled, "no request ran across the update"
    late = await engine.generate(request_for(50))
    assert _near(tiny, request_for(50), late).max() < CLOSE


@pytest.mark.parametrize(("pause", "incremental"), [("retract", True), ("in_place", False)])
def test_real_server_samples_and_is_updated_with_exact_spans(
    engine, tiny, request_for, ask_natively, pause, incremental
):
    """By streams that say each token once, as of our own servers, and that repeat, as of others."""

    async def play():
        made = engine(incremental=incremental, pause=pause, max_lag=1)
        try:
            await _requests(tiny, made, request_for, ask_natively)
            info = await made._http.ask("GET", "/server_info")
            assert info["incremental_streaming_output"] is incremental
            await _ended_while_it_waits(tiny, made, request_for)
            await _update(tiny, made, request_for, pause)
            os.killpg(made._server.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match=r"/generate: |the server ended"):
                await made.generate(request_for(7))
            assert made._server.wait(10) is not None
            with pytest.raises(EngineError, match="the server ended"):
                await made.version()
        finally:
            await made.close()

    asyncio.run(play())


def test_context_is_not_needed_to_attach(engine, tiny, request_for, tmp_path):
    """A second client, of the same server by its address, samples and loads as the first does."""

    async def play():
        owner = engine()
        try:
            await owner.load(3, tiny.weights())
            key = tmp_path / "key"
            key.write_text(owner._server.key)
            config = Sglang.Config(url=owner._server.url, api_key_file=str(key))
            guest = Sglang(config, Context(directory=tmp_path, model=tiny.model))
            try:
                assert await guest.version() == 3
                asked = request_for(4)
                assert _near(tiny, asked, await guest.generate(asked)).max() < CLOSE
                await guest.load(4, tiny.weights(tiny.other))
                assert await guest.version() == 4
            finally:
                await guest.close()
        finally:
            await owner.close()

    asyncio.run(play())
