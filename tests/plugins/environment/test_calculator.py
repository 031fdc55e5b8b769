"""The calculator's problems: right, disjoint, seeded, and taught as carelessly as asked."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import ConfigError
from miles_plugins.environment.calculator import Calculator, calculator_tasks


def tasks(seed=0, split="train", **config):
    return calculator_tasks(Calculator(**config), seed=seed, split=split, where="here")


def value(problem):
    first, *rest = problem.replace(", ", "\n").split("\n")
    total = eval(first)
    for step in rest:
        total = eval(f"{total}{step}" if step[0] != "*" else f"({total}){step}")
    return total


@settings(max_examples=25, deadline=None)
@given(
    digits=st.integers(1, 6),
    operations=st.lists(st.sampled_from("+-*"), min_size=1, unique=True),
    calls=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_answers_are_right_and_demonstrations_lead_to_them(digits, operations, calls, seed):
    made = tasks(seed, digits=digits, operations=tuple(operations), calls=tuple(calls), train=12)
    for task in made:
        assert task.answer == str(value(task.id))
        assert task.prompt == ({"role": "user", "content": task.id},)
        said = [m for m in task.solution if m["role"] == "assistant"]
        assert len(said) - 1 in calls
        assert said[-1]["content"] == task.answer
        for call, result in zip(task.solution[::2], task.solution[1::2], strict=False):
            code = json.loads(call["tool_calls"][0]["function"]["arguments"])["code"]
            assert str(eval(code)) == result["content"]
            assert result["tool_call_id"] == call["tool_calls"][0]["id"]


def test_every_number_of_calls_has_its_share():
    made = tasks(calls=(1, 3), train=200)
    assert len(made) == 200
    assert sum(len(t.solution) == 3 for t in made) == pytest.approx(100, abs=25)


def test_splits_are_disjoint_under_every_seed_and_together_everything():
    small = {"digits": 1, "operations": ("+", "-"), "calls": (1,), "train": 999, "heldout": 999}
    heldout = None
    for seed in (0, 1):
        ids = {s: [t.id for t in tasks(seed, s, **small)] for s in ("train", "heldout")}
        assert len(ids["train"]) + len(ids["heldout"]) == 9 * 9 * 2
        assert {*ids["train"], *ids["heldout"]} == {
            f"{x}{sign}{y}" for x in range(1, 10) for y in range(1, 10) for sign in "+-"
        }
        assert heldout is None or heldout == set(ids["heldout"])
        heldout = set(ids["heldout"])


def test_tasks_are_a_function_of_the_seed():
    first = tasks(0, operations=("+", "-", "*"), calls=(1, 2, 3))[:3]
    assert [t.id for t in first] == ["22*73", "46+29, *62", "83*89, *49, *58"]
    assert tasks(0)[:5] == tasks(0)[:5]
    assert [t.id for t in tasks(1)[:3]] != [t.id for t in tasks(0)[:3]]


@pytest.mark.parametrize("mistakes", [0.0, 0.5, 1.0])
def test_careless_teacher_is_wrong_that_often_and_answers_never(mistakes):
    careless, right = tasks(mistakes=mistakes), tasks()
    wrong = 0
    for task, other in zip(careless[:1500], right[:1500], strict=True):
        assert task.answer == other.answer == other.solution[-1]["content"]
        wrong += task.solution[-1]["content"] != task.answer
        assert (len(task.solution) == 1) == (task.solution[-1]["content"] != task.answer)
        for call, result in zip(task.solution[::2], task.solution[1::2], strict=False):
            code = json.loads(call["tool_calls"][0]["function"]["arguments"])["code"]
            assert str(eval(code)) == result["content"]  # what a tool says is never wrong
    assert wrong / 1500 == pytest.approx(mistakes, abs=0.05)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"digits": 0}, "digits is 0; 1 to 6 is wanted"),
        ({"operations": ("/",)}, r"operations is \['/'\]; valid"),
        ({"calls": (0,)}, r"calls is \[0\]; numbers from 1 to 8"),
        ({"mistakes": 2.0}, "mistakes is 2.0; 0 to 1"),
        ({"train": -1}, "train is -1 and heldout 256"),
        ({"prompt": "sum"}, "prompt is 'sum', which lacks {problem}"),
    ],
)
def test_configuration_that_makes_no_sense_is_refused(config, words):
    with pytest.raises(ConfigError, match=f"here: calculator.{words}"):
        tasks(**config)
