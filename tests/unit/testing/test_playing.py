"""The episode driver for tests: it plays as the loop does, and says what happened."""

import asyncio

import pytest

from miles import EpisodeError, Step
from miles.testing import FakeEnvironment, play_episode, tool_call


def play(environment, replies, **how):
    return asyncio.run(play_episode(environment, environment.tasks("train")[0], replies, **how))


def test_play_episode_answers_until_the_episode_is_done():
    environment = FakeEnvironment(FakeEnvironment.Config(turns=2))
    task = environment.tasks("train")[0]
    played = play(environment, [task.answer, "zz", "too many"])
    assert (played.turns, played.done, played.reward) == (2, True, 1 / 3)
    assert played.metrics == {"letters": 3.0}
    assert [m["content"] for m in played.messages] == [task.prompt, task.answer, task.answer, "zz"]
    assert played.tools == ()


def test_play_episode_asks_a_function_what_to_say():
    seen = []

    def answer(messages):
        seen.append([m["role"] for m in messages])
        return {"role": "assistant", "content": "x"}

    played = play(FakeEnvironment(FakeEnvironment.Config(turns=3)), answer)
    assert played.turns == 3
    assert seen[1] == ["user", "assistant", "user"]


def test_play_episode_says_when_the_replies_ran_out():
    played = play(FakeEnvironment(FakeEnvironment.Config(turns=3)), ["a"])
    assert (played.turns, played.done) == (1, False)


def test_play_episode_closes_what_fails():
    closed = []

    class Episode:
        async def reset(self):
            return "go"

        async def step(self, reply):
            assert reply.finish == "length" and reply.demonstrated
            return Step()

        async def reward(self):
            raise EpisodeError("no reward")

        async def close(self):
            closed.append(True)

    class Environment(FakeEnvironment):
        def episode(self, task, seed):
            return Episode()

    with pytest.raises(EpisodeError, match="no reward"):
        play(Environment(), ["a"], finish="length", demonstrated=True)
    assert closed == [True]


def test_tool_call_is_a_message_in_openais_shape():
    message = tool_call("python", "so ", code="é")
    assert message["content"] == "so "
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "python", "arguments": '{"code": "é"}'}
