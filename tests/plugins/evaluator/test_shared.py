"""The shared evaluator, on the fake environment and engine."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from miles import (
    ConfigError,
    Context,
    Drop,
    EngineError,
    Group,
    RolloutError,
    Sampling,
    Score,
    Settings,
    Skipped,
    Task,
    Trajectory,
)
from miles.loop import episode
from miles.seeds import derive_seed
from miles.session.conversation import SessionConversation
from miles.testing import FakeEngine, FakeEnvironment, FakeTito, make_group
from miles_plugins.evaluator.shared import Shared


def make(heldout: int = 10, **config: object) -> Shared:
    environment = FakeEnvironment(FakeEnvironment.Config(heldout=heldout))
    settings = Settings(max_new_tokens=7)
    context = Context(directory=Path(), seed=3, environment=environment, settings=settings)
    return Shared(Shared.Config(**config), context)  # type: ignore[arg-type]


def evaluate(shared: Shared, attempt: Callable, version: int = 0) -> Score | Skipped:
    (result,) = asyncio.run(shared.evaluate(version, attempt))
    return result


def play_on(engine: FakeEngine, environment: FakeEnvironment) -> Callable:
    """As the loop's attempts, without its accounts."""

    async def attempt(
        task: Task, *, samples: int, sampling: Sampling, seed: int, of: str = ""
    ) -> Group:
        trajectories = []
        for index in range(samples):
            key = f"{task.id}.{index}"
            try:
                conversation = SessionConversation(
                    key=key,
                    tito=FakeTito(),
                    engine=engine,
                    sampling=sampling,
                    seed=derive_seed(seed, index),
                )
                trajectory = await episode(environment.episode(task, seed), conversation, 4)
            except RolloutError as error:
                drop = Drop(reason=error.reason, detail=error.detail)
                trajectory = Trajectory(id=key, samples=(), failure=drop)
            trajectories.append(trajectory)
        return Group(id=-1, task=task, trajectories=tuple(trajectories))

    return attempt


def rewarded(*rewards: float, versions: tuple[int, ...] = (0,)) -> Callable:
    """Attempts worth `rewards`, in the order of the tasks, over and over."""
    calls: list[Task] = []

    async def attempt(
        task: Task, *, samples: int, sampling: Sampling, seed: int, of: str = ""
    ) -> Group:
        calls.append(task)
        start = (len(calls) - 1) * samples
        own = [rewards[(start + i) % len(rewards)] for i in range(samples)]
        return make_group(len(calls), rewards=own, versions=versions, task=task)

    attempt.calls = calls  # type: ignore[attr-defined]
    return attempt


def test_shared_scores_an_engine_on_held_out_tasks() -> None:
    environment = FakeEnvironment(FakeEnvironment.Config(heldout=10))
    engine = FakeEngine(FakeEngine.Config(texts=("aaaa",)))
    result = evaluate(make(), play_on(engine, environment))
    right = np.array([t.answer == "a" for t in environment.tasks("heldout")], float)
    assert isinstance(result, Score)
    assert result.set == "heldout"
    assert result.samples == 10
    assert result.score == pytest.approx(right.mean())
    assert result.metrics["stderr"] == pytest.approx(right.std(ddof=1) / 10**0.5)
    assert result.metrics["length"] == 5  # four letters and the stop id
    assert result.metrics["env/letters"] == 4
    assert {r.sampling.temperature for r in engine.requests} == {0.0}
    assert {r.sampling.max_new_tokens for r in engine.requests} == {7}


def test_shared_chooses_the_same_tasks_and_seeds_every_time() -> None:
    seen = []

    async def attempt(
        task: Task, *, samples: int, sampling: Sampling, seed: int, of: str = ""
    ) -> Group:
        seen.append((task.id, seed))
        return make_group(0, rewards=[1.0] * samples, task=task)

    for shared in (make(heldout=100, tasks=8), make(heldout=100, tasks=8)):
        evaluate(shared, attempt)
        evaluate(shared, attempt)
    assert seen[:8] == seen[8:16] == seen[16:24] == seen[24:]
    assert len(set(seen)) == 8
    assert len({seed for _, seed in seen}) == 8


@pytest.mark.parametrize(("tasks", "taken"), [(0, 10), (4, 4), (99, 10)])
def test_shared_takes_as_many_tasks_as_there_are(tasks: int, taken: int) -> None:
    result = evaluate(make(tasks=tasks), rewarded(1.0, 0.0))
    assert isinstance(result, Score)
    assert (result.samples, result.score) == (taken, 0.5)


def test_shared_takes_the_error_of_the_mean_over_tasks_not_samples() -> None:
    result = evaluate(make(heldout=4, samples=2, concurrency=1), rewarded(1, 1, 0, 0))
    assert isinstance(result, Score)
    assert result.metrics["stderr"] == pytest.approx(np.std([1, 0, 1, 0], ddof=1) / 2)


def test_shared_skips_when_the_environment_holds_nothing_out() -> None:
    result = evaluate(make(heldout=0), rewarded(1.0))
    assert result == Skipped(set="heldout", reason="the environment has no held-out tasks")


@pytest.mark.parametrize("versions", [(5,), (4, 5)])
def test_shared_never_scores_another_version(versions: tuple[int, ...]) -> None:
    result = evaluate(make(), rewarded(1.0, versions=versions), version=4)
    assert isinstance(result, Skipped)
    reason = {
        (5,): "samples of version 5, on average 5, are not of version 4",
        (4, 5): "10 of 10 samples were served by mixed versions: 4, 5",
    }
    assert result.reason == reason[versions]


def test_shared_leaves_a_few_failures_out_and_counts_them() -> None:
    good = rewarded(1.0)

    async def attempt(task: Task, **how: object) -> Group:
        if task.data["index"] == 3:
            raise EngineError("gone")
        return await good(task, **how)

    result = evaluate(make(max_failures=0.1), attempt)
    assert isinstance(result, Score)
    assert (result.score, result.samples, result.metrics["failures"]) == (1.0, 9, 1.0)


def test_shared_skips_when_too_many_attempts_fail() -> None:
    environment = FakeEnvironment(FakeEnvironment.Config(heldout=10, fail_every=5))
    engine = FakeEngine(FakeEngine.Config(texts=("aaaa",)))
    result = evaluate(make(), play_on(engine, environment))
    assert isinstance(result, Skipped)
    assert result.reason == (
        "2 of 10 attempts failed: episode_error 2 (the first: task 'heldout-4': fails on purpose)"
    )


def test_shared_counts_a_reward_that_is_no_number_as_a_failure() -> None:
    result = evaluate(make(), rewarded(float("nan"), 1.0))
    assert isinstance(result, Skipped)
    assert result.reason == "5 of 10 attempts failed: bad_reward 5"


def test_shared_skips_when_everything_fails_whatever_is_allowed() -> None:
    result = evaluate(make(max_failures=1.0), rewarded(float("inf")))
    assert isinstance(result, Skipped)
    assert result.reason == "10 of 10 attempts failed: bad_reward 10"


def test_shared_skips_when_time_runs_out() -> None:
    good = rewarded(1.0)

    async def attempt(task: Task, **how: object) -> Group:
        if task.data["index"] >= 6:
            await asyncio.sleep(30)
        return await good(task, **how)

    result = evaluate(make(timeout_s=0.2), attempt)
    assert result == Skipped(set="heldout", reason="timeout: 6 of 10 tasks were done after 0.2 s")


def test_shared_keeps_to_its_concurrency() -> None:
    running, most = 0, 0
    good = rewarded(1.0)

    async def attempt(task: Task, *, samples: int, **how: object) -> Group:
        nonlocal running, most
        running += samples
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= samples
        return await good(task, samples=samples, **how)

    evaluate(make(samples=2, concurrency=6), attempt)
    assert most == 6


def test_shared_says_what_a_bug_raised() -> None:
    async def attempt(task: Task, **how: object) -> Group:
        raise ZeroDivisionError("of an environment")

    result = evaluate(make(), attempt)
    assert result == Skipped(set="heldout", reason="ZeroDivisionError: of an environment")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tasks": -1}, "evaluator shared: tasks: -1 is below 0"),
        ({"samples": 0}, "evaluator shared: samples: 0 is below 1"),
        ({"timeout_s": 0.0}, "evaluator shared: timeout_s: 0.0 is not above 0"),
        ({"max_new_tokens": 0}, "evaluator shared: max_new_tokens: 0 is below 1"),
        ({"set": "a/b"}, "evaluator shared: set: 'a/b' is empty or contains '/'"),
    ],
)
def test_shared_refuses_useless_settings(config: dict, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**config)
    assert str(caught.value) == words


def test_shared_treats_trajectories_without_samples_of_a_failure_alone() -> None:
    good = rewarded(1.0)

    async def attempt(task: Task, **how: object) -> Group:
        group = await good(task, **how)
        if task.data["index"]:
            return group
        failure = Drop(reason="timeout", detail="ran past 3 s")
        gone = Trajectory(id="x", samples=(), failure=failure)
        return replace(group, trajectories=(gone,))

    result = evaluate(make(), attempt)
    assert isinstance(result, Skipped)
    assert result.reason == "1 of 10 attempts failed: timeout 1 (the first: ran past 3 s)"
