"""What the front of several session servers does with a request before any server sees it."""

import asyncio

import httpx

from miles.session.server import make_front, serve


def test_front_holds_no_body_without_end():
    async def body():
        for _ in range(65):
            yield b" " * 1024 * 1024

    async def play():
        front = make_front(lambda: ["http://127.0.0.1:9"])
        async with serve(front) as address, httpx.AsyncClient(timeout=60) as http:
            for path in ("/sessions", "/sessions/a/v1/messages", "/elsewhere"):
                reply = await http.post(address + path, content=body())
                assert reply.status_code == 413, path

    asyncio.run(play())
