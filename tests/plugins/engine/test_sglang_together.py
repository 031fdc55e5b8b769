"""Requests that share a question to an SGLang server: each is what it would be alone, whatever
becomes of the others."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles import Context, EngineError, Request, Sampling
from miles_plugins.engine.sglang import Sglang, together, wording

_SPEC = importlib.util.spec_from_file_location(
    "native_server", Path(__file__).with_name("native_server.py")
)
native = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(native)


@pytest.fixture
def play(tmp_path):
    """Run a coroutine function of (client, server) against a server that is up and known."""

    def run(function, **info):
        async def main():
            (tmp_path / "key").write_text(native.KEY)
            server = native.NativeServer(**info)
            async with server.up() as url:
                config = Sglang.Config(url=url, api_key_file=str(tmp_path / "key"))
                client = Sglang(config, Context(directory=tmp_path))
                try:
                    async with asyncio.timeout(20):
                        await client.health()
                        await client.version()
                        return await function(client, server)
                finally:
                    await client.close()

        return asyncio.run(main())

    return run


def _request(new=12, index=0, **changes):
    tokens = np.arange(40, 50, dtype=np.int32)
    sampling = Sampling(max_new_tokens=new, **changes)
    key = f"g{index}.0"
    return Request(id=f"{key}/0", key=key, tokens=tokens, sampling=sampling, seed=index)


async def _running(server, count, tokens=5):
    while sum(len(job.tokens) >= tokens for job in server.jobs.values()) < count:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("incremental", [False, True])
def test_sglang_requests_of_one_moment_share_questions(play, incremental):
    """And are what they would be alone: tokens, log-probs and ends."""

    async def check(client, server):
        server.incremental = incremental
        asked = [_request(5 + i % 7, i, stop_ids=(9,)) for i in range(70)]
        alone = [await client.generate(one) for one in asked]
        assert set(server.questions) == {1}
        server.questions.clear()
        made = await asyncio.gather(*map(client.generate, asked))
        assert server.questions == [32, 32, 6]
        for one, other in zip(alone, made, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.logprobs.tolist() == other.logprobs.tolist()
            assert (one.spans, one.finish) == (other.spans, other.finish)
        assert not server.jobs and not client._asking.running

    play(check)


def test_sglang_requests_that_differ_in_more_than_their_tokens_share_none(play):
    async def check(client, server):
        plain, ranked = _request(), replace(_request(index=1), dp_rank=1)
        shown = replace(_request(index=2), images=(b"image",))
        asked = [plain, plain, ranked, ranked, shown, shown]
        await asyncio.gather(*map(client.generate, asked))
        assert sorted(server.questions) == [1, 1, 2, 2]
        assert sum("image_data" in body for body in server.bodies) == 2

    play(check, dp_size=2)


def test_sglang_request_that_is_refused_takes_no_other_along(play):
    """Of several in one question the server refuses all."""

    async def check(client, server):
        server.refused = 7
        asked = [_request(9, i) for i in range(8)]
        asked[3] = replace(asked[3], tokens=np.array([server.refused], np.int32))
        made = await asyncio.gather(*map(client.generate, asked), return_exceptions=True)
        assert isinstance(made.pop(3), EngineError)
        assert [len(one.tokens) for one in made] == [9] * 7
        assert server.questions == [8] + [1] * 8
        ids = [body["rid"] for body in server.bodies]
        assert len(set(ids)) == len(ids)

    play(check)


@pytest.mark.parametrize("status", [413, 422, 429, 500, 503])
def test_sglang_question_too_much_for_what_stands_between_is_asked_singly(play, status):
    """Such as a proxy with a limit of length, or one that knows no lists: no request is at
    fault."""

    async def check(client, server):
        server.most_asked, server.fault_of_more = 1, status
        made = await asyncio.gather(*(client.generate(_request(9, i)) for i in range(4)))
        assert [len(one.tokens) for one in made] == [9] * 4
        assert server.questions == [4] + [1] * 4
        server.fault = (status, "not at all")
        asked = (client.generate(_request(9, i)) for i in range(4))
        for one in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(one, EngineError) and f"HTTP {status}" in str(one)

    play(check)


def test_sglang_reply_that_is_broken_is_an_error_of_its_request_alone(play):
    """Else one bad reply is held against as many keys as there were in the question, and the
    router drains the engine."""

    def break_it(reply):
        if reply["meta_info"]["id"].startswith("g2.0/"):
            del reply["meta_info"]["output_token_logprobs"]

    async def check(client, server):
        server.twist = break_it
        asked = (client.generate(_request(9 + i, i)) for i in range(6))
        made = await asyncio.gather(*asked, return_exceptions=True)
        assert "output_token_logprobs" in str(made.pop(2))
        assert [len(one.tokens) for one in made] == [9, 10, 12, 13, 14]
        assert server.questions == [6] and len(server.aborted) == 1

    play(check)


@pytest.mark.parametrize("how", ["other", "none"])
def test_sglang_requests_that_a_shared_reply_does_not_name_are_asked_singly(play, how):
    def rename(reply):
        reply["meta_info"].pop("id")
        if how == "other":
            reply["meta_info"]["id"] = "of somebody between"

    async def check(client, server):
        server.twist = rename
        made = await asyncio.gather(*(client.generate(_request(9, i)) for i in range(4)))
        assert [len(one.tokens) for one in made] == [9] * 4
        assert server.questions == [4] + [1] * 4

    play(check)


async def _busy(client, server):
    """Requests under way, so that the next ones wait for others."""
    tasks = [asyncio.create_task(client.generate(_request(200, 100 + i))) for i in range(20)]
    await _running(server, 20)
    return tasks


def test_sglang_abort_reaches_requests_that_have_not_gone_to_the_server(play):
    """Else the server is told of an end before a beginning, and they run on."""

    async def check(client, server):
        busy = await _busy(client, server)
        tasks = [asyncio.create_task(client.generate(_request(60, i))) for i in range(6)]
        await asyncio.sleep(0)
        assert await client.abort([f"g{i}.0" for i in range(5)]) == 5
        made = await asyncio.gather(*tasks)
        assert [(len(one.tokens), one.finish) for one in made] == [(0, "abort")] * 5 + [
            (60, "length")
        ]
        assert len(server.bodies) == 21 and not server.aborted
        assert all(len(one.tokens) == 200 for one in await asyncio.gather(*busy))

    play(check)


@pytest.mark.parametrize("cut", [False, True])
def test_sglang_requests_that_have_not_gone_to_the_server_wait_for_new_weights(play, cut):
    """And are asked under the salt and version of those."""

    async def check(client, server):
        busy = await _busy(client, server)
        tasks = [asyncio.create_task(client.generate(_request(60, i))) for i in range(6)]
        await asyncio.sleep(0)
        asking = client._asking
        asking.close(cut=cut)
        await asyncio.sleep(0.02)
        assert len(server.bodies) == 20
        asking.newest, asking.salted = 7, True
        asking.open()
        made = await asyncio.gather(*tasks)
        assert [(len(one.tokens), one.finish) for one in made] == [(60, "length")] * 6
        assert {body["extra_key"] for body in server.bodies[20:]} == {"miles-7"}
        assert server.questions == [20, 6]
        await asyncio.gather(*busy)
        assert not asking.running and not asking._cut

    play(check)


@pytest.mark.parametrize("how", ["one", "all"])
def test_sglang_requests_given_up_leave_those_of_their_question(play, how):
    async def check(client, server):
        tasks = [asyncio.create_task(client.generate(_request(60, i))) for i in range(8)]
        await _running(server, 8)
        given_up = tasks[:1] if how == "one" else tasks
        for task in given_up:
            task.cancel()
        made = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(server.aborted) == len(given_up)
        assert sum(isinstance(one, asyncio.CancelledError) for one in made) == len(given_up)
        assert all(len(one.tokens) == 60 for one in made[len(given_up) :])
        await client._asking._together.ended(5.0)
        assert not client._asking._together._tasks and not client._asking.running

    play(check)


def test_sglang_question_that_breaks_off_is_an_error_of_each(play):
    async def check(client, server):
        tasks = [asyncio.create_task(client.generate(_request(6000, i))) for i in range(8)]
        await _running(server, 8)
        server.hang_up()
        made = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, wording.Unreachable) for one in made), made
        assert len({id(one) for one in made}) == 8

    play(check)


@pytest.mark.parametrize("count", [1, 4])
def test_sglang_close_ends_questions_that_are_under_way(play, count):
    """Else they wait until `timeout_s`."""

    async def streamed(client):
        async for _ in client.stream(_request(6000, 9)):
            pass

    async def check(client, server):
        asked = [client.generate(_request(6000, i)) for i in range(count)]
        tasks = [asyncio.create_task(one) for one in (*asked, streamed(client))]
        await _running(server, count + 1)
        await client.close()
        async with asyncio.timeout(5):
            made = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, EngineError) for one in made), made
        assert not client._asking.running and client._http._session is None

    play(check)


def test_sglang_fault_of_ours_in_a_question_reaches_who_asked(play, monkeypatch):
    """Else they would wait for ever."""

    def broken(self, part):
        raise RuntimeError("a fault of ours")

    async def check(client, server):
        monkeypatch.setattr(together.Streamed, "add", broken)
        asked = [client.generate(_request(9, i)) for i in range(4)]
        made = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(one) for one in made] == ["a fault of ours"] * 4

    play(check)


@given(
    asked=st.lists(
        st.tuples(st.integers(1, 20), st.none() | st.integers(0, 15)), min_size=1, max_size=40
    ),
    incremental=st.booleans(),
)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_sglang_questions_answer_whoever_still_waits(play, asked, incremental):
    """(tokens, ms after which it is given up): everybody else has all tokens, the server is rid of
    the others, and nothing is left of a question."""

    async def one(client, index, new, until):
        task = asyncio.create_task(client.generate(_request(new, index)))
        if until is not None:
            await asyncio.sleep(until / 1e3)
            task.cancel()
        return await task

    async def check(client, server):
        server.incremental = incremental
        each = (one(client, i, new, until) for i, (new, until) in enumerate(asked))
        made = await asyncio.gather(*each, return_exceptions=True)
        for (new, until), completion in zip(asked, made, strict=True):
            if isinstance(completion, BaseException):
                assert until is not None and isinstance(completion, asyncio.CancelledError)
            else:
                assert (len(completion.tokens), completion.finish) == (new, "length")
        await client._asking._together.ended(5.0)
        assert not client._asking._together._tasks and not client._asking.running

    play(check)
