"""The SGLang client against a local server that keeps to the protocol: `/generate` whole and
streamed, aborts, scores, health, errors, silence."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from miles import ConfigError, Context, EngineError, Request, Sampling, WeightSyncError
from miles.testing import FakeEngine
from miles_plugins.engine.sglang import Sglang

KEY = "server-key"


class Server:
    """What an SGLang server says, sampled by the bigram fake. A stream repeats what came before."""

    def __init__(self) -> None:
        self.engine = FakeEngine(FakeEngine.Config(delay_s=0.001))
        self.bodies: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.weight_version = "default"
        self.old = False
        self.fault: Any = None
        self.silent = False

    @asynccontextmanager
    async def up(self):
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/get_model_info", self._old_info)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    def _allowed(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise web.HTTPUnauthorized(text="bad key")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self._allowed(request)
        body = await request.json()
        self.bodies.append(body)
        if self.silent:
            await asyncio.sleep(30)
        if self.fault is not None:
            return web.json_response({"error": {"message": self.fault}}, status=400)
        params, ids = body["sampling_params"], np.array(body["input_ids"], np.int32)
        if "logprob_start_len" in body:
            scores = (await self.engine.score(ids)).tolist()
            triples = [
                [None if i == 0 else s, int(t), None]
                for i, (s, t) in enumerate(zip(scores, ids, strict=True))
            ]
            return web.json_response(
                {
                    "output_ids": [1],
                    "meta_info": {
                        "finish_reason": {"type": "length", "length": 1},
                        "input_token_logprobs": triples,
                        "output_token_logprobs": [[-1.0, 1, None]],
                    },
                }
            )
        asked = Request(
            id=body["rid"],
            key=body["rid"],
            tokens=ids,
            sampling=Sampling(
                max_new_tokens=params["max_new_tokens"],
                temperature=params["temperature"],
                top_p=params["top_p"],
                top_k=max(0, params["top_k"]),
                stop_ids=tuple(params["stop_token_ids"]),
            ),
            seed=params["sampling_seed"],
        )
        made = await self.engine.generate(asked)
        if not body["stream"]:
            return web.json_response(self._reply(made, len(made.tokens), len(ids)))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        every = params["stream_interval"]
        for end in [*range(every, len(made.tokens), every), len(made.tokens)]:
            part = self._reply(made, end, len(ids))
            await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
            await asyncio.sleep(0.001)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _reply(self, made: Any, end: int, prompt: int) -> dict[str, Any]:
        whole = end == len(made.tokens)
        ids = made.tokens[:end].tolist()
        reason: dict[str, Any] | None = {"type": made.finish} if whole else None
        return {
            "text": "whatever",
            "output_ids": ids,
            "meta_info": {
                "id": "x",
                "finish_reason": reason,
                "prompt_tokens": prompt,
                "completion_tokens": end,
                "cached_tokens": 2,
                "weight_version": self.weight_version,
                "output_token_logprobs": [
                    [float(p), t, None] for p, t in zip(made.logprobs, ids, strict=False)
                ],
            },
        }

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        await self.engine.abort([rid])
        return web.Response()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.fault else 200)

    async def _info(self, request: web.Request) -> web.Response:
        if self.old:
            raise web.HTTPNotFound
        return web.json_response({"weight_version": self.weight_version})

    async def _old_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _pause(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] == "in_place"
        await self.engine.pause()
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await self.engine.resume()
        return web.json_response({"status": "ok"})


@pytest.fixture
def play(tmp_path):
    """Run a coroutine function of (client, server) against a server that is up."""

    def run(function, **config):
        async def main():
            (tmp_path / "key").write_text(KEY + "\n")
            server = Server()
            async with server.up() as url:
                made = Sglang.Config(url=url, api_key_file=str(tmp_path / "key"), **config)
                client = Sglang(made, Context(directory=tmp_path))
                try:
                    return await function(client, server)
                finally:
                    await client.close()

        return asyncio.run(main())

    return run


def _request(new: int = 12, **changes: Any) -> Request:
    tokens = np.arange(40, 50, dtype=np.int32)
    sampling = Sampling(max_new_tokens=new, **changes)
    return Request(id="g1.0/0", key="g1.0", tokens=tokens, sampling=sampling, seed=2**40 + 5)


def test_sglang_samples_what_the_server_says(play):
    async def check(client, server):
        server.weight_version = "4"
        made = await client.generate(_request(stop_ids=(3,), top_k=5))
        body = server.bodies[-1]
        wanted = await server.engine.generate(
            replace(_request(stop_ids=(3,), top_k=5), seed=body["sampling_params"]["sampling_seed"])
        )
        assert made.tokens.tolist() == wanted.tokens.tolist()
        np.testing.assert_allclose(made.logprobs, wanted.logprobs, atol=1e-6)
        assert [(s.start, s.stop, s.version) for s in made.spans] == [(0, len(made.tokens), 4)]
        assert (made.finish, made.cached_tokens) == (wanted.finish, 2)
        params = body["sampling_params"]
        assert params["stop_token_ids"] == [3]
        assert (params["top_k"], params["no_stop_trim"]) == (5, True)
        assert params["skip_special_tokens"] is False
        assert body["return_logprob"] is True
        assert await client.version() == 4

    play(check)


def test_sglang_streams_the_same_completion(play):
    async def check(client, server):
        whole = await client.generate(_request(30))
        parts = [part async for part in client.stream(_request(30))]
        assert len(parts) > 4
        assert np.concatenate(parts[:-1]).tolist() == parts[-1].tokens.tolist()
        assert parts[-1].tokens.tolist() == whole.tokens.tolist()
        assert parts[-1].logprobs.tolist() == whole.logprobs.tolist()

    play(check, stream_interval=3)


def test_sglang_scores(play):
    async def check(client, server):
        tokens = np.array([5, 9, 200, 9], np.int32)
        scored = await client.score(tokens)
        assert scored.dtype == np.float32
        np.testing.assert_allclose(scored, await server.engine.score(tokens), atol=1e-6)
        assert scored[0] == 0

    play(check)


def test_sglang_abort_ends_requests_of_a_key(play):
    async def check(client, server):
        await client.pause()
        task = asyncio.create_task(client.generate(_request(200)))
        while not server.bodies:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert await client.abort(["another"]) == 0
        assert await client.abort(["g1.0"]) == 1
        await client.resume()
        assert (await task).finish == "abort"
        assert server.aborted == [server.bodies[0]["rid"]]
        assert (await client.health())["active"] == 0

    play(check)


@pytest.mark.parametrize("how", ["cancel", "leave a stream", "time out"])
def test_sglang_aborts_what_nobody_waits_for(play, how):
    async def check(client, server):
        if how == "cancel":
            await client.pause()
            task = asyncio.create_task(client.generate(_request(200)))
            while not server.bodies:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "time out":
            server.silent = True
            with pytest.raises(EngineError, match=r"no answer in 0\.3 s"):
                await client.generate(_request())
        else:
            stream = client.stream(_request(200))
            async for _ in stream:
                break
            await stream.aclose()
        assert server.aborted == [server.bodies[0]["rid"]]

    play(check, timeout_s=0.3 if how == "time out" else 20.0)


def test_sglang_version_of_a_fresh_or_older_server(play):
    async def check(client, server):
        assert await client.version() == 0
        server.old, server.weight_version = True, "17"
        assert await client.version() == 17

    play(check)


def test_sglang_weights_that_change_leave_the_older_version(play):
    async def check(client, server):
        server.weight_version = "1"
        await client.generate(_request())
        server.weight_version = "2"
        between, after = [await client.generate(_request()) for _ in range(2)]
        assert between.spans[0].version == 1
        assert after.spans[0].version == 2

    play(check)


def test_sglang_says_what_the_server_refused(play):
    async def check(client, server):
        server.fault = "The input is too long"
        with pytest.raises(EngineError, match=r"HTTP 400.*The input is too long"):
            await client.generate(_request())
        with pytest.raises(EngineError, match="health: HTTP 503"):
            await client.health()

    play(check)


def test_sglang_counts(play):
    async def check(client, server):
        made = await client.generate(_request(9))
        health = await client.health()
        assert health["tokens"] == len(made.tokens)
        assert (health["prompt_tokens"], health["cached_tokens"]) == (10, 2)
        assert health["busy_s"] > 0

    play(check)


def test_sglang_refuses_what_it_cannot_do(play, tmp_path):
    with pytest.raises(ConfigError, match="url is ''"):
        Sglang(Sglang.Config(), Context(directory=tmp_path))

    async def check(client, server):
        with pytest.raises(WeightSyncError, match="cannot load version 3"):
            await client.load(3, ())
        with pytest.raises(EngineError, match="routed experts"):
            await client.generate(replace(_request(), want_experts=True))
        with pytest.raises(EngineError, match="no routing key"):
            await client.generate(replace(_request(), key=""))
        with pytest.raises(EngineError, match="cannot free its memory"):
            await client.sleep()

    play(check)


def test_sglang_without_a_server_is_an_engine_error(tmp_path):
    async def check():
        client = Sglang(
            Sglang.Config(url="http://127.0.0.1:9", connect_s=2.0), Context(directory=tmp_path)
        )
        try:
            with pytest.raises(EngineError, match=r"GET http://127\.0\.0\.1:9/model_info: Client"):
                await client.generate(_request())
        finally:
            await client.close()

    asyncio.run(check())
