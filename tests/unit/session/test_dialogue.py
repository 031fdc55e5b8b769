"""One turn with an engine: what it is asked, and what is left whatever happens to it."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from miles import (
    EngineError,
    GenerationAborted,
    PromptTooLong,
    Sampling,
    SessionConflict,
    WorkerError,
)
from miles import derive_seed as derived
from miles.session import turn
from miles.session.dialogue import with_stop_ids
from tests.unit.session.talk import TITO, completion, session, user

SAMPLING = Sampling(max_new_tokens=8, stop_ids=(257,))


class Engine:
    """Answers with the next completion, after `gate` opens if there is one; an exception is
    raised."""

    samples = True

    def __init__(self, *script, gate=None):
        self.script, self.gate, self.asked, self.aborted = list(script), gate, [], []

    async def generate(self, request):
        self.asked.append(request)
        said = self.script.pop(0)
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(said, BaseException):
            raise said
        return said

    async def abort(self, keys=None):
        self.aborted.append(keys)
        return 1


class Streaming(Engine):
    """The same, token by token."""

    closed = 0

    async def stream(self, request):
        said = await self.generate(request)
        try:
            for token in said.tokens:
                await asyncio.sleep(0)
                yield np.array([token], np.int32)
            yield said
        finally:
            self.closed += 1


def ask(talk, engine, text="a", **more):
    options = {"engine": engine, "sampling": SAMPLING, "seed": 7, "append": True}
    return turn(talk, [user(text)], **{**options, **more})


def test_turn_asks_with_the_sessions_key_seed_tokens_and_what_room_there_is():
    talk, engine = session(id="k", max_tokens=25), Engine(completion("hi"))
    done = asyncio.run(ask(talk, engine))
    (request,) = engine.asked
    assert (request.id, request.key, request.seed) == ("k/0", "k", derived(7, 0))
    assert request.tokens.tolist() == TITO.render([user("a")]).tolist()
    assert request.sampling == replace(SAMPLING, max_new_tokens=25 - len(request.tokens))
    assert done.text == "hi"
    assert talk.turns == 1


def test_turn_asks_for_experts_when_the_session_wants_them():
    for wanted in (False, True):
        talk, engine = session(experts=wanted), Engine(completion("hi"))
        asyncio.run(ask(talk, engine))
        assert engine.asked[0].want_experts is wanted


def test_stop_ids_are_the_handlers_unless_the_sampling_brings_its_own():
    assert with_stop_ids(Sampling(), TITO).stop_ids == TITO.stop_ids
    assert with_stop_ids(Sampling(stop_ids=(7,)), TITO).stop_ids == (7,)


@pytest.mark.parametrize(
    "error", [EngineError("busy"), ValueError("a bug"), asyncio.CancelledError()]
)
def test_session_is_as_before_whatever_the_engine_raises(error):
    talk, engine = session(), Engine(error, completion("ok"))

    async def run():
        with pytest.raises(type(error)):
            await ask(talk, engine)
        assert talk.pending == 0
        return await ask(talk, engine)

    assert asyncio.run(run()).index == 0
    assert engine.asked[0].id == engine.asked[1].id, "asked again, it is the same turn"


def test_aborted_generation_is_not_stored():
    talk, engine = session(), Engine(completion("x", finish="abort"))
    with pytest.raises(GenerationAborted):
        asyncio.run(ask(talk, engine))
    assert (talk.turns, talk.pending) == (0, 0)


def test_engine_that_takes_too_long_is_told_to_stop():
    talk = session(id="k", upstream_timeout_s=0.01)

    async def run():
        engine = Engine(completion("x"), gate=asyncio.Event())
        with pytest.raises(EngineError, match=r"k/0 had no answer in 0\.01 s \(session\.upstream_"):
            await ask(talk, engine)
        return engine

    assert asyncio.run(run()).aborted == [["k"]]
    assert talk.pending == 0


def test_cancelled_turn_stops_the_engine_before_anybody_can_ask_again():
    talk = session(id="k")

    async def run():
        engine = Engine(completion("x"), gate=asyncio.Event())
        task = asyncio.create_task(ask(talk, engine))
        await asyncio.sleep(0)
        stopping = asyncio.Event()

        async def abort(keys=None):
            with pytest.raises(SessionConflict):
                talk.prompt([user("again")], append=True)
            stopping.set()
            return 1

        engine.abort = abort
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stopping.is_set()
        talk.abandon(talk.prompt([user("again")], append=True))

    asyncio.run(run())


@pytest.mark.parametrize("error", [EngineError("gone"), WorkerError("engine: ended")])
def test_cancelled_turn_stays_cancelled_when_the_engine_cannot_be_told(error):
    talk = session(id="k")

    async def run():
        engine = Engine(completion("x"), gate=asyncio.Event())

        async def abort(keys=None):
            raise error

        engine.abort = abort
        task = asyncio.create_task(ask(talk, engine))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert talk.pending == 0


def test_cancelled_turn_of_a_branching_session_leaves_the_others_alone():
    talk = session(extension="branching")

    async def run():
        gate = asyncio.Event()
        engine = Engine(completion("x"), completion("y"), gate=gate)
        one = asyncio.create_task(ask(talk, engine, "a", append=False))
        two = asyncio.create_task(ask(talk, engine, "b", append=False))
        await asyncio.sleep(0)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        assert engine.aborted == [], "both have the key, and only one was given up"
        gate.set()
        return await two

    assert asyncio.run(run()).text == "y"


@pytest.mark.parametrize("kind", [Engine, Streaming])
def test_tokens_are_told_as_they_come(kind):
    talk, engine, heard = session(), kind(completion("hello")), []
    done = asyncio.run(ask(talk, engine, on_tokens=lambda ids: heard.append(ids.tolist())))
    assert [i for ids in heard for i in ids] == done.completion.tokens.tolist()
    assert len(heard) == (1 if kind is Engine else 6)


def test_stream_is_closed_when_a_listener_fails():
    talk, engine = session(), Streaming(completion("hello"))

    def fail(ids):
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(ask(talk, engine, on_tokens=fail))
    assert engine.closed == 1
    assert talk.pending == 0


def test_stream_without_an_end_is_the_engines_fault():
    class Endless(Engine):
        async def stream(self, request):
            yield np.array([65], np.int32)

    with pytest.raises(EngineError, match="stream ended without a completion"):
        asyncio.run(ask(session(), Endless(), on_tokens=lambda ids: None))


def test_prompt_that_does_not_fit_asks_nobody():
    talk, engine = session(max_tokens=10), Engine()
    with pytest.raises(PromptTooLong):
        asyncio.run(ask(talk, engine))
    assert engine.asked == []
    assert talk.truncated


def test_every_turn_has_a_seed_of_its_own_retries_too():
    talk, engine = session(), Engine(completion("x"), completion("y"))

    async def run():
        for _ in range(2):
            await ask(talk, engine, append=False)

    asyncio.run(run())
    assert [r.seed for r in engine.asked] == [derived(7, 0), derived(7, 1)]
    assert talk.turns == 1
