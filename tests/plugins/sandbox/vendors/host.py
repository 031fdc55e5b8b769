"""Boxes that are folders of this machine, and faults to order: what the local servers that speak a
vendor's protocol are made of.

For tests only: commands run as whoever runs the tests, isolated from nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

KEY = "local-test-key"
"""The one credential that the servers take."""


@dataclass
class Box:
    """A folder with `home` and `tmp`, and every process that was started in it."""

    id: str
    labels: dict[str, str]
    root: Path
    request: object = None
    created: float = field(default_factory=time.time)

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        home, tmp = str(self.root / "home"), str(self.root / "tmp")
        own = {"PATH": os.environ["PATH"], "HOME": home, "TMPDIR": tmp, "BOX": self.id}
        return {**own, **(more or {})}

    async def start(self, argv, *, cwd=None, env=None, stdin=asyncio.subprocess.DEVNULL):
        """A command in the box; it lives on when whoever asked for it goes away."""
        return await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd or self.root / "home",
            env=self.environment(env),
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    def file(self, path: str) -> Path:
        file = self.root / "home" / path
        if not file.is_relative_to(self.root):
            raise FileNotFoundError(path)
        return file

    def end(self) -> None:
        """Kill everything in the box and delete its folder."""
        mark = f"BOX={self.id}".encode()
        for _ in range(20):
            found = 0
            for entry in Path("/proc").glob("[0-9]*/environ"):
                with contextlib.suppress(OSError):
                    if mark in entry.read_bytes().split(b"\0"):
                        os.kill(int(entry.parent.name), signal.SIGKILL)
                        found += 1
            if not found:
                break
            time.sleep(0.02)
        shutil.rmtree(self.root, ignore_errors=True)


class Host:
    """All boxes of one server, the faults ordered for it, and what it was asked."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="miles-vendor-"))
        self.boxes: dict[str, Box] = {}
        self.numbers = itertools.count(1)
        self.faults: list[dict] = []
        self.asked: list[dict] = []

    def create(self, labels: dict[str, str], request: object = None) -> Box:
        name = f"sb-{os.getpid()}-{next(self.numbers)}"
        box = Box(id=name, labels=dict(labels), root=self.folder / name, request=request)
        for part in ("home", "tmp"):
            (box.root / part).mkdir(parents=True)
        self.boxes[name] = box
        return box

    def matching(self, labels: dict[str, str]) -> list[Box]:
        return [b for b in self.boxes.values() if labels.items() <= b.labels.items()]

    def delete(self, name: str) -> bool:
        box = self.boxes.pop(name, None)
        if box is not None:
            box.end()
        return box is not None

    def fault(self, at: str, box: str = "") -> dict:
        """Note a request; what was ordered to go wrong with it, if anything."""
        self.asked.append({"at": at, "box": box, "time": time.time()})
        for fault in self.faults:
            if fault["at"] == at and fault.get("times", 1) > 0:
                fault["times"] = fault.get("times", 1) - 1
                if fault.get("die_s") is not None and box:
                    asyncio.get_running_loop().call_later(fault["die_s"], self.delete, box)
                return fault
        return {}

    def end(self) -> None:
        for name in list(self.boxes):
            self.delete(name)
        shutil.rmtree(self.folder, ignore_errors=True)


async def control(host: Host) -> str:
    """A second server, through which a test orders faults and looks at what there is."""

    async def order(request: web.Request) -> web.Response:
        host.faults.append(await request.json())
        return web.json_response({})

    async def reset(request: web.Request) -> web.Response:
        host.faults.clear()
        host.asked.clear()
        for name in list(host.boxes):
            host.delete(name)
        return web.json_response({})

    async def look(request: web.Request) -> web.Response:
        boxes = [
            {"id": b.id, "labels": b.labels, "root": str(b.root), "request": b.request}
            for b in host.boxes.values()
        ]
        return web.json_response({"boxes": boxes, "asked": host.asked})

    app = web.Application()
    app.add_routes(
        [
            web.post("/fault", order),
            web.post("/reset", reset),
            web.get("/", look),
        ]
    )
    return await listen(app)


async def listen(app: web.Application) -> str:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    return f"http://127.0.0.1:{port}"


def serve(start) -> None:
    """Run `await start(host) -> address` until standard input ends; the first line of output says
    where."""

    async def main() -> None:
        host = Host()
        try:
            address = await start(host)
            print(json.dumps({"url": address, "control": await control(host)}), flush=True)
            loop = asyncio.get_running_loop()
            ended = asyncio.Event()
            loop.add_reader(sys.stdin.fileno(), ended.set)
            await ended.wait()
        finally:
            host.end()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
    os._exit(0)  # no waiting for streams that clients have left open
