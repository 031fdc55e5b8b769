"""SessionConversation: what was sampled stays what it was, with its versions and log-probs in their
place."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import (
    Completion,
    Context,
    EngineError,
    EpisodeError,
    GenerationAborted,
    HistoryMismatch,
    PromptTooLong,
    Sampling,
    Span,
    derive_seed,
)
from miles.session import SessionConversation
from miles_plugins.tito.bytes import Bytes

TITO = Bytes(Bytes.Config(), Context(directory=Path(".")))
STOP = 258


@dataclass
class Scripted:
    """An engine that says what it is told and remembers what it was asked."""

    script: list
    samples: bool = True
    asked: list = field(default_factory=list)

    async def generate(self, request):
        self.asked.append(request)
        said = self.script[len(self.asked) - 1]
        if isinstance(said, Exception):
            raise said
        return said


def completion(ids, *, versions=(0,), finish="stop", truncated=False, logprobs=True, experts=None):
    """A completion whose log-prob at i is -(i + 1) / 8, cut ones half of that, in equal spans."""
    tokens = np.array(ids, np.int32)
    edges = np.linspace(0, len(ids), len(versions) + 1).astype(int)
    spans = tuple(
        Span(start=int(a), stop=int(b), version=v)
        for a, b, v in zip(edges, edges[1:], versions, strict=False)
        if b > a
    )
    values = -(np.arange(len(ids), dtype=np.float32) + 1) / 8
    return Completion(
        tokens=tokens,
        logprobs=values if logprobs else None,
        spans=spans,
        finish=finish,
        truncated_logprobs=values / 2 if truncated else None,
        experts=experts,
    )


def conversation(engine, **more):
    options = {
        "key": "g0-a0",
        "tito": TITO,
        "engine": engine,
        "sampling": Sampling(max_new_tokens=8),
        "seed": 7,
    }
    return SessionConversation(**{**options, **more})


def user(text):
    return [{"role": "user", "content": text}]


def test_first_turn_asks_with_key_seed_stop_ids_and_rendered_tokens():
    engine = Scripted([completion([65, STOP])])
    talk = conversation(engine)
    reply = asyncio.run(talk.turn(user("hi")))
    (request,) = engine.asked
    assert request.key == "g0-a0"
    assert request.seed == derive_seed(7, 0)
    assert request.sampling == Sampling(max_new_tokens=8, stop_ids=(STOP,))
    assert request.demonstration is None
    np.testing.assert_array_equal(request.tokens, TITO.render(user("hi")))
    assert (reply.text, reply.message["content"], reply.finish, reply.tokens) == (
        "A",
        "A",
        "stop",
        2,
    )


def test_raw_text_is_encoded_as_it_is():
    engine = Scripted([completion([65, STOP])])
    asyncio.run(conversation(engine).turn("34+57="))
    assert bytes(engine.asked[0].tokens.tolist()) == b"34+57="


def test_sampling_with_its_own_stop_ids_keeps_them():
    engine = Scripted([completion([65, 10])])
    talk = conversation(engine, sampling=Sampling(stop_ids=(10,)))
    assert asyncio.run(talk.turn("x")).text == "A"
    assert engine.asked[0].sampling.stop_ids == (10,)


def test_each_turn_has_a_seed_and_an_id_of_its_own():
    engine = Scripted([completion([65, STOP])] * 3)
    talk = conversation(engine)

    async def run():
        for _ in range(3):
            await talk.turn(user("go"))

    asyncio.run(run())
    assert [r.seed for r in engine.asked] == [derive_seed(7, turn) for turn in range(3)]
    assert len({r.id for r in engine.asked}) == 3


ids = st.lists(st.integers(0, 263).filter(lambda i: i != STOP), min_size=0, max_size=6)
turn = st.tuples(ids, st.booleans(), st.integers(0, 2), st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(turn, min_size=1, max_size=4), st.text(max_size=5))
def test_sampled_ids_are_kept_exactly_whatever_they_decode_to(turns, text):
    """Every prompt begins with all earlier tokens; the sample holds each completion's values at its
    place."""
    script, version = [], 0
    for body, closed, lag, cut in turns:
        said = [*body, STOP] if closed or not body else body
        versions = (version, version + lag)
        script.append(completion(said, versions=versions, truncated=cut))
        version += lag
    engine = Scripted(script)
    talk = conversation(engine)

    async def run():
        for _ in script:
            await talk.turn(user(text))

    asyncio.run(run())
    trajectory = talk.trajectory(reward=0.5)
    (sample,) = trajectory.samples
    stored = np.zeros(0, np.int32)
    for request, said in zip(engine.asked, script, strict=True):
        np.testing.assert_array_equal(request.tokens[: len(stored)], stored)
        start = len(request.tokens)
        stored = np.concatenate([request.tokens, said.tokens])
        here = slice(start, start + len(said.tokens))
        np.testing.assert_array_equal(sample.tokens[here], said.tokens)
        np.testing.assert_array_equal(sample.logprobs[here], said.logprobs)
        assert sample.sampled[here].all()
        for span in said.spans:
            assert (
                Span(start=start + span.start, stop=start + span.stop, version=span.version)
                in sample.spans
            )
        if any(c.truncated_logprobs is not None for c in script):
            wanted = said.logprobs if said.truncated_logprobs is None else said.truncated_logprobs
            np.testing.assert_array_equal(sample.truncated_logprobs[here], wanted)
        else:
            assert sample.truncated_logprobs is None
    np.testing.assert_array_equal(sample.tokens, stored)
    assert int(sample.sampled.sum()) == sum(len(c.tokens) for c in script)
    np.testing.assert_array_equal(sample.sampled, sample.trainable)
    assert (sample.logprobs[~sample.sampled] == 0).all()


def test_next_prompt_equals_a_rendering_of_the_whole_history():
    engine = Scripted([completion([*b"one", STOP]), completion([*b"two", STOP])])
    talk = conversation(engine)

    async def run():
        await talk.turn(user("a"))
        await talk.turn(user("b"))

    asyncio.run(run())
    whole = TITO.render([*user("a"), {"role": "assistant", "content": "one"}, *user("b")])
    np.testing.assert_array_equal(engine.asked[1].tokens, whole)


def test_trajectory_carries_reward_metrics_text_and_finish():
    engine = Scripted([completion([65, 66], finish="length")])
    talk = conversation(engine)
    asyncio.run(talk.turn("x"))
    trajectory = talk.trajectory(reward=0.25, metrics={"tries": 2.0})
    assert (trajectory.id, trajectory.reward, trajectory.metrics) == ("g0-a0", 0.25, {"tries": 2.0})
    assert trajectory.text == "AB"
    assert trajectory.samples[0].finish == "length"


def test_completion_without_logprobs_leaves_the_sample_without_them():
    engine = Scripted([completion([65, STOP]), completion([65, STOP], logprobs=False)])
    talk = conversation(engine)

    async def run():
        await talk.turn(user("a"))
        await talk.turn(user("b"))

    asyncio.run(run())
    assert talk.trajectory(reward=0.0).samples[0].logprobs is None


def test_experts_are_put_at_the_sampled_tokens():
    experts = np.arange(1, 9, dtype=np.uint8).reshape(2, 2, 2)
    engine = Scripted([completion([65, STOP], experts=experts)])
    talk = conversation(engine)
    asyncio.run(talk.turn("abc"))
    sample = talk.trajectory(reward=0.0).samples[0]
    assert sample.experts.shape == (5, 2, 2)
    assert sample.experts.dtype == np.uint8
    np.testing.assert_array_equal(sample.experts[3:], experts)


def test_demonstration_is_the_solution_with_its_stop_id():
    said = completion([*b"19", STOP], logprobs=False)
    engine = Scripted([said], samples=False)
    talk = conversation(engine, solution="19")
    asyncio.run(talk.turn("34+57="))
    np.testing.assert_array_equal(engine.asked[0].demonstration, [*b"19", STOP])
    sample = talk.trajectory(reward=1.0).samples[0]
    np.testing.assert_array_equal(np.flatnonzero(sample.trainable), [6, 7, 8])


def test_demonstration_of_several_turns_says_the_assistants_messages_in_order():
    solution = (
        {"role": "assistant", "content": "one"},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "two"},
    )
    said = [completion([*text, STOP], logprobs=False) for text in (b"one", b"two")]
    engine = Scripted(said, samples=False)
    talk = conversation(engine, solution=solution)

    async def run():
        await talk.turn(user("go"))
        await talk.turn([{"role": "tool", "content": "1"}])
        await talk.turn(user("more"))

    with pytest.raises(
        EpisodeError, match="nothing to demonstrate in turn 2: the solution has 2 assistant"
    ):
        asyncio.run(run())
    for request, wanted in zip(engine.asked, said, strict=True):
        np.testing.assert_array_equal(request.demonstration, wanted.tokens)
    assert int(talk.trajectory(reward=1.0).samples[0].trainable.sum()) == 8


def test_demonstration_of_one_text_is_one_turn_long():
    engine = Scripted([completion([*b"19", STOP], logprobs=False)], samples=False)
    talk = conversation(engine, solution="19")

    async def run():
        await talk.turn(user("a"))
        await talk.turn(user("b"))

    with pytest.raises(EpisodeError, match="in turn 1: a solution of one text is one turn long"):
        asyncio.run(run())


def test_tools_are_offered_in_every_turn_and_need_not_be_given_again():
    from miles.testing import FakeTito

    tools = ({"type": "function", "function": {"name": "add"}},)
    engine = Scripted([completion([65, 257]), completion([66, 257]), completion([67, 257])])
    talk = conversation(engine, tito=FakeTito())

    async def run():
        await talk.turn(user("a"), tools=tools)
        await talk.turn(user("b"))
        await talk.turn(user("c"), tools=list(tools))
        await talk.turn(user("d"), tools=({"function": {"name": "sub"}},))

    with pytest.raises(HistoryMismatch, match="tools: sub offered, add when the conversation"):
        asyncio.run(run())
    assert len(engine.asked) == 3
    assert FakeTito().decode(engine.asked[2].tokens).count("<turn>tools") == 1


def test_demonstration_without_a_solution_says_so():
    talk = conversation(Scripted([], samples=False))
    with pytest.raises(
        EpisodeError, match=r"g0-a0: nothing to demonstrate in turn 0: the task has no"
    ):
        asyncio.run(talk.turn("x"))


def test_prompt_that_does_not_fit_is_a_value_with_a_reason_and_leaves_the_conversation_usable():
    engine = Scripted([completion([65, STOP])])
    talk = conversation(engine, max_len=12)

    async def run():
        await talk.turn("12345678")
        with pytest.raises(EpisodeError, match="began as raw text"):
            await talk.turn(user("x"))

    asyncio.run(run())
    assert engine.asked[0].sampling.max_new_tokens == 4  # what the context still holds
    assert len(talk.trajectory(reward=0.0).samples[0].tokens) == 10
    long = conversation(Scripted([]), max_len=12)
    with pytest.raises(
        PromptTooLong, match="a prompt of 12 tokens leaves no room in a context of 12"
    ) as caught:
        asyncio.run(long.turn("x" * 12))
    assert caught.value.reason == "prompt_too_long"


def test_context_full_at_a_later_turn_keeps_the_turns_before():
    engine = Scripted([completion([65, STOP])])
    talk = conversation(engine, max_len=45)

    async def run():
        await talk.turn(user("a"))
        with pytest.raises(PromptTooLong):
            await talk.turn(user("b" * 30))

    asyncio.run(run())
    assert talk.trajectory(reward=0.0).text == "A"


def test_abort_is_a_value_with_a_reason():
    engine = Scripted([completion([65], finish="abort")])
    with pytest.raises(GenerationAborted, match="g0-a0: turn 0 was aborted") as caught:
        asyncio.run(conversation(engine).turn("x"))
    assert caught.value.reason == "aborted"


def test_engine_error_passes_through_and_the_turn_can_be_repeated():
    engine = Scripted([EngineError("busy"), completion([65, STOP])])
    talk = conversation(engine)

    async def run():
        with pytest.raises(EngineError, match="busy"):
            await talk.turn("x")
        return await talk.turn("x")

    assert asyncio.run(run()).text == "A"


def test_values_of_another_length_than_the_tokens_are_the_engines_fault():
    said = completion([65, 66, STOP])
    broken = Completion(
        tokens=said.tokens, logprobs=said.logprobs[:2], spans=said.spans, finish="stop"
    )
    talk = conversation(Scripted([broken]))
    with pytest.raises(
        EngineError, match="turn 0: the engine gave 2 per-token values for 3 sampled tokens"
    ):
        asyncio.run(talk.turn("x"))


@pytest.mark.parametrize(
    ("first", "words"), [("", "the prompt is empty"), (None, "nothing was sampled")]
)
def test_conversation_without_a_turn_has_nothing_to_train_on(first, words):
    talk = conversation(Scripted([]))

    def run():
        if first is not None:
            asyncio.run(talk.turn(first))
        talk.trajectory(reward=0.0)

    with pytest.raises(EpisodeError, match=words):
        run()


def test_routing_key_may_not_be_empty():
    with pytest.raises(EpisodeError, match="routing key, is empty"):
        conversation(Scripted([]), key="")


def test_raw_text_after_the_first_turn_is_refused():
    talk = conversation(Scripted([completion([65, STOP])]))

    async def run():
        await talk.turn("x")
        await talk.turn("y")

    with pytest.raises(EpisodeError, match="raw text can only be the first turn"):
        asyncio.run(run())
