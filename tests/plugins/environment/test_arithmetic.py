"""Arithmetic: right answers, disjoint splits, the same tasks everywhere."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import ConfigError, Context
from miles.testing import play_episode
from miles_plugins.environment.arithmetic import Arithmetic, _last_number, shuffled


def make(seed=0, **config):
    return Arithmetic(Arithmetic.Config(**config), Context(directory=Path("."), seed=seed))


def score(environment, task, text):
    played = asyncio.run(play_episode(environment, task, [text]))
    return played.reward


@settings(max_examples=30, deadline=None)
@given(
    digits=st.integers(1, 18),
    operations=st.lists(st.sampled_from("+-*"), min_size=1, unique=True),
    reverse=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_answers_are_right_and_operands_have_their_digits(digits, operations, reverse, seed):
    environment = make(seed, digits=digits, operations=tuple(operations), reverse=reverse, train=20)
    for task in environment.tasks("train"):
        assert task.prompt == f"{task.id}="
        sign = next(c for c in task.id if c in "+-*")
        operands = task.id.split(sign)
        assert [len(x) for x in operands] == [digits, digits]
        body, minus = task.answer.removeprefix("-"), task.answer.startswith("-")
        written = int(body[::-1] if reverse else body) * (-1 if minus else 1)
        assert written == eval(f"int({operands[0]!r}) {sign} int({operands[1]!r})")
        assert task.solution == task.answer
        assert score(environment, task, task.answer) == 1.0
        assert score(environment, task, task.answer + "0") == 0.0


def test_splits_together_are_every_problem_once_under_every_seed():
    heldout = None
    for seed in (0, 1):
        environment = make(seed, train=10_000, heldout=10_000)
        ids = {split: [t.id for t in environment.tasks(split)] for split in ("train", "heldout")}
        everything = {f"{x}+{y}" for x in range(10, 100) for y in range(10, 100)}
        assert len(ids["train"]) + len(ids["heldout"]) == 8100
        assert {*ids["train"], *ids["heldout"]} == everything
        assert 0.08 < len(ids["heldout"]) / 8100 < 0.12
        assert heldout is None or heldout == set(ids["heldout"])  # not a matter of the seed
        heldout = set(ids["heldout"])


def test_tasks_are_a_function_of_the_seed_and_never_change():
    first = [t.id for t in make(0).tasks("train")[:3]]
    assert first == ["95+50", "29+85", "21+95"]  # the same in every process and Python version
    assert [t.id for t in make(0).tasks("train")[:3]] == first
    assert [t.id for t in make(1).tasks("train")[:3]] != first


def test_tasks_are_lazy_indexable_and_limited():
    tasks = make(train=100, heldout=7).tasks("train")
    assert len(tasks) == 100
    assert tasks[-1] == tasks[99]
    assert tasks[2:4] == [tasks[2], tasks[3]]
    assert len(make(heldout=7).tasks("heldout")) == 7
    with pytest.raises(IndexError):
        tasks[100]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 600), seed=st.integers(0, 2**63))
def test_shuffled_visits_every_number_once(size, seed):
    assert sorted(shuffled(size, seed)) == list(range(size))


def test_chat_prompt_is_a_users_message():
    task = make(chat=True, prompt="What is {problem}?", reverse=False).tasks("train")[0]
    assert task.prompt == ({"role": "user", "content": f"What is {task.id}?"},)


def test_final_takes_the_last_number_of_a_sentence():
    environment = make(final=True, reverse=False)
    task = next(t for t in environment.tasks("train") if t.answer == "92")
    assert score(environment, task, "the sum is 92.") == 1.0
    assert score(environment, task, "92 or 93") == 0.0
    assert score(make(reverse=False), task, "the sum is 92.") == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so -5", "-5"),
        ("10-5", "5"),
        ("x-5", "5"),
        ("(-5)", "-5"),
        ("none", None),
        ("", None),
        ("٣", None),
    ],
)
def test_last_number_tells_a_sign_from_a_subtraction(text, number):
    assert _last_number(text) == number


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"digits": 0}, "digits is 0; 1 to 18 is wanted"),
        (
            {"operations": ("+", "/")},
            r"operations is \['\+', '/'\]; valid, each at most once: \+, -, \*",
        ),
        ({"operations": ()}, r"operations is \[\]"),
        ({"heldout_fraction": 1.0}, "heldout_fraction is 1.0; at least 0 and below 1"),
        ({"train": -1}, "train is -1 and heldout 256; neither may be negative"),
        ({"prompt": "sum?"}, r"prompt is 'sum\?', which lacks \{problem\}"),
    ],
)
def test_configuration_that_makes_no_sense_is_refused(config, words):
    with pytest.raises(ConfigError, match=f"environment arithmetic: {words}"):
        make(**config)


@pytest.mark.parametrize("mistakes", [0.0, 0.5, 1.0])
def test_mistakes_change_one_digit_of_that_share_of_solutions_and_no_answer(mistakes):
    tasks = make(mistakes=mistakes).tasks("train")
    right = make().tasks("train")
    wrong = 0
    for task, other in zip(tasks[:2000], right[:2000], strict=True):
        assert task.answer == other.answer == other.solution
        assert len(task.solution) == len(task.answer)
        differing = sum(a != b for a, b in zip(task.solution, task.answer, strict=True))
        assert differing <= 1
        wrong += differing
    assert wrong / 2000 == pytest.approx(mistakes, abs=0.05)
    assert [t.solution for t in make(mistakes=mistakes).tasks("train")[:50]] == [
        t.solution for t in tasks[:50]
    ]
