"""Speaks Daytona's REST API, control plane and toolbox, over boxes of this machine."""

from __future__ import annotations

import asyncio
import json
import stat
import urllib.parse
from datetime import UTC, datetime

from aiohttp import web
from host import KEY, Box, Host, listen, serve


class Server:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.url = ""
        self.app = web.Application(client_max_size=1 << 28, middlewares=[self.guard])
        self.app.add_routes(
            [
                web.post("/api/sandbox", self.create),
                web.get("/api/sandbox", self.list),
                web.get("/api/sandbox/{id}", self.get),
                web.delete("/api/sandbox/{id}", self.delete),
                web.post("/toolbox/{id}/process/execute", self.execute),
                web.get("/toolbox/{id}/files/info", self.info),
                web.post("/toolbox/{id}/files/bulk-upload", self.upload),
                web.post("/toolbox/{id}/files/bulk-download", self.download),
            ]
        )

    @web.middleware
    async def guard(self, request: web.Request, handler) -> web.StreamResponse:
        """Credentials, then whatever was ordered to go wrong."""
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return problem(401, "Unauthorized: the API key is not valid")
        name = getattr(handler, "__name__", "") or ""
        id = request.match_info.get("id", "")
        fault = self.host.fault(name, id)
        if fault.get("hang_s"):
            await asyncio.sleep(fault["hang_s"])
        response = None
        if fault.get("after"):
            response = await handler(request)  # done, and then nobody hears of it
            await asyncio.sleep(fault.get("linger_s", 0))
        if fault.get("reset"):
            request.transport.abort()
            return web.Response()
        if "status" in fault:
            return problem(fault["status"], "as ordered", fault.get("headers"))
        if id and name != "delete" and id not in self.host.boxes:
            return problem(404, f"Sandbox with ID or name {id} not found")
        return response or await handler(request)

    def shown(self, box: Box) -> dict:
        asked = box.request
        return {
            "id": box.id,
            "organizationId": "org",
            "name": box.id,
            "user": "daytona",
            "env": {},
            "labels": box.labels,
            "public": False,
            "networkBlockAll": bool(asked.get("networkBlockAll")),
            "kvm": False,
            "target": "us",
            "cpu": asked.get("cpu") or 1,
            "gpu": 0,
            "memory": asked.get("memory") or 1,
            "disk": asked.get("disk") or 3,
            "state": "started",
            "createdAt": datetime.fromtimestamp(box.created, UTC).isoformat(),
            "toolboxProxyUrl": f"{self.url}/toolbox",
        }

    async def create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        box = self.host.create(asked.get("labels") or {}, asked)
        return web.json_response(self.shown(box))

    async def list(self, request: web.Request) -> web.Response:
        """Two at a time, so that a client has to turn pages."""
        labels = json.loads(request.query.get("labels", "{}"))
        boxes = self.host.matching(labels)
        start = int(request.query.get("cursor") or 0)
        page, rest = boxes[start : start + 2], len(boxes) - start - 2
        return web.json_response(
            {
                "items": [self.shown(box) for box in page],
                "total": len(boxes),
                "nextCursor": str(start + 2) if rest > 0 else None,
            }
        )

    async def get(self, request: web.Request) -> web.Response:
        return web.json_response(self.shown(self.host.boxes[request.match_info["id"]]))

    async def delete(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        box = self.host.boxes.get(id)
        if box is None:
            return problem(404, f"Sandbox with ID or name {id} not found")
        self.host.delete(id)
        return web.json_response({**self.shown(box), "state": "destroyed"})

    async def execute(self, request: web.Request) -> web.Response:
        """As the daemon does: the box's shell, both streams in one text, no input."""
        box = self.host.boxes[request.match_info["id"]]
        asked = await request.json()
        argv = ["sh", "-c", f"exec 2>&1; {asked['command']}"]
        process = await box.start(argv, env=asked.get("envs"))
        try:
            async with asyncio.timeout(asked.get("timeout") or 360):
                out, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            return problem(408, "command execution timeout")
        if box.id not in self.host.boxes:
            return problem(404, f"Sandbox {box.id} was destroyed")
        text = out.decode(errors="replace")
        return web.json_response({"exitCode": process.returncode, "result": text})

    async def info(self, request: web.Request) -> web.Response:
        box = self.host.boxes[request.match_info["id"]]
        path = request.query["path"]
        try:
            found = box.file(path).stat()
        except OSError:
            return problem(404, f"stat {path}: no such file or directory")
        return web.json_response(
            {
                "group": "daytona",
                "isDir": stat.S_ISDIR(found.st_mode),
                "modTime": str(found.st_mtime),
                "mode": stat.filemode(found.st_mode),
                "modifiedAt": str(found.st_mtime),
                "name": box.file(path).name,
                "owner": "daytona",
                "permissions": oct(found.st_mode & 0o777)[2:],
                "size": found.st_size,
            }
        )

    async def upload(self, request: web.Request) -> web.Response:
        """Pairs of fields: where a file goes, and the file."""
        box = self.host.boxes[request.match_info["id"]]
        where: dict[str, str] = {}
        async for part in await request.multipart():
            number, _, what = part.name.partition(".")
            if what == "path":
                where[number] = await part.text()
                continue
            file = box.file(where.get(number) or part.filename)
            try:
                file.write_bytes(await part.read())
            except OSError as error:
                return web.json_response({"errors": [str(error)]}, status=400)
        return web.json_response({})

    async def download(self, request: web.Request) -> web.StreamResponse:
        """One part a path: the file, or why there is none."""
        box = self.host.boxes[request.match_info["id"]]
        body = bytearray()
        for path in (await request.json())["paths"]:
            kind, content = "text/plain", b""
            try:
                name, content = "file", box.file(path).read_bytes()
                kind = "application/octet-stream"
            except OSError:
                name, content = "error", f"stat {path}: no such file or directory".encode()
            encoded = urllib.parse.quote(path)
            body += (
                (
                    f'--edge\r\nContent-Disposition: form-data; name="{name}"; '
                    f"filename*=utf-8''{encoded}\r\n"
                    f"Content-Type: {kind}\r\n\r\n"
                ).encode()
                + content
                + b"\r\n"
            )
        body += b"--edge--\r\n"
        return web.Response(
            body=bytes(body), headers={"Content-Type": "multipart/form-data; boundary=edge"}
        )


def problem(status: int, message: str, headers: dict | None = None) -> web.Response:
    body = {"statusCode": status, "message": message}
    return web.json_response(body, status=status, headers=headers)


async def start(host: Host) -> str:
    server = Server(host)
    server.url = await listen(server.app)
    return server.url + "/api"


serve(start)
