"""Serving inside a running event loop."""

from __future__ import annotations

import asyncio
import signal
import socket
import time

import httpx
import pytest

from miles import ConfigError
from miles.session.server.serving import _bound, serve


async def _app(scope, receive, send):
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    if scope["path"] == "/slow":
        await asyncio.sleep(60)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"yes"})


def test_serve_answers_in_the_current_loop_and_frees_its_port():
    async def play():
        async with serve(_app) as address, httpx.AsyncClient() as http:
            assert (await http.get(address)).text == "yes"
            return int(address.rpartition(":")[2])

    before = signal.getsignal(signal.SIGINT)
    port = asyncio.run(play())
    assert signal.getsignal(signal.SIGINT) is before
    _bound("127.0.0.1", port).close()


def test_serve_cancels_what_outlives_its_grace():
    async def play():
        async with httpx.AsyncClient() as http:
            async with serve(_app, grace_s=1) as address:
                slow = asyncio.create_task(http.get(f"{address}/slow"))
                await asyncio.sleep(0.3)
            assert (await slow).status_code == 500

    start = time.monotonic()
    asyncio.run(play())
    assert time.monotonic() - start < 20


def test_serve_says_which_address_is_taken():
    async def play(port):
        async with serve(_app, port=port):
            pass

    with _bound("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            asyncio.run(play(port))


def test_serve_replies_do_not_wait_forty_milliseconds_for_an_acknowledgement():
    """Which they do when asyncio leaves Nagle's algorithm on, for want of a protocol's number."""
    with _bound("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_port_beyond_the_last_is_a_config_error_and_no_traceback():
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:70000: .*0-65535"):
        _bound("127.0.0.1", 70000)
