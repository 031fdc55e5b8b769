"""Sessions that are closed in the middle of a request, and who keeps one open."""

from __future__ import annotations

import socket
import threading
import time

import httpx

ASKED = {"messages": [{"role": "user", "content": "hi"}]}


def _until(done):
    until = time.monotonic() + 10
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_deleting_a_session_ends_what_is_generated_for_it(serving, script):
    engine = script("Hello there")
    engine.hold = threading.Event()
    with serving(engine) as server:
        base, key = server.open("gone")
        headers = {"Authorization": f"Bearer {key}"}
        told = []

        def ask():
            url = f"{base}/v1/chat/completions"
            told.append(httpx.post(url, json=ASKED, headers=headers, timeout=20))

        asking = threading.Thread(target=ask)
        asking.start()
        _until(lambda: engine.requests)
        assert httpx.delete(base, headers=headers).status_code == 200
        assert engine.aborted == [["gone"]]
        engine.hold.set()
        asking.join(20)
    assert told[0].status_code == 404 and "it was closed" in told[0].text


def test_a_wrong_token_does_not_keep_a_session_from_expiring(talk):
    base, key = talk.open()
    session = talk.session(base)
    asked = time.monotonic()
    time.sleep(0.05)
    assert httpx.get(base, headers={"Authorization": "Bearer wrong"}).status_code == 401
    idle = talk.sessions.rules.idle_s
    assert talk.sessions.expire(asked + idle + 0.04) == [session.id]
    assert httpx.get(base, headers={"Authorization": f"Bearer {key}"}).status_code == 404


def test_a_session_closed_while_a_body_arrives_is_a_404(talk):
    base, key = talk.open("half")
    host, port = talk.address.removeprefix("http://").rsplit(":", 1)
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    head = (
        f"POST /sessions/half/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(head.encode() + body[:9])
        time.sleep(0.1)
        assert httpx.delete(base, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        sock.sendall(body[9:])
        assert sock.recv(65536).startswith(b"HTTP/1.1 404")
