"""Shuffle: every task once an epoch, exact resume, and filters that name their reason."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import CheckpointError, ConfigError, Context, Drop, Group, Sample, Span, Task, Trajectory
from miles_plugins.selector.shuffle import Shuffle


@dataclass
class Numbers:
    """An environment of numbered tasks."""

    size: int
    prefix: str = "t"

    def tasks(self, split):
        return [Task(id=f"{self.prefix}{i}", prompt="x") for i in range(self.size)]


def make(size=5, *, seed=0, filters=None, prefix="t", **config):
    context = Context(
        directory=Path("."), seed=seed, environment=Numbers(size, prefix), filters=filters or {}
    )
    return Shuffle(Shuffle.Config(**config), context)


def take(selector, count):
    return [task.id for task in (selector.next() for _ in range(count)) if task is not None]


def group(rewards, lengths=None):
    trajectories = []
    for i, reward in enumerate(rewards):
        size = lengths[i] if lengths else 2
        mask = np.arange(size + 3) >= 3
        sample = Sample(
            tokens=np.zeros(size + 3, np.int32),
            sampled=mask,
            trainable=mask,
            logprobs=None,
            spans=(Span(start=3, stop=size + 3, version=0),),
        )
        trajectories.append(Trajectory(id=f"g0-a{i}", samples=(sample,), reward=reward))
    return Group(id=0, task=Task(id="t", prompt="x"), trajectories=tuple(trajectories))


@settings(max_examples=40)
@given(size=st.integers(1, 40), epochs=st.integers(1, 4), seed=st.integers(0, 2**40))
def test_every_epoch_has_every_task_once_and_then_there_are_no_more(size, epochs, seed):
    selector = make(size, seed=seed, epochs=epochs)
    for _ in range(epochs):
        assert sorted(take(selector, size)) == sorted(f"t{i}" for i in range(size))
    assert selector.next() is None
    assert selector.next() is None


@settings(max_examples=40)
@given(size=st.integers(1, 100), taken=st.integers(0, 250), seed=st.integers(0, 2**40))
def test_resume_continues_exactly(size, taken, seed):
    selector = make(size, seed=seed)
    take(selector, taken)
    state = json.loads(json.dumps(selector.state_dict()))
    again = make(size, seed=seed)
    again.load_state_dict(state)
    assert take(again, 2 * size) == take(selector, 2 * size)
    assert again.state_dict() == selector.state_dict()


def test_resume_after_the_last_epoch_stays_at_the_end():
    selector = make(3, epochs=1)
    take(selector, 3)
    again = make(3, epochs=1)
    again.load_state_dict(selector.state_dict())
    assert again.next() is None


def test_order_is_a_function_of_seed_and_epoch():
    first, second = make(8), make(8, seed=1)
    epochs = [take(first, 8), take(first, 8)]
    assert epochs[0] != epochs[1]
    assert take(second, 8) != epochs[0]
    assert epochs[0] == ["t5", "t0", "t1", "t6", "t2", "t3", "t4", "t7"]  # the same everywhere


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"size": 6}, "the checkpoint's tasks is 5, this run's is 6"),
        ({"seed": 1}, "the checkpoint's seed is 0, this run's is 1"),
        ({"prefix": "u"}, "the checkpoint's fingerprint is "),
    ],
)
def test_resume_with_other_tasks_or_seed_is_refused(other, words):
    state = make().state_dict()
    with pytest.raises(CheckpointError, match=words):
        make(**other).load_state_dict(state)


def test_zero_variance_drops_several_equal_rewards():
    selector = make()
    assert selector.admit(group([0.5, 0.5])) == Drop(
        reason="zero_variance", detail="all 2 rewards are 0.5"
    )
    assert selector.admit(group([0.5, 0.0])) is None
    assert selector.admit(group([0.5])) is None  # one attempt has nothing to vary from


def test_length_drops_by_the_sampled_tokens_of_any_attempt():
    selector = make(admit=("length",), min_length=2, max_length=4)
    assert selector.admit(group([0.0, 0.0], [2, 4])) is None
    assert selector.admit(group([0.0, 0.0], [2, 5])) == Drop(
        reason="length", detail="g0-a1 sampled 5 tokens; 2 to 4 are admitted"
    )
    assert selector.admit(group([0.0, 0.0], [1, 4])).reason == "length"
    assert make(admit=("length",), min_length=2).admit(group([0.0], [900])) is None


def test_filters_run_in_order_and_plugins_add_their_own():
    filters = {"never": lambda group: Drop(reason="never")}
    equal = group([0.0, 0.0])
    assert make(filters=filters, admit=("never", "zero_variance")).admit(equal).reason == "never"
    assert (
        make(filters=filters, admit=("zero_variance", "never")).admit(equal).reason
        == "zero_variance"
    )
    assert make(admit=("none",)).admit(equal) is None
    assert make(admit=()).admit(equal) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"admit": ("zero_varience",)},
            "no filter 'zero_varience'; did you mean 'zero_variance'\\? valid: length, none",
        ),
        ({"epochs": -1}, "epochs is -1"),
        ({"min_length": 5, "max_length": 4}, "min_length is 5 and max_length 4"),
        ({"size": 0}, "environment Numbers has no tasks in its train split"),
        ({"filters": {"none": len}}, "a plugin claims the built-in filter 'none'"),
    ],
)
def test_configuration_that_cannot_be_used_is_refused(config, words):
    with pytest.raises(ConfigError, match=words):
        make(**config)
