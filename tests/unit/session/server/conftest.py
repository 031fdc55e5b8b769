"""A session server in a thread of its own, an engine that says what a script says, and a handler
with reasoning."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from miles import Completion, Context, EngineError, Request, Sampling, SessionKeys, Span
from miles.session import Sessions
from miles.session.server import make_app, serve
from miles_plugins.tito.bytes import Bytes

ADMIN = "admin-secret"


class Thinking(Bytes):
    """Bytes with `<think>...</think>` before the answer; `opened` when the prompt writes the
    first mark."""

    def __init__(self, *, opened: bool = False) -> None:
        super().__init__(Bytes.Config(), Context(directory=Path()))
        self.opened = opened

    def render(self, messages, *, tools=()):
        return self._open(super().render(self._plain(messages), tools=tools))

    def extend(self, stored, history, messages, *, tools=()):
        new = super().extend(stored, self._plain(history), self._plain(messages), tools=tools)
        return self._open(new)

    def _plain(self, messages):
        return [
            {**m, "content": f"<think>{m['reasoning_content']}</think>{m['content']}"}
            if m.get("reasoning_content")
            else m
            for m in messages
        ]

    def _open(self, tokens):
        more = self.encode("<think>") if self.opened else []
        return np.concatenate([tokens, np.array(more, np.int32)])

    def parse(self, tokens, *, tools=()):
        message = dict(super().parse(tokens, tools=tools))
        text = str(message["content"])
        head, closed, tail = text.partition("</think>")
        if closed:
            message["reasoning_content"] = head.removeprefix("<think>").strip()
            message["content"] = tail.lstrip()
        elif not self.opened and text.startswith("<think>"):
            message["reasoning_content"] = text.removeprefix("<think>").strip()
            message["content"] = ""
        return message


class Script:
    """An engine that says texts (or messages) in order, token by token where `pause_s` says so."""

    samples = True

    def __init__(self, *said: Any, tito: Any = None, pause_s: float = 0.0) -> None:
        self.said, self.pause_s = list(said), pause_s
        self.tito = tito or Bytes(Bytes.Config(), Context(directory=Path()))
        self.requests: list[Request] = []
        self.aborted: list[Any] = []
        self.fail: Exception | None = None
        self.hold: threading.Event | None = None

    def _completion(self, request: Request) -> Completion:
        self.requests.append(request)
        if self.fail is not None:
            raise self.fail
        said = self.said[min(len(self.requests), len(self.said)) - 1]
        tokens = self.tito.demonstrate(said)[: request.sampling.max_new_tokens]
        size = len(tokens)
        whole = bool(size) and int(tokens[-1]) in request.sampling.stop_ids
        return Completion(
            tokens=tokens,
            logprobs=np.full(size, -0.5, np.float32),
            spans=(Span(start=0, stop=size, version=3),) if size else (),
            finish="stop" if whole else "length",
            cached_tokens=min(4, len(request.tokens)),
        )

    async def generate(self, request: Request) -> Completion:
        made = self._completion(request)
        await self._held()
        await asyncio.sleep(self.pause_s * len(made.tokens))
        return made

    async def stream(self, request: Request) -> AsyncIterator[Any]:
        made = self._completion(request)
        for index in range(len(made.tokens)):
            if index == len(made.tokens) // 2:
                await self._held()
            await asyncio.sleep(self.pause_s)
            yield made.tokens[index : index + 1]
        yield made

    async def _held(self) -> None:
        while self.hold is not None and not self.hold.is_set():
            await asyncio.sleep(0.005)

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        self.aborted.append(keys)
        return 1


class Running:
    """A server that is up: where it is, and how to reach a session of it."""

    def __init__(self, address: str, sessions: Sessions, engine: Any) -> None:
        self.address, self.sessions, self.engine = address, sessions, engine
        self.http = httpx.Client(base_url=address, timeout=20)

    def open(self, id: str | None = None) -> tuple[str, str]:
        """Base URL of a new session, and its token."""
        made = self.http.post(
            "/sessions",
            json={} if id is None else {"id": id},
            headers={"Authorization": f"Bearer {ADMIN}"},
        )
        assert made.status_code == 201, made.text
        body = made.json()
        return f"{self.address}/sessions/{body['session_id']}", body["token"]

    def session(self, base: str) -> Any:
        return self.sessions.get(base.rpartition("/")[2])


@contextmanager
def running(engine: Any, *, tito: Any = None, directory: Path | None = None, **more: Any):
    """Serve in a thread; `rules`, `sampling`, `max_tokens` and arguments of `make_app` may be
    given."""
    tito = tito or engine.tito
    rules = more.pop("rules", SessionKeys())
    sessions = Sessions(
        tito, rules=rules, max_tokens=more.pop("max_tokens", None), directory=directory
    )
    app = make_app(
        sessions,
        engine=engine,
        tito=tito,
        sampling=more.pop("sampling", Sampling(max_new_tokens=400)),
        seed_of=lambda id: 7,
        model="policy",
        admin_token=ADMIN,
        **more,
    )
    up, stop = threading.Event(), threading.Event()
    found: list[Any] = []

    async def main() -> None:
        async with serve(app, grace_s=1) as address:
            found.append(address)
            up.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - told to the test below
            found.append(error)
            up.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert up.wait(20)
    assert isinstance(found[0], str), found[0]
    server = Running(found[0], sessions, engine)
    try:
        yield server
    finally:
        server.http.close()
        stop.set()
        thread.join(20)
        sessions.stop()
        assert len(found) == 1, found[1:]
        assert not thread.is_alive()


@pytest.fixture
def serving() -> Callable[..., Any]:
    """`running`."""
    return running


@pytest.fixture
def script() -> type[Script]:
    """`Script`."""
    return Script


@pytest.fixture
def thinking() -> type[Thinking]:
    """`Thinking`."""
    return Thinking


@pytest.fixture(scope="module")
def talk() -> Iterator[Running]:
    """A server whose engine says one text over and over."""
    with running(Script("Hello there, żółw 🐢!")) as server:
        yield server


@pytest.fixture
def engine_error() -> type[EngineError]:
    """Raised by an engine that failed."""
    return EngineError
