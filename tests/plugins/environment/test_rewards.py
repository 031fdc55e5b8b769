"""Built-in rewards, and the process that runs the slow ones."""

import asyncio
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles import EpisodeError, Task
from miles_plugins.environment.grading import Grader
from miles_plugins.environment.rewards import exact, last_number, math_answer, numeric, regex


def task(answer):
    return Task(id="t", prompt="", answer=answer)


@pytest.mark.parametrize(
    ("text", "worth"), [("yes", 1.0), (" yes\n", 1.0), ("Yes", 0.0), ("", 0.0)]
)
def test_exact_compares_stripped_text(text, worth):
    assert exact(text, task("yes")) == worth


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 1,200.", 1200),
        ("x=3/4", Fraction(3, 4)),
        ("-5", -5),
        ("3-5", 5),
        ("a1", None),
        ("1.5e3 apples", 1500),
        ("7.", 7),
        ("v2.0", None),
        ("$5", 5),
        ("1/0", None),
        ("e5 . - + /", None),
        ("9" * 5000, None),
    ],
)
def test_last_number_reads_what_people_write(text, number):
    assert last_number(text) == number


@given(st.floats(-1e12, 1e12))
def test_numeric_takes_any_spelling_of_a_number(value):
    assert numeric(f"so {value!r}", task(value)) == 1.0
    assert numeric(f"{value:e}".replace("e", " e"), task(value + abs(value) + 1)) == 0.0


def test_numeric_survives_numbers_beyond_every_float():
    assert numeric("1e999", task("1e998")) == 0.0
    assert numeric("1e999", task("10e998")) == 1.0
    assert numeric("nothing", task(1)) == 0.0


@pytest.mark.parametrize(
    ("text", "pattern", "worth"),
    [
        ("answer: 4, no, answer: 5", r"answer: (\d+)", 1.0),
        ("answer: 5, no, answer: 4", r"answer: (\d+)", 0.0),
        ("5", r"answer: (\d+)", 0.0),
        ("it is 5", r"\d", 1.0),
        ("x5y", "", 1.0),
        ("x4y", "", 0.0),
    ],
)
def test_regex_compares_the_last_match(text, pattern, worth):
    assert regex(text, task("5"), pattern) == worth


@pytest.mark.parametrize(
    ("text", "answer", "worth"),
    [
        ("so \\boxed{0.5}", "1/2", 1.0),
        ("The answer is $\\frac{2}{4}$", "\\frac{1}{2}", 1.0),
        ("$1+x^2$", "x^2+1", 1.0),
        ("4", "$3$", 0.0),
        ("", "3", 0.0),
    ],
)
def test_math_answer_compares_as_mathematics(text, answer, worth):
    pytest.importorskip("math_verify")
    assert math_answer(text, task(answer)) == worth


def test_grader_kills_what_runs_too_long_and_goes_on():
    grader = Grader(environment="dataset", deadline_s=0.5)

    async def run():
        slow = await grader("regex", "a" * 40 + "b", task("x"), pattern="(a+)+$")
        start = time.monotonic()
        ticks = 0
        asking = asyncio.ensure_future(grader("regex", "a" * 40 + "b", task("x"), pattern="(a+)+$"))
        while not asking.done():  # the event loop is free meanwhile
            await asyncio.sleep(0.01)
            ticks += 1
        assert await asking == slow
        assert ticks > 10
        assert time.monotonic() - start < 30
        return slow, await grader("regex", "aab", task("aa"), pattern="(a+)")

    slow, quick = asyncio.run(run())
    assert slow == (0.0, {"reward_killed": 1.0})
    assert quick == (1.0, {"reward_killed": 0.0})


def test_grader_serves_several_event_loops_and_many_at_once():
    grader = Grader(environment="dataset", deadline_s=30, processes=2)

    async def run():
        asks = [grader("regex", f"<{i}>", task(str(i)), pattern=r"<(\d+)>") for i in range(20)]
        return await asyncio.gather(*asks)

    for _ in range(2):
        assert {value for value, _ in asyncio.run(run())} == {1.0}


def test_grader_ends_its_processes_when_it_is_forgotten():
    grader = Grader(environment="dataset", deadline_s=30)
    asyncio.run(grader("regex", "a", task("a")))
    (child,) = grader._children
    assert child.poll() is None
    del grader
    assert child.wait(timeout=10) is not None


def test_grader_that_cannot_start_a_process_ends_the_attempt_alone(no_descriptors):
    grader = Grader(environment="dataset", deadline_s=30)

    async def run():
        with no_descriptors():
            await grader("regex", "a", task("a"))

    with pytest.raises(
        EpisodeError, match=r"'dataset': cannot start a grading process: .*Too many"
    ):
        asyncio.run(run())
    assert asyncio.run(grader("regex", "aab", task("aa"), pattern="(a+)"))[0] == 1.0


def test_grader_names_environment_and_reward_when_it_raises():
    grader = Grader(environment="dataset", deadline_s=30)
    with pytest.raises(
        EpisodeError,
        match=r"^environment 'dataset': reward 'regex' raised (Pattern)?[Ee]rror: missing \)",
    ):
        asyncio.run(grader("regex", "a", task("(a")))
