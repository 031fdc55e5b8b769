"""The embedded engine behind the session server, asked by the official clients."""

from __future__ import annotations

import asyncio

import anthropic
import numpy as np
import openai

from miles import Sampling
from miles.session import Sessions
from miles.session.server import make_app, open_session, serve
from miles_plugins.tito.bytes import Bytes


def test_torch_streams_what_it_is_then_scored_on(tiny):
    """Text comes in parts; the sample's log-probs are those of a score of the same tokens."""

    async def play():
        engine = tiny.engine(max_len=256, rows=16)
        await engine.load(3, tiny.weights())
        tito = Bytes(Bytes.Config(), tiny.context)
        sessions = Sessions(tito, max_tokens=256)
        app = make_app(
            sessions,
            engine=engine,
            tito=tito,
            sampling=Sampling(max_new_tokens=40),
            seed_of=lambda id: 11,
            model="tiny",
            admin_token="admin",
        )
        session, key = open_session(sessions, id="s")
        async with serve(app, grace_s=1) as address:
            base = f"{address}/sessions/s"
            async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key) as client:
                stream = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}], stream=True
                )
                parts = [c.choices[0].delta.content async for c in stream if c.choices]
            parts = [part for part in parts if part]
            assert len(parts) > 3
            assert "".join(parts) == session.messages[-1]["content"]
            async with anthropic.AsyncAnthropic(base_url=base, api_key=key) as client:
                said = await client.messages.create(
                    model="m",
                    max_tokens=9,
                    messages=[
                        {"role": "user", "content": "hi"},
                        {"role": "assistant", "content": "".join(parts)},
                        {"role": "user", "content": "more"},
                    ],
                )
            assert said.usage.output_tokens <= 9
            (sample,) = session.samples()
            scored = await engine.score(sample.tokens)
            assert session.turns == 2
            np.testing.assert_allclose(
                sample.logprobs[sample.sampled], scored[sample.sampled], atol=1e-4
            )
            assert {span.version for span in sample.spans} == {3}

    asyncio.run(play())


def test_torch_frees_the_row_of_a_client_that_goes_away(tiny):
    async def play():
        engine = tiny.engine(max_len=256, rows=16)
        await engine.load(0, tiny.weights())
        tito = Bytes(Bytes.Config(), tiny.context)
        sessions = Sessions(tito, max_tokens=256)
        app = make_app(
            sessions,
            engine=engine,
            tito=tito,
            sampling=Sampling(max_new_tokens=200),
            seed_of=lambda id: 11,
            model="tiny",
            admin_token="admin",
        )
        session, key = open_session(sessions, id="s")
        async with serve(app, grace_s=1) as address:
            await engine.pause()
            async with openai.AsyncOpenAI(
                base_url=f"{address}/sessions/s/v1", api_key=key
            ) as client:
                asking = asyncio.create_task(
                    client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": "hi"}]
                    )
                )
                while not session.pending:
                    await asyncio.sleep(0.01)
                asking.cancel()
            async with asyncio.timeout(10):
                while session.pending:
                    await asyncio.sleep(0.01)
            await engine.resume()
            health = await engine.health()
            assert (health["active"], health["waiting"], session.turns) == (0, 0, 0)

    asyncio.run(play())
