"""A server in a child process: its token, its noise, its end, and the words of one that fails."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from miles import ChildServer, EpisodeError

MODULE = """
import sys
from miles import serve_child

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": sys.argv[1].encode()})

def make():
    print("loading", "x" * 100_000)
    if sys.argv[1] == "broken":
        raise SystemExit("no such package")
    return app

if __name__ == "__main__":
    serve_child(make)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echoes.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def ask(server: ChildServer, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(server.url(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def gone(pid: int) -> bool:
    until = time.monotonic() + 15
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_child_server_answers_its_token_alone_comes_back_and_ends_with_its_owner(
    tmp_path: Path,
) -> None:
    log = tmp_path / "logs" / "child.log"
    server = ChildServer.of("echoes", "hello", who="environment x: its server", log=log)
    assert ChildServer.of("echoes", "hello", who="other", log=log) is server
    assert ask(server)[0] == ask(server, Authorization="Bearer x")[0] == 401
    assert ask(server, **server.headers) == (200, b"hello")
    assert log.read_text().startswith("loading")  # more than a pipe holds, and nobody reads it
    first = server._running[0]
    first.kill()
    first.wait()
    assert ask(server, **server.headers) == (200, b"hello")
    pid = server._running[0].pid
    del server
    gc.collect()
    assert gone(pid)


def test_child_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    server = ChildServer("echoes", ["broken"], who="environment x: its server", log=tmp_path / "l")
    with pytest.raises(
        EpisodeError, match=r"(?s)^environment x: its server did not start .*such pa"
    ):
        server.url()


def test_child_server_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from miles import ChildServer\n"
        "server = ChildServer('echoes', ['x'], who='x', log=Path(sys.argv[1]))\n"
        "print(server.url(), server._running[0].pid, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert owner.stdout is not None
    child = int(owner.stdout.readline().split()[1])
    owner.kill()
    owner.wait()
    assert gone(child)
