"""An ASGI application served by uvicorn inside the event loop that is already running.

Binds before it says so, takes no signals, and stops gracefully; what it serves is another's affair.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from miles.errors import ConfigError, RunError

__all__ = ["serve"]

_START_S = 30.0
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Signals belong to the process around it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


@asynccontextmanager
async def serve(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 0, *, grace_s: int = 5
) -> AsyncIterator[str]:
    """Serve inside the block; gives the address, `http://HOST:PORT`. Port 0 takes a free one. At
    the end, requests that are being answered get `grace_s` seconds before they are cancelled.

    Raises `ConfigError` when the address cannot be taken.
    """
    listener = _bound(host, port)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=grace_s,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="session server")
    try:
        await _started(server, task)
        name, number = listener.getsockname()[:2]
        yield f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=grace_s + _START_S)
        listener.close()
        if not task.done():
            task.cancel()
            raise RunError(f"session server: it did not stop in {grace_s + _START_S:g} s")


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named, and with it on a reply
    # in two writes waits 40 ms for an acknowledgement
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:  # a port above 65535 overflows
        listener.close()
        raise ConfigError(
            f"session server: cannot listen on {host}:{port}: {error}; choose another "
            "session.host or session.port (0 takes a free one)"
        ) from error
    return listener


async def _started(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    try:
        async with asyncio.timeout(_START_S):
            while not server.started:
                if task.done():
                    raise RunError("session server: it ended before it was ready") from (
                        task.exception()
                    )
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise RunError(f"session server: it was not ready in {_START_S:g} s") from None
