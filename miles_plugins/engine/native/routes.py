"""The server: SGLang's native routes over one engine of this process.

Every route but `/health` and `/ping` asks for the token. What bodies mean is `speaking`.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from miles import Completion, EngineError, MilesError, Request, WeightSyncError, __version__
from miles_plugins.engine.native import speaking

__all__ = ["Native", "listening"]

_OPEN = ("/health", "/ping")
_LARGEST = 64 << 20  # bytes of a body: millions of token ids
_DIGITS = 18  # of a version: what 64 bits hold
_STOP_S = 5.0
_TAGS = ("cuda_graph", "kv_cache", "weights")  # SGLang's kinds of memory


class Native:
    """One engine's routes. `pause` is what the engine does to running requests when it gets
    weights: `in_place`, `retract` or `abort`."""

    def __init__(self, engine: Any, *, token: str, pause: str) -> None:
        self.engine = engine
        self._token = token
        self._pause = pause
        self._running: set[str] = set()
        self._open = asyncio.Event()  # the door: requests wait at it while all is aborted
        self._open.set()
        self._turn = asyncio.Lock()

    def app(self) -> web.Application:
        """The application, to be run in this event loop."""
        app = web.Application(middlewares=[self._guarded], client_max_size=_LARGEST)
        both = ("GET", "POST")
        for methods, path, handler in (
            (("POST",), "/generate", self._generate),
            (("POST",), "/abort_request", self._abort),
            (both, "/health", self._health),
            (both, "/health_generate", self._health),
            (both, "/ping", self._health),
            (("GET",), "/model_info", self._model_info),
            (("GET",), "/get_model_info", self._model_info),
            (("GET",), "/server_info", self._server_info),
            (("GET",), "/get_server_info", self._server_info),
            (("GET",), "/v1/loads", self._loads),
            (("POST",), "/pause_generation", self._pause_generation),
            (("POST",), "/continue_generation", self._continue),
            (both, "/flush_cache", self._flush),
            (("POST",), "/update_weights_from_disk", self._update),
            (("POST",), "/weights_checker", self._check),
            (both, "/release_memory_occupation", self._release),
            (both, "/resume_memory_occupation", self._take_back),
        ):
            for method in methods:
                app.router.add_route(method, path, handler)
        return app

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if request.path not in _OPEN and not hmac.compare_digest(
            given.encode(), f"Bearer {self._token}".encode()
        ):
            return web.json_response({"error": {"message": "the token is missing"}}, status=401)
        try:
            return await handler(request)
        except msgspec.DecodeError as error:
            return _error(400, f"the body is no JSON: {error}")
        except MilesError as error:
            return _error(400, error.detail)

    # ---- requests

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await _body(http)
        asked = speaking.request_of(body)
        await self._open.wait()
        if (version := await self.engine.version()) < 0:
            return _error(503, "there are no weights yet; POST /update_weights_from_disk")
        start = speaking.prompt_start(body, asked.tokens)
        if asked.id in self._running:
            return _error(400, f"rid {asked.id!r} is running already")
        self._running.add(asked.id)
        try:
            prompt = None if start is None else await self._prompt(asked, start)
            samples = asked.sampling.max_new_tokens != 0 and await self._room(asked, prompt)
            reply = partial(speaking.reply, asked, prompt=prompt)
            if body.get("stream"):
                every = int((body.get("sampling_params") or {}).get("stream_interval") or 1)
                items = self.engine.stream(asked) if samples else _nothing()
                return await self._streamed(http, items, reply, version=version, every=every)
            made = await self.engine.generate(asked) if samples else speaking.NOTHING
        finally:
            self._running.discard(asked.id)
        version = await self.engine.version()
        return web.json_response(reply(made, version=version, finished=True))

    async def _prompt(self, asked: Request, start: int) -> list[list[Any]]:
        """Triples of the prompt from `start` on; as in SGLang the first of them has no log-prob."""
        if start == len(asked.tokens):
            return []
        values = await self.engine.score(asked.tokens)
        found = speaking.triples(asked.tokens[start:], values[start:])
        found[0][0] = None
        return found

    async def _room(self, asked: Request, prompt: list[list[Any]] | None) -> bool:
        """Whether a token can be sampled beside the log-probs of a prompt, which may be as long as
        the engine takes. Where those are not asked for, the engine refuses such a prompt."""
        return not prompt or len(asked.tokens) < (await self.engine.health())["max_len"]

    async def _streamed(
        self,
        http: web.Request,
        items: AsyncGenerator[Any, None],
        reply: Callable[..., dict[str, Any]],
        *,
        version: int,
        every: int,
    ) -> web.StreamResponse:
        """Events that each repeat the ones before, as SGLang's do; log-probs come with the last."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)

        async def say(value: Any) -> None:
            await response.write(b"data: " + msgspec.json.encode(value) + b"\n\n")

        done, said = np.zeros(0, np.int32), 0  # (tokens so far,) int32
        try:
            async with aclosing(items):
                async for item in items:
                    if isinstance(item, Completion):
                        version = await self.engine.version()
                        await say(reply(item, version=version, finished=True))
                        break
                    done = np.concatenate([done, item])
                    if len(done) - said >= max(1, every):
                        said = len(done)
                        part = Completion(tokens=done, logprobs=None, spans=(), finish="length")
                        await say(reply(part, version=version, finished=False))
        except EngineError as error:
            await say({"error": {"message": str(error)}})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _abort(self, http: web.Request) -> web.Response:
        body = await _body(http)
        if body.get("abort_all"):
            await self.engine.abort(None)
        elif rid := str(body.get("rid") or ""):
            await self.engine.abort([rid])
        return web.Response()

    # ---- what it is

    async def _health(self, http: web.Request) -> web.Response:
        good = await self.engine.version() >= 0
        return web.Response(status=200 if good else 503)

    async def _model_info(self, http: web.Request) -> web.Response:
        version = await self.engine.version()
        said = "default" if version < 0 else str(version)
        return web.json_response({"weight_version": said, "is_generation": True})

    async def _server_info(self, http: web.Request) -> web.Response:
        longest = int((await self.engine.health()).get("max_len", 0))
        info: dict[str, Any] = {
            "version": f"miles {__version__}",
            "disable_overlap_schedule": True,  # a token counts when it is drawn
            "enable_memory_saver": True,
            "enable_deterministic_inference": True,
            "dp_size": 1,
        }
        if longest:
            info["max_req_input_len"] = longest - 1
        return web.json_response(info)

    async def _loads(self, http: web.Request) -> web.Response:
        health = await self.engine.health()
        load = {
            "dp_rank": 0,
            "num_running_reqs": int(health.get("active", 0)),
            "num_waiting_reqs": int(health.get("waiting", 0)),
        }
        return web.json_response({"version": f"miles {__version__}", "loads": [load]})

    # ---- weights and life cycle

    async def _pause_generation(self, http: web.Request) -> web.Response:
        mode = (await _body(http)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _error(400, f"mode is {mode!r}; valid: abort, in_place, retract")
        if mode != "abort" and mode != self._pause and self._running:
            return _error(
                400, f"mode is {mode}, and this engine was started with pause={self._pause}"
            )
        if mode == "abort":
            self._open.clear()
            while self._running:
                await self.engine.abort(None)
                await asyncio.sleep(0.001)
        else:
            await self.engine.pause()
        return web.json_response({"status": "ok", "message": f"paused: {mode}"})

    async def _continue(self, http: web.Request) -> web.Response:
        await self.engine.resume()
        self._open.set()
        return web.json_response({"status": "ok"})

    async def _flush(self, http: web.Request) -> web.Response:
        if self._running:
            return web.Response(status=400, text="requests are running; nothing was flushed")
        async with self._turn:
            await self.engine.sleep()  # which gives its caches back
            await self.engine.wake()
        return web.Response(text="Cache flushed.")

    async def _update(self, http: web.Request) -> web.Response:
        body = await _body(http)
        version = body.get("weight_version")
        told = "0" if version is None else str(version)
        if not told.isdecimal() or len(told) > _DIGITS:
            return _error(400, f"weight_version is {told[:80]!r}; it must be a number of steps")
        directory = Path(str(body.get("model_path") or ""))
        async with self._turn:
            if version is None:  # then it stays, as SGLang's does; weights as loaded are 0
                version = max(0, await self.engine.version())
            try:
                await self.engine.load_directory(int(version), directory)
            except WeightSyncError as error:
                said = {"success": False, "message": error.detail, "num_paused_requests": 0}
                return web.json_response(said, status=400)
        said = {"success": True, "message": f"serving {version}", "num_paused_requests": 0}
        return web.json_response(said)

    async def _check(self, http: web.Request) -> web.Response:
        action = (await _body(http)).get("action")
        digests = getattr(self.engine, "digests", None)
        if action != "checksum" or digests is None:
            return _error(400, f"action is {action!r}; this engine has checksum or nothing")
        ranks = [{"checksums": dict(await digests())}]
        return web.json_response({"success": True, "message": "", "ranks": ranks})

    async def _release(self, http: web.Request) -> web.Response:
        _check_tags(await _body(http))
        await self.engine.sleep()
        return web.json_response(None)

    async def _take_back(self, http: web.Request) -> web.Response:
        _check_tags(await _body(http))
        await self.engine.wake()
        return web.json_response(None)


async def _body(http: web.Request) -> dict[str, Any]:
    raw = await http.read()
    found = msgspec.json.decode(raw) if raw else {}
    if not isinstance(found, dict):
        raise EngineError("the body is no object")
    return found


def _check_tags(body: dict[str, Any]) -> None:
    """Whatever is named, all memory goes and comes back. Raises `EngineError` for unknown tags."""
    tags = body.get("tags") or []
    if not isinstance(tags, list) or any(tag not in _TAGS for tag in tags):
        raise EngineError(f"tags is {tags!r}; valid: a list of {', '.join(_TAGS)}; none is all")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


async def _nothing() -> AsyncGenerator[Any, None]:
    yield speaking.NOTHING


@asynccontextmanager
async def listening(native: Native, host: str, port: int) -> AsyncIterator[str]:
    """Serve while the block runs; the address. Raises `OSError` when nothing can listen there."""
    runner = web.AppRunner(
        native.app(), shutdown_timeout=_STOP_S, access_log=None, handler_cancellation=True
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        place, own = runner.addresses[0][:2]
        yield f"http://[{place}]:{own}" if ":" in place else f"http://{place}:{own}"
    finally:
        await runner.cleanup()
