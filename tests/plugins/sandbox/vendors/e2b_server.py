"""Speaks E2B's API over boxes of this machine: REST for the control plane and files, Connect-RPC
for processes, by the service definitions in E2B's own wheel."""

from __future__ import annotations

import asyncio
import urllib.parse
from datetime import UTC, datetime, timedelta

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from e2b.envd.process.process_pb import (
    ProcessEvent,
    StartRequest,
    StartResponse,
)
from host import KEY, Box, Host, serve
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

ENVD = "0.5.8"


class Processes(Process):
    """The service that runs commands."""

    def __init__(self, host: Host) -> None:
        self.host = host

    async def start(self, request: StartRequest, ctx):
        """As envd does: events of a process, which lives on when nobody listens."""
        id = ctx.request_headers.get("e2b-sandbox-id", "")
        box = self.box(id)
        asked = request.process
        process = await box.start(
            [asked.cmd, *asked.args], cwd=asked.cwd or None, env=dict(asked.envs)
        )
        pid = ProcessEvent.StartEvent(pid=process.pid)
        yield StartResponse(event=ProcessEvent(event=Oneof("start", pid)))
        queue: asyncio.Queue = asyncio.Queue(maxsize=64)

        async def pump(stream, name):
            while data := await stream.read(65536):
                await queue.put(Oneof(name, data))
            await queue.put(None)

        pumps = [
            asyncio.create_task(pump(process.stdout, "stdout")),
            asyncio.create_task(pump(process.stderr, "stderr")),
        ]
        open_streams = len(pumps)
        while open_streams:
            output = await queue.get()
            if output is None:
                open_streams -= 1
                continue
            data = ProcessEvent.DataEvent(output=output)
            yield StartResponse(event=ProcessEvent(event=Oneof("data", data)))
        code = await process.wait()
        self.box(id)
        end = ProcessEvent.EndEvent(exit_code=code & 255, exited=code >= 0, status=f"exit {code}")
        yield StartResponse(event=ProcessEvent(event=Oneof("end", end)))

    def box(self, id: str) -> Box:
        if id not in self.host.boxes:
            raise ConnectError(Code.UNAVAILABLE, f"the sandbox {id} was not found")
        return self.host.boxes[id]


class Server:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.application = self.routes()

    def routes(self) -> Starlette:
        processes = ProcessASGIApplication(Processes(self.host))
        return Starlette(
            routes=[
                Route("/v2/sandboxes", self.create, methods=["POST"]),
                Route("/v2/sandboxes", self.list, methods=["GET"]),
                Route("/sandboxes/{id}", self.delete, methods=["DELETE"]),
                Route("/files", self.read, methods=["GET"]),
                Route("/files", self.write, methods=["POST"]),
                Route("/health", self.health, methods=["GET"]),
                Mount("/", processes),
            ]
        )

    async def __call__(self, scope, receive, send) -> None:
        """Credentials, then whatever was ordered to go wrong, then the application."""
        if scope["type"] != "http":
            return
        request = Request(scope)
        at, id = self.what(request)
        fault = self.host.fault(at, id) if at else {}
        wanted = scope["path"].startswith(("/v2/", "/sandboxes"))
        if wanted and request.headers.get("X-API-KEY") != KEY:
            answer = problem(401, "Invalid API key")
            return await answer(scope, receive, send)
        if fault.get("hang_s"):
            await asyncio.sleep(fault["hang_s"])
        if fault.get("after"):
            await self.application(scope, receive, discard)
            await asyncio.sleep(fault.get("linger_s", 0))
        if fault.get("reset"):
            return send.__self__.transport.abort()  # uvicorn's own cycle of this request
        if "status" in fault:
            answer = problem(fault["status"], "as ordered", fault.get("headers"))
            return await answer(scope, receive, send)
        return await self.application(scope, receive, send)

    def what(self, request: Request) -> tuple[str, str]:
        id = request.headers.get("e2b-sandbox-id", "")
        path, method = request.url.path, request.method
        if path == "/v2/sandboxes":
            return {"POST": "create", "GET": "list"}[method], ""
        if path.startswith("/sandboxes/"):
            return "delete", path.rpartition("/")[2]
        if path == "/files":
            return {"POST": "upload", "GET": "download"}[method], id
        return ("execute", id) if path == "/process.Process/Start" else ("", id)

    async def create(self, request: Request) -> Response:
        asked = await request.json()
        box = self.host.create(asked.get("metadata") or {}, asked)
        return JSONResponse(
            {
                "templateID": asked["templateID"],
                "sandboxID": box.id,
                "clientID": "local",
                "envdVersion": ENVD,
                "envdAccessToken": "token",
            },
            status_code=201,
        )

    async def list(self, request: Request) -> Response:
        """Two at a time, so that a client has to turn pages."""
        wanted = urllib.parse.parse_qsl(request.query_params.get("metadata", ""))
        labels = {urllib.parse.unquote(k): urllib.parse.unquote(v) for k, v in wanted}
        boxes = self.host.matching(labels)
        start = int(request.query_params.get("nextToken") or 0)
        more = {"x-next-token": str(start + 2)} if len(boxes) > start + 2 else {}
        shown = [
            {
                "templateID": box.request["templateID"],
                "sandboxID": box.id,
                "clientID": "local",
                "startedAt": datetime.fromtimestamp(box.created, UTC).isoformat(),
                "endAt": (
                    datetime.fromtimestamp(box.created, UTC)
                    + timedelta(seconds=box.request["timeout"])
                ).isoformat(),
                "cpuCount": 1,
                "memoryMB": 512,
                "diskSizeMB": 512,
                "state": "running",
                "envdVersion": ENVD,
                "metadata": box.labels,
            }
            for box in boxes[start : start + 2]
        ]
        return JSONResponse(shown, headers=more)

    async def delete(self, request: Request) -> Response:
        if not self.host.delete(request.path_params["id"]):
            return problem(404, "sandbox not found")
        return Response(status_code=204)

    async def read(self, request: Request) -> Response:
        box = self.host.boxes.get(request.headers.get("e2b-sandbox-id", ""))
        if box is None:
            return gone(request)
        path = request.query_params["path"]
        try:
            return Response(box.file(path).read_bytes(), media_type="application/octet-stream")
        except OSError:
            return JSONResponse({"code": 404, "message": f"path '{path}' does not exist"}, 404)

    async def write(self, request: Request) -> Response:
        box = self.host.boxes.get(request.headers.get("e2b-sandbox-id", ""))
        if box is None:
            return gone(request)
        written = []
        async with request.form() as form:
            for _, part in form.multi_items():
                if not isinstance(part, UploadFile):
                    continue
                file = box.file(request.query_params.get("path") or part.filename)
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(await part.read())
                except OSError as error:
                    return problem(400, str(error))
                written.append({"name": file.name, "path": str(file), "type": "file"})
        return JSONResponse(written)

    async def health(self, request: Request) -> Response:
        known = request.headers.get("e2b-sandbox-id", "") in self.host.boxes
        return Response(status_code=204) if known else gone(request)


def gone(request: Request) -> Response:
    """As the proxy before a box answers when there is none."""
    id = request.headers.get("e2b-sandbox-id", "")
    message = f"The sandbox {id} was not found"
    return JSONResponse({"sandboxId": id, "message": message, "code": 502}, 502)


def problem(status: int, message: str, headers: dict | None = None) -> Response:
    return JSONResponse({"code": status, "message": message}, status, headers=headers)


async def discard(message) -> None:
    """Send nothing."""


async def start(host: Host) -> str:
    server = Server(host)

    config = uvicorn.Config(server, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    running = uvicorn.Server(config)
    running.install_signal_handlers = lambda: None
    start.task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    return f"http://127.0.0.1:{port}"


serve(start)
