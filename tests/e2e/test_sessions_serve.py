"""`miles sessions serve` as a process: over an engine behind HTTP, killed under load, and back."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from aiohttp import web

from miles import Context
from miles.session.server.spread import place
from miles_plugins.tito.bytes import Bytes

TEXT = "So it is."


@contextmanager
def generate_server(delay_s: float = 0.0):
    """`/generate` as an SGLang server answers it, always with one text."""
    ids = [*TEXT.encode(), 258]

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await asyncio.sleep(delay_s)
        reply = {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": 258},
                "output_token_logprobs": [[-0.25, token, None] for token in ids],
                "weight_version": "default",
                "cached_tokens": 0,
            },
        }
        if not body["stream"]:
            return web.json_response(reply)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(reply).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def plain(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default"})

    up, stop = threading.Event(), threading.Event()
    found: list[str] = []

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        app.router.add_post("/abort_request", plain)
        app.router.add_get("/health", plain)
        app.router.add_get("/model_info", plain)
        runner = web.AppRunner(app, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        up.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert up.wait(10)
    try:
        yield found[0]
    finally:
        stop.set()
        thread.join(10)


class Process:
    """One `miles sessions serve`, up."""

    def __init__(self, folder: Path, engine: str, *more: str) -> None:
        words = ["sessions", "serve", f"engine.url={engine}", f"model.path={folder / 'model'}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "miles", *words, f"run.dir={folder / 'runs'}", "port=0", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate()[1])
        self.address = re.fullmatch(r"sessions are served at (http://\S+)\n", line)[1]
        self.admin = (folder / "runs" / "sessions" / "admin_token").read_text().strip()

    def end(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        self.process.communicate(timeout=20)
        return self.process.returncode

    def open(self) -> tuple[str, str]:
        made = httpx.post(
            f"{self.address}/sessions", headers={"Authorization": f"Bearer {self.admin}"}
        ).json()
        return made["session_id"], made["token"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a family without a handler of its own, its tokens bytes, beside where runs
    go."""
    model = tmp_path / "model"
    Bytes(Bytes.Config(), Context(directory=tmp_path)).save(model)
    (model / "config.json").write_text(json.dumps({"model_type": "olmo2"}))
    return tmp_path


@pytest.mark.slow
def test_sessions_serve_answers_stops_and_goes_on(folder):
    with generate_server() as engine:
        first = Process(folder, engine)
        id, token = first.open()
        client = openai.OpenAI(base_url=f"{first.address}/sessions/{id}/v1", api_key=token)
        messages = [{"role": "user", "content": "hi"}]
        said = client.chat.completions.create(model="m", messages=messages, temperature=0.5)
        assert said.choices[0].message.content == TEXT
        assert said.model == "model"
        assert oct((folder / "runs/sessions/admin_token").stat().st_mode)[-3:] == "600"
        assert first.end() == 0
        second = Process(folder, engine)
        try:
            messages += [said.choices[0].message, {"role": "user", "content": "more"}]
            base = f"{second.address}/sessions/{id}"
            client = openai.OpenAI(base_url=f"{base}/v1", api_key=token)
            stream = client.chat.completions.create(model="m", messages=messages, stream=True)
            parts = [c.choices[0].delta.content or "" for c in stream if c.choices]
            assert "".join(parts) == TEXT
            headers = {"Authorization": f"Bearer {token}"}
            (sample,) = httpx.post(f"{base}/samples", headers=headers).json()["samples"]
            assert sum(sample["trainable"]) == 2 * (len(TEXT) + 1)
        finally:
            assert second.end(signal.SIGINT) == 0


@pytest.mark.slow
def test_sessions_killed_under_load_lose_no_answered_turn(folder):
    """Every turn that a client has the answer of is there after `kill -9` and a restart."""
    with generate_server(0.002) as engine:
        first = Process(folder, engine)
        opened = [first.open() for _ in range(24)]
        answered = asyncio.run(_load_until_killed(first, opened))
        assert sum(answered.values()) > 100
        second = Process(folder, engine)
        try:
            for id, token in opened:
                headers = {"Authorization": f"Bearer {token}"}
                state = httpx.get(f"{second.address}/sessions/{id}", headers=headers).json()
                assert answered[id] <= state["turns"] <= answered[id] + 1
                assert state["counters"]["token_mismatches"] == 0
        finally:
            assert second.end() == 0


async def _load_until_killed(server: Process, opened) -> dict[str, int]:
    """Turns answered in each session, by id; the server is killed in the middle."""
    answered = dict.fromkeys([id for id, _ in opened], 0)

    async def talk(http: httpx.AsyncClient, id: str, token: str) -> None:
        messages = [{"role": "user", "content": "hi"}]
        for turn in range(1000):
            reply = await http.post(
                f"{server.address}/sessions/{id}/v1/chat/completions",
                json={"messages": messages},
                headers={"Authorization": f"Bearer {token}"},
            )
            assert reply.status_code == 200, reply.text
            answered[id] = turn + 1
            said = reply.json()["choices"][0]["message"]
            messages += [
                {"role": "assistant", "content": said["content"]},
                {"role": "user", "content": f"more {turn}"},
            ]

    async with httpx.AsyncClient(timeout=30) as http:
        tasks = [asyncio.create_task(talk(http, *each)) for each in opened]
        while sum(answered.values()) < 150:
            await asyncio.sleep(0.01)
            for task in tasks:
                assert not task.done() or task.exception() is None
        server.process.kill()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, httpx.TransportError) for each in ended), ended
    server.process.wait(10)
    return answered


@pytest.mark.slow
def test_sessions_serve_from_several_processes(folder):
    """Each session has one home; a server that is killed comes back with its turns."""
    with generate_server() as engine:
        front = Process(folder, engine, "workers=2")
        try:
            opened = [front.open() for _ in range(6)]
            homes = [folder / f"runs/sessions/server-{place(id, 2)}" for id, _ in opened]
            assert len(set(homes)) == 2
            messages = [{"role": "user", "content": "hi"}]
            for (id, token), home in zip(opened, homes, strict=True):
                base = f"{front.address}/sessions/{id}"
                client = openai.OpenAI(base_url=f"{base}/v1", api_key=token)
                stream = client.chat.completions.create(model="m", messages=messages, stream=True)
                assert "".join(c.choices[0].delta.content or "" for c in stream) == TEXT
                assert any(id in str(p) for p in (home / "sessions").rglob("*"))
            admin = {"Authorization": f"Bearer {front.admin}"}
            listed = httpx.get(f"{front.address}/sessions", headers=admin).json()
            assert {s["session_id"] for s in listed["sessions"]} == {id for id, _ in opened}
            assert listed["metrics"]["session/turns"] == 6
            assert httpx.get(f"{front.address}/v1/x").status_code == 404
            children = Path(f"/proc/{front.process.pid}/task/{front.process.pid}/children")
            victim = int(children.read_text().split()[0])
            os.kill(victim, signal.SIGKILL)
            _until_answered(front, opened)
        finally:
            assert front.end() == 0
        with pytest.raises(AssertionError, match="workers=2"):
            Process(folder, engine, "workers=3")


def _until_answered(front: Process, opened) -> None:
    deadline = time.monotonic() + 60
    for id, token in opened:
        headers = {"Authorization": f"Bearer {token}"}
        while True:
            reply = httpx.get(f"{front.address}/sessions/{id}", headers=headers, timeout=20)
            if reply.status_code == 200:
                break
            assert reply.status_code == 502, reply.text
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert reply.json()["turns"] == 1


def test_sessions_serve_refuses_an_engine_that_lives_in_a_run(folder, capsys):
    from miles.cli import USAGE, main

    words = ["engine=torch", "engine.rows=8", f"model.path={folder / 'model'}"]
    assert main(["sessions", "serve", f"run.dir={folder}", *words]) == USAGE
    assert "give engine.url" in capsys.readouterr().err


def test_sessions_serve_needs_an_engine_that_answers(folder, capsys):
    from miles.cli import FAILED, main

    words = ["engine.url=http://127.0.0.1:9", f"model.path={folder / 'model'}"]
    assert main(["sessions", "serve", f"run.dir={folder}", *words]) == FAILED
    assert "GET http://127.0.0.1:9/model_info" in capsys.readouterr().err
