"""The child process that serves an OpenEnv package (`python -m miles_plugin_openenv.serve NAME`).

It reads a token from its standard input, says the port it listens on (loopback, chosen by the
system), answers only requests with that token, and ends when its standard input does: with the
process that started it, however that one ended.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
import threading
from importlib import import_module
from typing import Any

GRACE_S = 5.0


class Guarded:
    """An ASGI application that refuses requests without the token."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or answer 401 (a websocket: refuse it)."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        await send({"type": "http.response.start", "status": 401, "headers": []})
        return await send({"type": "http.response.body", "body": b"wrong token"})


def main() -> None:
    """Serve until the standard input ends."""
    import uvicorn

    to_parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # into the log: nobody reads what the environment prints, and pipes fill up
    package, token = sys.argv[1], sys.stdin.readline().strip()
    app = import_module(f"{package}.server.app").app
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Guarded(app, token), log_level="warning"))

    def watch() -> None:
        sys.stdin.read()
        server.should_exit = True
        threading.Event().wait(GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    print(listening.getsockname()[1], file=to_parent, flush=True)
    server.run(sockets=[listening])


if __name__ == "__main__":
    main()
