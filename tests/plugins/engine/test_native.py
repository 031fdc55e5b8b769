"""The embedded engine behind SGLang's native routes, driven by the client that drives SGLang."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest

from miles import ConfigError, Context, EngineError, Settings, WeightSyncError
from miles_plugins.engine.native import command
from miles_plugins.engine.native.routes import Native, listening
from miles_plugins.engine.sglang import Sglang

TOKEN = "a token"


@pytest.fixture
def checkpoints(tiny, tmp_path):
    """Two directories: the tiny model, and the same with other weights."""
    found = []
    for name, module in (("one", tiny.module), ("two", tiny.other)):
        module.save_pretrained(tmp_path / name)
        found.append(tmp_path / name)
    return found


@pytest.fixture
def served(tiny, tmp_path):
    """An async context manager: (client, engine) of an engine that is served."""
    (tmp_path / "token").write_text(TOKEN)

    @asynccontextmanager
    async def up(**settings):
        rules = Settings(**settings)
        engine = tiny.engine(settings=rules)
        native = Native(engine, token=TOKEN, pause=rules.pause)
        async with listening(native, "127.0.0.1", 0) as url:
            config = Sglang.Config(url=url, api_key_file=str(tmp_path / "token"))
            around = Context(directory=tmp_path, settings=rules, model=tiny.model)
            client = Sglang(config, around)
            try:
                async with asyncio.timeout(60):
                    yield client, engine
            finally:
                await client.close()

    return up


def test_client_of_a_served_engine_gets_what_the_engine_says(
    served, tiny, checkpoints, request_for, assert_equal
):
    async def play():
        async with served() as (client, _):
            await client.load_directory(4, checkpoints[0])
            assert await client.version() == 4
            direct = tiny.engine()
            await direct.load(4, tiny.weights())
            for index in range(4):
                asked = request_for(index, new=20, top_k=5 if index == 3 else 0)
                got, wanted = await client.generate(asked), await direct.generate(asked)
                assert_equal(replace(got, truncated_logprobs=wanted.truncated_logprobs), wanted)
                assert got.spans == wanted.spans
                parts = [part async for part in client.stream(asked)]
                assert np.concatenate(parts[:-1]).tolist() == wanted.tokens.tolist()
                assert_equal(
                    replace(parts[-1], truncated_logprobs=wanted.truncated_logprobs), wanted
                )
            tokens = np.arange(30, dtype=np.int32)
            np.testing.assert_allclose(await client.score(tokens), await direct.score(tokens))
            health = await client.health()
            assert (health["max_len"], health["active"]) == (96, 0)
            assert len(await client.checksums()) == len(tiny.weights())
            await client.flush()
            await client.sleep()
            await client.wake()
            assert (await client.generate(request_for(0))).finish == "length"

    asyncio.run(play())


def test_served_engine_answers_prompt_logprobs_with_samples_and_updates_without_a_version(
    served, checkpoints, ask_natively, request_for
):
    """As the real server does, which is asked the same in `test_sglang_real`."""

    async def play():
        async with served() as (client, _):
            http = client._http
            body = {"model_path": str(checkpoints[0])}
            await http.ask("POST", "/update_weights_from_disk", body)
            assert (await http.ask("GET", "/model_info"))["weight_version"] == "0"
            await client.load_directory(7, checkpoints[0])
            await ask_natively(http)
            assert await client.version() == 7
            longest = np.arange(96, dtype=np.int32)
            assert len(await client.score(longest)) == 96  # there is no room to sample beside
            full = replace(request_for(0), tokens=longest)
            with pytest.raises(EngineError, match="at least 1 must be left"):
                await client.generate(full)
            body = {"model_path": str(checkpoints[0]), "weight_version": "later"}
            with pytest.raises(EngineError, match="must be a number of steps"):
                await http.ask("POST", "/update_weights_from_disk", body)

    asyncio.run(play())


def test_update_without_a_version_keeps_that_of_an_update_before_it(served, checkpoints):
    """It took the version that was served when it was asked, and undid one that was under way."""

    async def play():
        async with served() as (client, engine):
            await client.load_directory(7, checkpoints[0])
            begun, load = asyncio.Event(), engine.load_directory

            async def slowly(version, directory):
                begun.set()
                await asyncio.sleep(0.2)
                await load(version, directory)

            engine.load_directory = slowly
            ask = partial(client._http.ask, "POST", "/update_weights_from_disk")
            body = {"model_path": str(checkpoints[1])}
            under_way = asyncio.create_task(ask({**body, "weight_version": "9"}))
            await begun.wait()
            await ask(body)
            await under_way
            assert (await client._http.ask("GET", "/model_info"))["weight_version"] == "9"
            with pytest.raises(EngineError, match="must be a number of steps"):
                await ask({**body, "weight_version": "9" * 5000})

    asyncio.run(play())


@pytest.mark.parametrize("pause", ["in_place", "retract", "abort"])
def test_served_engine_is_updated_under_way_with_exact_spans(
    served, tiny, checkpoints, request_for, pause
):
    async def play():
        async with served(pause=pause, max_lag=2) as (client, engine):
            await client.load_directory(0, checkpoints[0])
            await client.generate(request_for(99, new=1))
            asked = [request_for(i, new=60) for i in range(6)]
            tasks = [asyncio.create_task(client.generate(one)) for one in asked]
            while (await engine.health())["tokens"] < 60:
                await asyncio.sleep(0.001)
            await client.load_directory(3, checkpoints[1])
            for one, made in zip(asked, await asyncio.gather(*tasks), strict=True):
                if pause == "abort":
                    assert {span.version for span in made.spans} <= {0}
                    continue
                assert len(made.tokens) == 60
                assert [span.version for span in made.spans] == [0, 3]
                whole = np.concatenate([one.tokens, made.tokens])
                old = tiny.logprobs(whole)[len(one.tokens) :]
                stop = made.spans[0].stop
                np.testing.assert_allclose(made.logprobs[:stop], old[:stop], atol=1e-4)
                if pause == "retract":
                    tiny.module, before = tiny.other, tiny.module
                    new = tiny.logprobs(whole)[len(one.tokens) :]
                    tiny.module = before
                    np.testing.assert_allclose(made.logprobs[stop:], new[stop:], atol=1e-4)

    asyncio.run(play())


def test_address_of_a_server_on_ipv6_can_be_used_as_it_is_said(tiny):
    async def play():
        native = Native(tiny.engine(), token=TOKEN, pause="retract")
        try:
            async with (
                listening(native, "::1", 0) as url,
                aiohttp.ClientSession() as http,
                http.get(f"{url}/ping") as reply,
            ):
                assert url.startswith("http://[::1]:")
                assert reply.status == 503
        except OSError:
            pytest.skip("there is no IPv6 here")

    asyncio.run(play())


def test_served_engine_aborts_by_id_and_refuses_what_it_cannot(served, checkpoints, request_for):
    async def play():
        async with served() as (client, engine):
            url, headers = client._http.url, {"Authorization": f"Bearer {TOKEN}"}
            async with aiohttp.ClientSession(headers=headers) as http:
                async with http.get(f"{url}/health") as reply:
                    assert reply.status == 503  # no weights yet
                async with http.post(f"{url}/generate", json={"input_ids": [1]}) as reply:
                    assert (reply.status, "no weights" in await reply.text()) == (503, True)
                await client.load_directory(0, checkpoints[0])
                for body, said in (
                    ({"text": "hello"}, "text is not known here; valid: "),
                    ({"input_id": [1]}, "did you mean 'input_ids'? valid: "),
                    ({"input_ids": []}, "input_ids must be"),
                    ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num is 2; only 0"),
                    ({"input_ids": [1], "sampling_params": {"regex": "a"}}, "regex is not known"),
                    ({"input_ids": [1], "sampling_params": {"max_tokens": 1}}, "'max_new_tokens'?"),
                    ({"input_ids": [1], "sampling_params": {"min_p": 0.1}}, "only 0 is served"),
                    ({"input_ids": [1], "sampling_params": {"top_p": "x"}}, "sampling_params"),
                    ({"input_ids": [1], "sampling_params": ["n"]}, "is no object"),
                    (
                        {"input_ids": [1], "sampling_params": {"stream_interval": "x"}},
                        "stream_interval is 'x'",
                    ),
                    ({"input_ids": [10**6]}, "outside the vocabulary"),
                ):
                    async with http.post(f"{url}/generate", json=body) as reply:
                        assert reply.status == 400
                        assert said in (await reply.json())["error"]["message"]
                async with http.post(f"{url}/generate", data=b"{") as reply:
                    assert (reply.status, "no JSON" in await reply.text()) == (400, True)
                body = {"mode": "later"}
                async with http.post(f"{url}/pause_generation", json=body) as reply:
                    assert "valid: abort, in_place, retract" in await reply.text()
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{url}/generate", json={"input_ids": [1]}) as reply,
            ):
                assert reply.status == 401
            task = asyncio.create_task(client.generate(request_for(0, new=80)))
            while not (await engine.health())["active"]:
                await asyncio.sleep(0.001)
            assert await client.abort([request_for(0).key]) == 1
            assert (await task).finish == "abort"
            with pytest.raises(WeightSyncError):
                await client.load_directory(1, checkpoints[0].parent)

    asyncio.run(play())


@pytest.mark.parametrize("tags", [["bananas"], ["weights", "bananas"], "weights", [["weights"]], 3])
def test_memory_of_an_unknown_kind_is_refused_and_requests_go_on(
    served, checkpoints, request_for, tags
):
    async def play():
        async with served() as (client, _):
            await client.load_directory(0, checkpoints[0])
            url, headers = client._http.url, {"Authorization": f"Bearer {TOKEN}"}
            async with aiohttp.ClientSession(headers=headers) as http:
                for path in ("release", "resume"):
                    where = f"{url}/{path}_memory_occupation"
                    async with http.post(where, json={"tags": tags}) as reply:
                        said = (await reply.json())["error"]["message"]
                        assert reply.status == 400
                        assert f"tags is {tags!r}; valid: a list of cuda_graph, kv_cache" in said
                async with asyncio.timeout(20):
                    assert len((await client.generate(request_for(0, new=4))).tokens)
                for body in ({}, {"tags": None}, {"tags": ["weights", "kv_cache", "cuda_graph"]}):
                    for path in ("release", "resume"):
                        where = f"{url}/{path}_memory_occupation"
                        async with http.post(where, json=body) as reply:
                            assert reply.status == 200

    asyncio.run(play())


@pytest.mark.parametrize("body", [{"tags": ["bananas"]}, [], None])
def test_cache_that_is_flushed_leaves_the_engine_awake_whatever_the_body(
    served, checkpoints, request_for, body
):
    async def play():
        async with served() as (client, _):
            await client.load_directory(0, checkpoints[0])
            url, headers = client._http.url, {"Authorization": f"Bearer {TOKEN}"}
            async with aiohttp.ClientSession(headers=headers) as http:
                async with http.post(f"{url}/flush_cache", json=body) as reply:
                    assert reply.status == 200
                async with asyncio.timeout(20):
                    assert len((await client.generate(request_for(0, new=4))).tokens)

    asyncio.run(play())


def test_serve_command_whose_output_is_closed_does_not_blame_the_port(tiny, tmp_path, monkeypatch):
    stage = SimpleNamespace(settings=Settings())
    model = SimpleNamespace(directory=lambda: None)
    monkeypatch.setattr(command, "_build", lambda *_: (tiny.engine(), model))

    def closed(*words, **how):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("builtins.print", closed)
    serve = partial(command._serve, stage, None, tmp_path, "127.0.0.1")
    with pytest.raises(BrokenPipeError):
        asyncio.run(serve(0))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of .* cannot be listened at: "):
            asyncio.run(serve(port))


@pytest.mark.slow
def test_serve_command_serves_a_checkpoint_until_it_is_told_to_stop(checkpoints, tmp_path):
    miles = Path(sys.executable).parent / "miles"
    words = [str(miles), "serve", f"model.path={checkpoints[0]}", "port=0", f"run.dir={tmp_path}"]
    server = subprocess.Popen(
        [*words, "engine.rows=8", "engine.max_len=96"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        said = server.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", said).group(0)
        token = tmp_path / "serve" / "token"
        assert token.stat().st_mode & 0o077 == 0

        async def play():
            config = Sglang.Config(url=url, api_key_file=str(token))
            client = Sglang(config, Context(directory=tmp_path))
            try:
                assert await client.version() == 0
                assert len(await client.score(np.arange(5, dtype=np.int32))) == 5
            finally:
                await client.close()
            wrong = Sglang(Sglang.Config(url=url), Context(directory=tmp_path))
            try:
                with pytest.raises(EngineError, match="HTTP 401"):
                    await wrong.version()
            finally:
                await wrong.close()

        asyncio.run(play())
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait()


def test_speaking_is_plain_json(request_for):
    from miles import Completion, Span
    from miles_plugins.engine.native import speaking

    made = Completion(
        tokens=np.array([5, 6], np.int32),
        logprobs=np.array([-1, -2], np.float32),
        spans=(Span(start=0, stop=2, version=7),),
        finish="length",
        experts=np.ones((2, 3, 2), np.uint8),
    )
    said = json.loads(json.dumps(speaking.reply(request_for(0), made, version=7, finished=True)))
    assert said["meta_info"]["weight_version"] == "7"
    assert said["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 2}]
