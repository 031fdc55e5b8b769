"""Several evaluation sets, what each is told, and what is counted of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles import ConfigError, Context, Group, Sampling, Score, Settings, Skipped, Task
from miles.check import check
from miles.config import compose
from miles.testing import FakeEnvironment, make_group
from miles_plugins.evaluator.fleet import Fleet
from miles_plugins.evaluator.intervals import pass_at_k
from miles_plugins.evaluator.sets import Set
from miles_plugins.evaluator.shared import Shared


def context(**own: FakeEnvironment) -> Context:
    environment = FakeEnvironment(FakeEnvironment.Config(heldout=10))
    settings = Settings(max_new_tokens=7)
    return Context(
        directory=Path(), seed=3, environment=environment, settings=settings, environments=own
    )


class Attempts:
    """Remembers what it was asked, and gives every task the rewards of `by_task`."""

    directory = None

    def __init__(self, *by_task: tuple[float, ...]) -> None:
        self.by_task = by_task
        self.asked: list[dict[str, Any]] = []

    async def __call__(
        self, task: Task, *, samples: int, sampling: Sampling, seed: int, of: str = ""
    ) -> Group:
        own = self.by_task[len(self.asked) % len(self.by_task)]
        self.asked.append({"of": of, "samples": samples, "sampling": sampling, "task": task})
        return make_group(0, rewards=own[:samples], versions=(4,), task=task)


def test_sets_are_played_each_in_its_own_way() -> None:
    other = FakeEnvironment(FakeEnvironment.Config(heldout=3, train=5))
    config = Shared.Config(
        tasks=4,
        temperature=0.5,
        concurrency=1,
        sets={
            "plain": Set(),
            "many": Set(samples=2, temperature=1.0, top_p=0.9, max_new_tokens=3),
            "other": Set(environment={"name": "fake"}, tasks=0, split="train"),
        },
    )
    assert Shared.environments(config) == {"other": {"name": "fake"}}
    shared, attempts = Shared(config, context(other=other)), Attempts((1.0, 0.0))
    results = asyncio.run(shared.evaluate(4, attempts))
    assert [(r.set, r.samples) for r in results if isinstance(r, Score)] == [
        ("plain", 4), ("many", 8), ("other", 5)
    ]  # fmt: skip
    assert [a["of"] for a in attempts.asked] == ["plain"] * 4 + ["many"] * 4 + ["other"] * 5
    plain, many = attempts.asked[0], attempts.asked[4]
    assert plain["sampling"] == Sampling(max_new_tokens=7, temperature=0.5)
    assert many["sampling"] == Sampling(max_new_tokens=3, temperature=1.0, top_p=0.9)
    assert {a["task"].id for a in attempts.asked[8:]} == {t.id for t in other.tasks("train")}


def test_sets_report_pass_at_k_over_tasks() -> None:
    config = Shared.Config(samples=4, tasks=2, pass_k=(1, 2, 4), concurrency=1)
    by_task = ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0))
    (result,) = asyncio.run(Shared(config, context()).evaluate(4, Attempts(*by_task)))
    assert isinstance(result, Score)
    for k in (1, 2, 4):
        wanted = np.mean([pass_at_k(4, 1, k), pass_at_k(4, 2, k)])
        assert result.metrics[f"pass_{k}"] == pytest.approx(wanted)
        low, high = result.metrics[f"pass_{k}_low"], result.metrics[f"pass_{k}_high"]
        assert low <= wanted <= high
    assert result.metrics["pass_1"] == pytest.approx(result.score)
    assert result.metrics["low"] <= result.score <= result.metrics["high"]


def test_sets_count_a_pass_from_the_reward_that_was_chosen() -> None:
    config = Shared.Config(samples=2, tasks=1, pass_k=(1,), passing=0.4)
    (result,) = asyncio.run(Shared(config, context()).evaluate(4, Attempts((0.5, 0.3))))
    assert isinstance(result, Score)
    assert result.metrics["pass_1"] == 0.5


def test_a_set_that_raises_leaves_the_others_alone() -> None:
    class Broken(FakeEnvironment):
        def tasks(self, split: Any) -> Any:
            raise KeyError("no such file")

    config = Shared.Config(sets={"bad": Set(environment={"name": "fake"}), "good": Set()}, tasks=2)
    shared = Shared(config, context(bad=Broken(FakeEnvironment.Config())))
    bad, good = asyncio.run(shared.evaluate(4, Attempts((1.0,))))
    assert bad == Skipped(set="bad", reason="KeyError: 'no such file'")
    assert isinstance(good, Score)


def test_a_bug_of_an_environment_is_logged_once_and_not_per_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The console had fifteen nested tracebacks of one `NameError`."""
    together = asyncio.Barrier(8)

    async def attempt(task: Task, **how: Any) -> Group:
        await together.wait()
        raise NameError("name 'txt' is not defined")

    (result,) = asyncio.run(Shared(Shared.Config(tasks=8), context()).evaluate(4, attempt))
    assert isinstance(result, Skipped)
    assert result.reason == "NameError: name 'txt' is not defined"
    assert caplog.text.count("Traceback (most recent call last)") == 1
    assert "ExceptionGroup" not in caplog.text


def test_sets_share_the_time_of_an_evaluation() -> None:
    class Slow(Attempts):
        async def __call__(self, task: Task, **how: Any) -> Group:
            await asyncio.sleep(0.15)
            return await super().__call__(task, **how)

    config = Shared.Config(sets={"a": Set(), "b": Set()}, tasks=1, timeout_s=0.2)
    first, second = asyncio.run(Shared(config, context()).evaluate(4, Slow((1.0,))))
    assert isinstance(first, Score)
    reason = "timeout: 0 of 1 tasks were done after 0.2 s"
    assert second == Skipped(set="b", reason=reason)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"sets": {"hard": Set(pass_k=(4,), samples=2)}},
            "evaluator shared: sets.hard.pass_k: 4 is not from 1 to samples (2): pass@k needs k "
            "attempts at each task",
        ),
        (
            {"sets": {"x": Set(environment={"tasks": 3})}},
            "evaluator shared: sets.x.environment: name is missing; it says which environment "
            "plays",
        ),
        ({"sets": {"a/b": Set()}}, "evaluator shared: sets: 'a/b' is empty or contains '/'"),
        ({"top_p": 0.0}, "evaluator shared: top_p: 0.0 is not in (0, 1]"),
    ],
)
def test_sets_refuse_what_cannot_be_played(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Shared(Shared.Config(**keys), context())
    assert str(caught.value) == said


def test_fleet_refuses_to_have_no_engine() -> None:
    with pytest.raises(ConfigError, match="evaluator fleet: workers: 0 is below 1"):
        Fleet(Fleet.Config(workers=0), context())


def faults_of(*overrides: str) -> str:
    plan = compose(overrides)
    return "\n".join(check(plan).faults)


def test_check_tells_what_is_wrong_with_sets_before_anything_starts() -> None:
    text = faults_of("evaluator.sets.a.environment.name=arithmetik")
    assert "there is no environment 'arithmetik'" in text and "did you mean 'arithmetic'" in text
    text = faults_of("evaluator.sets.a={environment: {name: arithmetic, digts: 1}}")
    assert "environment 'arithmetic': digts: there is no such key" in text
    text = faults_of("evaluator.sets.a={taks: 1}")
    assert "evaluator 'shared': sets.a.taks: there is no such key" in text
    assert not faults_of("evaluator=fleet", "evaluator.sets.a={environment: {name: arithmetic}}")
    assert "a value is required" in faults_of("evaluator=external")
