"""HTTPConversation: the tokens of the same turns in process, and the same errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles import (
    Completion,
    Context,
    EngineError,
    Group,
    Message,
    Reply,
    Sampling,
    SessionKeys,
    Settings,
    Span,
    Step,
    Task,
    TokenMismatch,
)
from miles.buffer import Lease
from miles.router import Router
from miles.session import SessionConversation
from miles.testing import tool_call
from miles.workers.rollouts import Rollouts
from miles_plugins.environment.tools import Tools
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.precision.fp32 import Fp32
from miles_plugins.tito.bytes import Bytes

TITO = Bytes(Bytes.Config(), Context(directory=Path()))
ASKED: tuple[Message, ...] = ({"role": "user", "content": "Wie groß ist 'x\"\n' żółw 🐢?"},)
TASK = Task(id="t", prompt=ASKED, answer="4")


def add(first: int, second: int = 2) -> int:
    """Add two numbers."""
    return first + second


def tools(settings: Settings) -> Tools:
    """The environment, with one function that runs here."""
    around = Context(directory=Path(), settings=settings, tools={"add": add})
    return Tools(Tools.Config(tools=("add",)), around)


class Insisting:
    """An episode that answers every reply, calls or not, with a message of a tool and more."""

    def __init__(self, schemas: Sequence[Any]) -> None:
        self.tools = tuple(schemas)
        self.replies: list[Reply] = []

    async def reset(self) -> Sequence[Message]:
        return ASKED

    async def step(self, reply: Reply) -> Step:
        self.replies.append(reply)
        told = {"role": "tool", "tool_call_id": "a", "name": "add", "content": "é\x00 5"}
        return Step(messages=(told, {"role": "user", "content": "And?"}), done=False)

    async def reward(self) -> tuple[float, dict[str, float]]:
        return 0.25, {"turns": float(len(self.replies))}


class Insists:
    def __init__(self, settings: Settings) -> None:
        self.schemas = tools(settings).schemas
        self.episodes: list[Insisting] = []

    def episode(self, task: Task, seed: int) -> Insisting:
        self.episodes.append(Insisting(self.schemas))
        return self.episodes[-1]


class Script:
    """Says messages in order of a session's turns; log-probs tell which token it was."""

    samples = True

    def __init__(self, *said: Any) -> None:
        self.said = said
        self.aborted: list[Any] = []

    async def generate(self, request: Any) -> Completion:
        turn = int(request.id.rpartition("/")[2])
        said = self.said[min(turn, len(self.said) - 1)]
        if isinstance(said, Exception):
            raise said
        tokens = TITO.demonstrate(said)
        return Completion(
            tokens=tokens,
            logprobs=-np.arange(len(tokens), dtype=np.float32) / 8,
            spans=(Span(start=0, stop=len(tokens), version=turn),),
            finish="stop",
        )

    async def abort(self, keys: Any = None) -> int:
        self.aborted.append(keys)
        return 0

    async def version(self) -> int:
        return 0

    async def health(self) -> dict[str, float]:
        return {}


def embedded() -> Any:
    """The engine of runs over a random model whose distribution is far from uniform."""
    import torch

    from miles_plugins.engine.torch import Torch
    from miles_plugins.model.build import causal_lm

    around = Context(directory=Path(), precision=Fp32(Fp32.Config(), None))
    model = Qwen3(Qwen3.Config(layers=1, max_len=512), around)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = causal_lm(model.hf_config(), None)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.35 if "embed" in name else 0.2)
    engine = Torch(
        Torch.Config(rows=8, max_len=512), replace(around, model=model, settings=Settings())
    )
    return engine, [(n, p.detach()) for n, p in module.named_parameters()]


async def played(
    through: Any, make: Callable[[Settings], Any], engine: Any, **keys: Any
) -> tuple[Group, Any, Rollouts]:
    settings = Settings(
        samples_per_group=4,
        max_new_tokens=24,
        max_turns=4,
        session=SessionKeys(through=through, **keys.pop("rules", {})),
    )
    environment = make(settings)
    around = Context(directory=Path(), seed=5, settings=settings)
    here = Rollouts({"environment": environment, "tito": TITO}, around)
    here.max_len = keys.pop("max_len", None)
    here.sampler = here.engine = await Router({"engine": engine}).__aenter__()
    here.sampler.published(await engine.version())
    try:
        return await here.group(3, TASK, **keys), environment, here
    finally:
        await here.end()


def same(one: Group, two: Group) -> None:
    """Bit for bit what was sampled, and what it was worth."""
    assert len(one.trajectories) == len(two.trajectories)
    for a, b in zip(one.trajectories, two.trajectories, strict=True):
        assert (a.id, a.text, a.reward, a.metrics) == (b.id, b.text, b.reward, b.metrics)
        assert a.failure == b.failure and len(a.samples) == len(b.samples)
        for x, y in zip(a.samples, b.samples, strict=True):
            assert x.tokens.tolist() == y.tokens.tolist()
            assert x.sampled.tolist() == y.sampled.tolist()
            assert x.trainable.tolist() == y.trainable.tolist()
            assert x.logprobs is not None and y.logprobs is not None
            assert x.logprobs.tobytes() == y.logprobs.tobytes()
            assert (x.spans, x.finish) == (y.spans, y.finish)


def both(make: Callable[[Settings], Any], engine: Any, **keys: Any) -> tuple[Any, Any]:
    """The same group in process and over HTTP."""

    async def main() -> tuple[Any, Any]:
        one = await played("process", make, engine, **dict(keys))
        two = await played("server", make, engine, **dict(keys))
        return one, two

    return asyncio.run(main())


def test_conversation_over_http_has_the_tokens_that_the_embedded_engine_gives_in_process() -> None:
    engine, weights = embedded()

    async def main() -> tuple[Any, Any]:
        await engine.load(2, weights)
        found = [await played(through, Insists, engine) for through in ("process", "server")]
        greedy = Sampling(max_new_tokens=12, temperature=0.0)
        found += [
            await played(through, Insists, engine, samples=1, sampling=greedy)
            for through in ("process", "server")
        ]
        return found

    one, two, three, four = asyncio.run(main())
    same(one[0], two[0])
    same(three[0], four[0])
    assert not one[2]._servers  # nothing is served where nobody asks
    assert [len(s.spans) for s in two[0].samples] == [4, 4, 4, 4]
    assert {s.spans[0].version for s in two[0].samples} == {2}
    assert len({s.tokens.tobytes() for s in two[0].samples}) == 4
    for a, b in zip(one[1].episodes, two[1].episodes, strict=True):
        assert a.replies == b.replies
    assert two[2]._counters.turns == 16 and not two[2]._counters.token_mismatches
    assert {reply.finish for e in two[1].episodes for reply in e.replies} >= {"length"}


def test_conversation_over_http_calls_tools_as_in_process() -> None:
    broken = '<tool_call>{"name": "add", "arguments": '
    calls = tool_call("add", "Let me see.", first=2, second="2")
    script = Script(tool_call("add", first=2), calls, broken, "4")
    one, two = both(tools, script)
    same(one[0], two[0])
    metrics = two[0].trajectories[0].metrics
    assert two[0].trajectories[0].reward == 1.0
    assert (metrics["turns"], metrics["tools/calls"], metrics["tools/errors"]) == (4, 3, 2)
    assert [span.version for span in two[0].samples[0].spans] == [0, 1, 2, 3]
    assert not script.aborted  # nothing was left to be stopped


def test_conversation_over_http_ends_as_truncated_where_there_is_no_room() -> None:
    one, two = both(Insists, Script("x" * 40), max_len=330)
    same(one[0], two[0])
    assert 1 < two[0].trajectories[0].metrics["turns"] < 4
    one, two = both(Insists, Script("x"), max_len=20)
    assert one[0].failure is not None and two[0].failure is not None
    assert one[0].failure.reason == two[0].failure.reason == "prompt_too_long"


@pytest.mark.parametrize("error", [EngineError("it broke"), TokenMismatch("token 3 differs")])
def test_conversation_over_http_raises_what_the_turn_would_raise(error: Exception) -> None:
    one, two = both(Insists, Script("x", error))
    assert one[0].failure is not None and two[0].failure is not None
    assert two[0].failure.reason == one[0].failure.reason
    assert two[0].failure.detail == one[0].failure.detail


def test_conversation_over_http_that_outgrows_a_request_ends_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A conversation of many images counted as an engine's failure."""
    monkeypatch.setattr("miles.session.server.app.MAX_BODY", 500)

    async def main() -> None:
        group, _, _ = await played("server", Insists, Script("x"))
        assert group.failure is not None and group.failure.reason == "episode_error"
        assert "more than the session server takes" in group.failure.detail

    asyncio.run(main())


def test_conversation_over_http_raises_a_bug_of_the_server_as_a_bug() -> None:
    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await played("server", Insists, Script(ZeroDivisionError("of the engine")))
        assert "500 internal: a fault of the server" in str(caught.value.exceptions[0])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "schemas", "words"),
    [
        ("raw text", (), "raw text is no message"),
        ([{"role": "developer", "content": "x"}], (), "message 0, of role 'developer'.* role w"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            (),
            "for another one: content would differ; use session.through=process",
        ),
        ([{"role": "user", "content": "x", "weight": 3}], (), "weight would differ"),
        ([{"role": "user", "content": "\ud800"}], (), "no JSON text"),
        (
            ASKED,
            ({"type": "function", "function": {"parameters": {}, "name": "add"}},),
            "writes these tools otherwise",
        ),
    ],
)
def test_conversation_over_http_refuses_what_the_api_would_change(
    prompt: Any, schemas: Any, words: str
) -> None:
    class Once(Insisting):
        async def reset(self) -> Any:
            return prompt

    class Asks:
        def episode(self, task: Task, seed: int) -> Once:
            return Once(schemas)

    async def main() -> None:
        group, _, _ = await played("server", lambda _: Asks(), Script("x"))
        assert group.failure is not None and group.failure.reason == "episode_error"
        assert re.search(words, group.failure.detail), group.failure.detail

    asyncio.run(main())


def test_conversation_over_http_leaves_demonstrations_in_the_process(tmp_path: Path) -> None:
    class Replays(Script):
        samples = False

    async def main() -> None:
        settings = Settings(session=SessionKeys(through="server"))
        around = Context(directory=Path(), settings=settings)
        parts = {"environment": None, "tito": TITO, "engine": Replays("x")}
        here = Rollouts(parts, around)
        made = here.tools(Lease(id=0, task=TASK), 0).conversation("g0.0")
        assert isinstance(made, SessionConversation)

    asyncio.run(main())


def test_conversation_over_http_that_is_cancelled_ends_its_generation() -> None:
    asked: list[str] = []

    class Hangs(Script):
        async def generate(self, request: Any) -> Completion:
            asked.append(request.key)
            await asyncio.sleep(60)
            raise AssertionError("not reached")

    async def main() -> None:
        engine = Hangs("x")
        playing = asyncio.create_task(played("server", Insists, engine))
        async with asyncio.timeout(30):
            while len(asked) < 4:
                await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert sorted({key for keys in engine.aborted for key in keys}) == [
            f"g3.{i}" for i in range(4)
        ]

    asyncio.run(main())
