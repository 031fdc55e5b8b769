"""A server in a child process, for environments over a package that is used by HTTP: it starts with
the first request, listens on the loopback interface behind a token of its own, and ends with its
owner.

`ChildServer` is the parent's half, `serve_child` the child's. What is served is the plugin's.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

from miles.errors import EpisodeError

__all__ = ["ChildServer", "serve_child"]

START_S = 120.0
"""Seconds that importing a package and opening the port may take on a busy machine."""
STOP_S = 10.0
GRACE_S = 5.0


class ChildServer:
    """One child process, `python -m MODULE ARGUMENT...`, whose main function is `serve_child`.

    It lives as long as this object: `ChildServer.of` gives all owners in a process the same one. A
    child that died is started again by the next `url`.
    """

    _shared: ClassVar[weakref.WeakValueDictionary[tuple[str, ...], ChildServer]] = (
        weakref.WeakValueDictionary()
    )

    @classmethod
    def of(cls, module: str, *arguments: str, who: str, log: Path) -> ChildServer:
        """The one for this module and these arguments, made when there is none; arguments as of the
        constructor."""
        if (found := cls._shared.get((module, *arguments))) is None:
            found = cls._shared[module, *arguments] = cls(module, arguments, who=who, log=log)
        return found

    def __init__(self, module: str, arguments: Sequence[str] = (), *, who: str, log: Path) -> None:
        """`who` begins messages, as in "environment openenv: the server of x"; `log` is where the
        child writes."""
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._who, self._log = who, log
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[str]] = []
        self._url = ""
        self._token = secrets.token_hex(24)
        weakref.finalize(self, _stop, self._running)

    @property
    def headers(self) -> dict[str, str]:
        """What a client must send along."""
        return {"Authorization": f"Bearer {self._token}"}

    def url(self) -> str:
        """Where it listens; starts it when it does not run. Blocks. Raises `EpisodeError` with the
        end of its log when it does not come up."""
        with self._lock:
            if self._running and self._running[0].poll() is None:
                return self._url
            _stop(self._running)
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self._running.append(process)
            with contextlib.suppress(BrokenPipeError):
                print(self._token, file=process.stdin, flush=True)
            port = _number(process.stdout, START_S)
            if not port.isdigit():
                _stop(self._running)
                tail = self._log.read_text("utf-8", "replace").strip()[-800:]
                raise EpisodeError(
                    f"{self._who} did not start within {START_S:g} s; its log {self._log} ends "
                    f"with: {tail or '(nothing)'}"
                )
            self._url = f"http://127.0.0.1:{int(port)}"
            return self._url


def _number(stream: IO[str] | None, seconds: float) -> str:
    """The first line that is a number; empty when the stream ends or time runs out."""
    until = time.monotonic() + seconds
    while stream and (left := until - time.monotonic()) > 0:
        if not select.select([stream], [], [], left)[0]:
            break
        line = stream.readline()
        if not line or line.strip().isdigit():
            return line.strip()
    return ""


def _stop(running: list[subprocess.Popen[str]]) -> None:
    """End the process and wait for it."""
    while running:
        process = running.pop()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream:
                    stream.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


# ---------------------------------------------------------------- inside the child


class _Guarded:
    """An ASGI application that refuses requests without the token."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or answer 401 (a websocket: refuse it)."""
        asks = scope["type"] in ("http", "websocket")
        given = dict(scope["headers"]).get(b"authorization", b"") if asks else b""
        if not asks or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"wrong token"})


def serve_child(make: Callable[[], Any]) -> None:
    """Serve an ASGI application, which `make` builds once the token is known, until the standard
    input ends: with the process that started this one, however that ended. Takes the token from
    standard input and says the port on standard output; what anything else prints there goes to the
    log."""
    import uvicorn

    to_parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nobody reads what an environment prints, and pipes fill up
    token = sys.stdin.readline().strip()
    app = make()
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(_Guarded(app, token), log_level="warning"))

    def watch() -> None:
        sys.stdin.read()
        server.should_exit = True
        threading.Event().wait(GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()
    print(listening.getsockname()[1], file=to_parent, flush=True)
    server.run(sockets=[listening])
