"""SingleTurn and what counts as a reward."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles import Episode, EpisodeError, LazyTasks, Reply, SingleTurn, Task, check_reward


def play(episode, text):
    async def run():
        prompt = await episode.reset()
        reply = Reply(
            text=text, message={"role": "assistant", "content": text}, finish="stop", tokens=1
        )
        step = await episode.step(reply)
        return prompt, step, await episode.reward()

    return asyncio.run(run())


def test_single_turn_scores_the_text_with_a_plain_function():
    prompt, step, reward = play(SingleTurn("2+2=", lambda text: float(text == "4")), "4")
    assert (prompt, step.done, step.messages) == ("2+2=", True, ())
    assert reward == (1.0, {})


def test_single_turn_awaits_a_coroutine_and_keeps_its_metrics():
    async def score(text):
        await asyncio.sleep(0)
        return len(text), {"length": 3}

    assert play(SingleTurn("x", score), "abc")[2] == (3.0, {"length": 3})


def test_single_turn_is_an_episode():
    assert isinstance(SingleTurn("x", lambda text: 0.0), Episode)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "reward is NaN"),
        (float("inf"), "reward is inf"),
        (1e39, "reward is 1e\\+39; a finite float32"),
        (None, "reward is None; one finite number"),
        ("1.0", "reward is '1.0'"),
        ([1.0, 0.0], "reward is 2 values \\(list\\)"),
        ((1.0, 2.0), "reward is 2 values \\(tuple\\)"),
        (np.zeros(3), "reward is an array of shape \\(3,\\)"),
        (np.zeros(1), "reward is an array of shape \\(1,\\)"),
        (10**400, "reward is an integer beyond every float"),
        (1j, "reward is a complex"),
        ((1.0, {"speed": None}), "metric 'speed' is None"),
        ((1.0, {"speed": float("nan")}), "metric 'speed' is NaN"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_check_reward_refuses_what_is_not_one_finite_number_and_names_the_environment(value, words):
    with pytest.raises(EpisodeError, match=f"^environment 'swe': {words}"):
        check_reward(value, "swe")


@pytest.mark.parametrize(
    "value", [True, 1, np.float32(1), np.int64(1), np.array(1.0), np.bool_(True)]
)
def test_check_reward_takes_every_kind_of_single_number(value):
    reward, metrics = check_reward(value, "swe")
    assert (reward, type(reward), metrics) == (1.0, float, {})


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_check_reward_keeps_every_finite_float32(value):
    assert check_reward(value, "swe") == (value, {})


def test_lazy_tasks_are_made_when_asked_for_and_slice_as_lists_do():
    made = []

    def make(key):
        made.append(key)
        return Task(id=str(key), prompt="p")

    tasks = LazyTasks([3, 1, 2], make)
    assert (len(tasks), made) == (3, [])
    assert tasks[-1].id == "2"
    assert [t.id for t in tasks[:2]] == ["3", "1"]
    assert tasks[1:] == [Task(id="1", prompt="p"), Task(id="2", prompt="p")]
    assert tasks != [Task(id="1", prompt="p")]
    with pytest.raises(IndexError):
        tasks[3]
