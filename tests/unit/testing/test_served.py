"""The scripted session that plugin authors test outside agents with."""

import asyncio
import json

import aiohttp
import pytest

from miles import EpisodeError
from miles.testing import FakeServedSession, fake_serve

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED = [{"role": "user", "content": "hello"}]


async def ask(session, *, key=None, path="/v1/chat/completions", **body):
    headers = {"Authorization": f"Bearer {key or session.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(session.base_url + path, json={"model": "m", "messages": ASKED, **body}) as got,
    ):
        return got.status, await got.text()


def test_served_session_answers_by_script_and_records_samples():
    async def run():
        seen = []
        serve = fake_serve(lambda messages, tools: f"{len(messages)} and {len(tools)}", into=seen)
        async with serve("g0.0") as session:
            status, text = await ask(session, tools=[{"type": "function"}])
            assert status == 200
            choice = json.loads(text)["choices"][0]
            assert choice["message"]["content"] == "1 and 1" and choice["finish_reason"] == "stop"
            await ask(session)
        assert seen == [session] and len(session.requests) == 2
        return session.trajectory(reward=0.5, metrics={"turns": 2.0})

    trajectory = asyncio.run(run())
    assert (trajectory.id, trajectory.reward, trajectory.text) == ("g0.0", 0.5, "1 and 0")
    assert [int(s.sampled.sum()) for s in trajectory.samples] == [8, 8]


def test_served_session_repeats_its_last_reply_and_passes_tool_calls_on():
    async def run():
        replies = [{"role": "assistant", "content": None, "tool_calls": [CALL]}, "done"]
        async with FakeServedSession("k", script=replies).served() as session:
            got = [json.loads((await ask(session))[1])["choices"][0] for _ in range(3)]
            return [(c["finish_reason"], c["message"]["content"]) for c in got]

    assert asyncio.run(run()) == [("tool_calls", None), ("stop", "done"), ("stop", "done")]


def test_served_session_streams_text_calls_and_usage():
    async def run():
        said = {"role": "assistant", "content": "abcd", "tool_calls": [CALL]}
        async with FakeServedSession("k", script=[said]).served() as session:
            return (await ask(session, stream=True))[1]

    events = [line[6:] for line in asyncio.run(run()).splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert "".join(d.get("content", "") for d in deltas) == "abcd"
    assert [d["tool_calls"][0]["id"] for d in deltas if "tool_calls" in d] == ["c1"]
    assert chunks[-1]["usage"]["completion_tokens"] == 24  # with its call


def test_served_session_refuses_other_keys_and_paths_and_an_empty_trajectory():
    async def run():
        async with FakeServedSession("k", script=["x"]).served() as session:
            assert (await ask(session, key="wrong"))[0] == 401
            assert (await ask(session, path="/v1/embeddings"))[0] == 404
            with pytest.raises(EpisodeError, match="session 'k': the agent asked nothing"):
                session.trajectory(reward=1.0)

    asyncio.run(run())
