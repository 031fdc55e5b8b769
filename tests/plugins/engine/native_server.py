"""A local server that keeps to SGLang's native protocol, for faults and rare shapes.

It decodes one token a tick for every running request. A token's log-prob says which weights drew
it: `LOGPROB[version]`. An overlapped one counts a token only one tick after it was drawn, as
SGLang's overlapped schedule does; one of an old release tells no spans.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
from aiohttp import web

KEY = "server-key"
TICK_S = 0.002
PAUSE_S = 1.0
"""Between two looks of a pause whether requests have ended."""
BODY = web.RequestKey("body", object)


def logprob(version: int) -> float:
    """What tokens drawn under a version have."""
    return -1.0 - 0.125 * version


class Job:
    """A request on the server."""

    def __init__(self, body: dict[str, Any]) -> None:
        params = body["sampling_params"]
        self.body = body
        self.prompt = list(body["input_ids"])
        self.limit = params["max_new_tokens"]
        self.stops = set(params.get("stop_token_ids", ()))
        self.seed = params.get("sampling_seed", 0)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.drawn: tuple[int, float] | None = None  # under way, not counted yet
        self.changes: list[tuple[int, int]] = []  # old version, tokens counted then
        self.finish: dict[str, Any] | None = None
        self.moved = asyncio.Event()

    def draw(self, version: int) -> tuple[int, float]:
        at = len(self.prompt) + len(self.tokens) + (self.drawn is not None)
        return (self.seed * 31 + at * 7) % 251 + 4, logprob(version)

    def count(self, token: int, value: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(value)
        if token in self.stops:
            self.end("stop")
        elif len(self.tokens) == self.limit:
            self.end("length")
        self.moved.set()

    def end(self, kind: str) -> None:
        self.finish = {"type": kind}
        self.moved.set()


class NativeServer:
    """Switches are plain attributes; `bodies` and `asked` are what it was sent."""

    def __init__(self, **info: Any) -> None:
        self.info = {
            "version": "0.5.23",
            "disable_overlap_schedule": True,
            "max_req_input_len": 250,
            "dp_size": 1,
            "disaggregation_mode": "null",
            **info,
        }
        self.weight_version = "default"
        self.tells_spans = True
        self.incremental = False  # parts of streams hold only what is new
        self.old_names = False
        self.silent: set[str] = set()  # paths that never answer
        self.fault: tuple[int, str] | None = None  # status and text of /generate
        self.most_asked, self.fault_of_more = 1 << 20, 413  # requests in a question, and a status
        self.refused = -1  # a first token that /generate refuses
        self.twist: Any = None  # changes a reply
        self.peers: dict[Any, asyncio.BaseTransport] = {}  # connections there have been
        self.extra: dict[str, Any] = {}  # put into meta_info
        self.update_fault = ""
        self.reset_fault = ""  # said after some tensors were scrambled
        self.refuses_checksums = False
        self.begin_status = 404  # of /begin_weight_update, which old releases do not have
        self.untouched: set[str] = set()  # tensors that no update writes
        self.tensors = {f"t{i}": "made up" for i in range(3)}
        self.bodies: list[dict[str, Any]] = []  # of requests, however they were asked
        self.questions: list[int] = []  # how many requests each /generate held
        self.asked: list[tuple[str, Any]] = []
        self.aborted: list[str] = []
        self.jobs: dict[str, Job] = {}
        self.held: set[Job] = set()  # answered, and let go of only while something else is asked
        self.paused = False
        self.at_pause: list[int] = []  # requests that ran when it was paused
        self.most = 0  # requests that ran at once
        self._going = asyncio.Event()
        self._scrambled = 0

    @property
    def version(self) -> int:
        return int(self.weight_version) if self.weight_version.isdecimal() else 0

    @asynccontextmanager
    async def up(self, port: int = 0):
        self._going.set()
        app = web.Application(middlewares=[self._guarded])
        for method, path, handler in (
            ("POST", "/generate", self._generate),
            ("POST", "/abort_request", self._abort),
            ("GET", "/health", self._empty),
            ("GET", "/server_info", self._server_info),
            ("GET", "/get_server_info", self._server_info),
            ("GET", "/model_info", self._model_info),
            ("GET", "/get_model_info", self._model_info),
            ("GET", "/v1/loads", self._loads),
            ("POST", "/pause_generation", self._pause),
            ("POST", "/continue_generation", self._continue),
            ("POST", "/flush_cache", self._flush),
            ("POST", "/update_weights_from_disk", self._update),
            ("POST", "/weights_checker", self._checker),
            ("POST", "/begin_weight_update", self._begin),
            ("POST", "/release_memory_occupation", self._empty),
            ("POST", "/resume_memory_occupation", self._empty),
        ):
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        clock = asyncio.create_task(self._decode())
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            clock.cancel()
            await runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise web.HTTPUnauthorized(text="bad key")
        if request.path in self.silent:
            await asyncio.sleep(30)
        if self.old_names and request.path in ("/server_info", "/model_info", "/v1/loads"):
            raise web.HTTPNotFound
        if not self.old_names and request.path in ("/get_server_info", "/get_model_info"):
            raise web.HTTPNotFound
        if request.transport is not None:
            self.peers[request.transport.get_extra_info("peername")] = request.transport
        body = await request.json() if request.can_read_body else None
        request[BODY] = body
        self.asked.append((request.path, body))
        held = set(self.held)
        try:
            return await handler(request)
        finally:
            self.held -= held

    def hang_up(self) -> None:
        """Close every connection."""
        for transport in self.peers.values():
            transport.close()

    # ---- decoding

    async def _decode(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.paused:
                continue
            overlapped = not self.info["disable_overlap_schedule"]
            self.most = max(self.most, len(self.jobs))
            for job in list(self.jobs.values()):
                if job.finish is not None:
                    continue
                before, job.drawn = job.drawn, None
                if overlapped:
                    if before is not None:
                        job.count(*before)
                    if job.finish is None:
                        job.drawn = job.draw(self.version)
                else:
                    job.count(*job.draw(self.version))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = request[BODY]
        several = isinstance(body.get("rid"), list)
        own = ("rid", "input_ids", "sampling_params")
        rows = zip(*(body[name] for name in own), strict=True) if several else ()
        bodies = [{**body, **dict(zip(own, row, strict=True))} for row in rows] or [body]
        self.bodies += bodies
        self.questions.append(len(bodies))
        if self.fault is not None:
            return web.json_response({"error": {"message": self.fault[1]}}, status=self.fault[0])
        if len(bodies) > self.most_asked:
            return web.Response(status=self.fault_of_more, text="more than one")
        if any(one["input_ids"][0] == self.refused for one in bodies):
            return web.json_response({"error": {"message": "refused"}}, status=400)
        if "logprob_start_len" in body:
            return web.json_response(_scored(body["input_ids"], self.version))
        while self.paused:  # it holds new requests at its door
            await self._going.wait()
        jobs = [Job(one) for one in bodies]
        self.jobs |= {job.body["rid"]: job for job in jobs}
        try:
            if not body["stream"]:
                await self._moved(jobs[0], whole=True)
                self.held.add(jobs[0])
                return web.json_response(self._reply(jobs[0]))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            with suppress(ConnectionResetError):  # the client is gone
                await response.prepare(request)
                async for index, part in self._parts(jobs):
                    if several:
                        part["index"] = index
                    await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
                await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            for job in jobs:
                self.jobs.pop(job.body["rid"], None)

    async def _parts(self, jobs: list[Job]) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """(number, part) of each as it comes."""
        ready: asyncio.Queue[Any] = asyncio.Queue()

        async def each(index: int, job: Job) -> None:
            every, said = job.body["sampling_params"]["stream_interval"], 0
            ended = False
            while not ended:
                await self._moved(job, whole=False)
                new, ended = len(job.tokens) - said, job.finish is not None
                if new >= every or (new and not said) or ended:
                    ready.put_nowait((index, self._part(job, said)))
                    said = len(job.tokens)
            ready.put_nowait((index, None))

        tasks = [asyncio.create_task(each(i, job)) for i, job in enumerate(jobs)]
        left = len(tasks)
        try:
            while left:
                index, part = await ready.get()
                if part is None:
                    left -= 1
                else:
                    yield index, part
        finally:
            for task in tasks:
                task.cancel()

    def _part(self, job: Job, said: int) -> dict[str, Any]:
        part = self._reply(job)
        if self.incremental:
            part["output_ids"] = part["output_ids"][said:]
            new = part["meta_info"]["output_token_logprobs"][said:]
            part["meta_info"]["output_token_logprobs"] = new
        return part

    async def _moved(self, job: Job, *, whole: bool) -> None:
        while True:
            await job.moved.wait()
            job.moved.clear()
            if job.finish is not None or not whole:
                return

    def _reply(self, job: Job) -> dict[str, Any]:
        size = len(job.tokens)
        meta: dict[str, Any] = {
            "id": job.body["rid"],
            "finish_reason": job.finish,
            "prompt_tokens": len(job.prompt),
            "completion_tokens": size,
            "cached_tokens": 2,
            "weight_version": self.weight_version,
            "output_token_logprobs": [
                [p, t, None] for p, t in zip(job.logprobs, job.tokens, strict=True)
            ],
            **self.extra,
        }
        if self.tells_spans and job.finish is not None and size:
            spans, at = [], 0
            for version, end in [*job.changes, (self.version, size)]:
                if end > at:
                    spans.append({"version": str(version), "start": at, "end": end})
                    at = end
            meta["weight_versions"] = spans
        if job.body.get("return_routed_experts") and self.info.get("enable_return_routed_experts"):
            rows = len(job.prompt) + size - 1 - job.body["routed_experts_start_len"]
            routed = np.arange(rows * 3 * 2, dtype="<i4") % 7  # 3 layers, 2 experts a token
            meta["routed_experts"] = base64.b64encode(routed.tobytes()).decode()
        reply = {"text": "whatever", "output_ids": list(job.tokens), "meta_info": meta}
        if self.twist is not None:
            self.twist(reply)
        return reply

    # ---- control

    async def _abort(self, request: web.Request) -> web.Response:
        body = request[BODY]
        for rid in list(self.jobs) if body.get("abort_all") else [body["rid"]]:
            self.aborted.append(rid)
            if (job := self.jobs.get(rid)) is not None and job.finish is None:
                job.end("abort")
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request[BODY]["mode"]
        self.at_pause.append(sum(job.finish is None for job in self.jobs.values()) + len(self.held))
        self.paused = True
        self._going.clear()
        for job in list(self.jobs.values()):
            if mode == "retract" and job.drawn is not None:
                token, job.drawn = job.drawn, None
                job.count(*token)
            if mode == "abort" and job.finish is None:
                job.end("abort")
        while mode == "abort" and (self.jobs or self.held):
            await asyncio.sleep(PAUSE_S)
            self.held.clear()
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self.paused = False
        self._going.set()
        return web.json_response({"status": "ok"})

    async def _flush(self, request: web.Request) -> web.Response:
        return web.Response(status=400 if self.jobs else 200, text="words")

    async def _update(self, request: web.Request) -> web.Response:
        body = request[BODY]
        if self.update_fault:
            said = {"success": False, "message": self.update_fault}
            return web.json_response(said, status=400)
        old = self.version
        for job in self.jobs.values():
            if job.tokens and job.finish is None:
                job.changes.append((old, len(job.tokens)))
        self.weight_version = body["weight_version"]
        for name in self.tensors:
            if name not in self.untouched:
                self.tensors[name] = f"of {body['weight_version']}"
        return web.json_response({"success": True, "message": "done"})

    async def _checker(self, request: web.Request) -> web.Response:
        if request[BODY]["action"] == "reset_tensors":
            self._scrambled += 1
            if self.reset_fault:
                self.tensors["t0"] = f"scrambled {self._scrambled}"
                return web.json_response({"message": self.reset_fault}, status=400)
            self.tensors = dict.fromkeys(self.tensors, f"scrambled {self._scrambled}")
            return web.json_response({"success": True})
        if self.refuses_checksums:
            return web.json_response({"message": "unknown action"}, status=400)
        return web.json_response({"success": True, "ranks": [{"checksums": dict(self.tensors)}]})

    async def _begin(self, request: web.Request) -> web.Response:
        return web.Response(status=self.begin_status)

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_waiting_reqs": 3, "token_usage": 0.25}] * 2})

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response()


def _scored(ids: list[int], version: int) -> dict[str, Any]:
    triples = [[None if i == 0 else logprob(version), t, None] for i, t in enumerate(ids)]
    return {
        "output_ids": [1],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 1},
            "input_token_logprobs": triples,
            "output_token_logprobs": [[-1.0, 1, None]],
        },
    }
