"""A step's metrics against counts made by hand, and against the table of names."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles import Batch, Drop, Group, RunError, Sample, Span, Task, Trajectory, Update, flatten
from miles.buffer import Buffer, Lease
from miles.metrics import faults
from miles.records.measure import Measure


def sample(prompt: int, new: int, version: int) -> Sample:
    size = prompt + new
    sampled = np.arange(size) >= prompt
    return Sample(
        tokens=np.zeros(size, np.int32),
        sampled=sampled,
        trainable=sampled,
        logprobs=np.zeros(size, np.float32),
        spans=(Span(start=prompt, stop=size, version=version),),
    )


def group(number: int, rewards: list[float], version: int) -> Group:
    trajectories = tuple(
        Trajectory(
            id=f"g{number}.{i}", samples=(sample(3, 2 + i, version),), reward=r,
            metrics={"turns": float(i)} if i else {},
        )
        for i, r in enumerate(rewards)
    )  # fmt: skip
    return Group(id=number, task=Task(id=str(number), prompt="x"), trajectories=trajectories)


def test_measure_counts_what_was_there() -> None:
    measure = Measure()
    buffer = Buffer(groups_per_step=2, samples_per_group=2, max_lag=2, version=5)
    groups = [group(0, [0.0, 1.0], 4), group(1, [1.0, 1.0], 5)]
    for n in range(3):
        buffer.start(Lease(id=n, task=groups[0].task))
    for g in groups:
        buffer.finish(g, None)
    buffer.finish(group(2, [0.0, 0.0], 5), Drop(reason="zero_variance"))
    with measure.timing("wait"):
        assert asyncio.run(buffer.take(2)) == groups
        time.sleep(0.02)
    measure.engine_health(
        {"busy_s": 0.01, "tokens": 40.0, "prompt_tokens": 20.0, "cached_tokens": 5.0}
    )
    samples = [s for g in groups for s in g.samples]
    batch = Batch(tokens=flatten(samples), terms=(), metrics={"advantage/std": 1.0})
    update = Update(version=6, metrics={"grad_norm": 2.0})
    buffer.published(4)  # publish_every is 3, say
    got = measure.step(
        step=6, stage="grpo", groups=groups, batch=batch, update=update, buffer=buffer
    )
    assert (got["step"], got["version"]) == (6, 4)
    assert got["reward/mean"] == pytest.approx(0.75)
    assert got["reward/std"] == pytest.approx(np.std([0, 1, 1, 1]))
    assert (got["groups/started"], got["groups/trained"]) == (3, 2)
    assert got["groups/dropped/zero_variance"] == 1
    assert (got["staleness/mean"], got["staleness/max"]) == (0.5, 1)
    assert got["tokens/sampled"] == got["tokens/trained"] == 2 * (2 + 3)
    assert got["length/mean"] == pytest.approx((5 + 6) / 2)
    assert got["session/turns"] == 1.0
    assert got["env/turns"] == 1.0  # averaged over those that report it
    assert got["grad_norm"] == 2.0
    assert 0.02 <= got["time/wait_s"] <= got["time/step_s"]
    parts = sum(got[f"time/{k}_s"] for k in ("wait", "train", "publish", "eval_wait", "overhead"))
    assert parts == pytest.approx(got["time/step_s"])
    assert got["engine/tokens_per_s"] == pytest.approx(40.0 / got["time/step_s"])


def test_measure_step_counts_only_what_is_new() -> None:
    measure = Measure()
    buffer = Buffer(groups_per_step=1, samples_per_group=1, max_lag=5)
    one = group(0, [1.0], 0)
    batch = Batch(tokens=flatten(one.samples), terms=())
    for n in range(2):
        buffer.start(Lease(id=n, task=one.task))
        buffer.finish(group(n, [0.0], 0), Drop(reason="length"))
        got = measure.step(
            step=n + 1, stage="s", groups=[one], batch=batch, update=Update(version=n + 1),
            buffer=buffer,
        )  # fmt: skip
        assert got["groups/started"] == 1
        assert got["groups/dropped/length"] == 1


def test_measure_engines_idle_is_a_mean_and_survives_one_that_starts_again() -> None:
    measure = Measure()
    measure.engine_health({"busy_s": 90.0, "tokens": 500.0, "engines": 2})
    measure._engine(100.0)
    measure.engine_health({"busy_s": 102.0, "tokens": 700.0, "engines": 2})
    assert measure._engine(10.0) == {"engine/idle_s": 4.0, "engine/tokens_per_s": 20.0}
    measure.engine_health({"busy_s": 60.0, "tokens": 350.0, "engines": 2})  # one began anew
    assert measure._engine(10.0) == {"engine/idle_s": 10.0, "engine/tokens_per_s": 0.0}


def taken(buffer: Buffer, count: int) -> list[Group]:
    return asyncio.run(buffer.take(count))


def stepped(measure: Measure, buffer: Buffer, groups: list[Group], version: int) -> dict:
    """The metrics of a step on these groups, which makes `version`."""
    buffer.stepped(version, groups)
    measure.ended(buffer.ended)
    buffer.ended.clear()
    samples = [s for g in groups for s in g.samples]
    got = measure.step(
        step=version,
        stage="s",
        groups=groups,
        batch=Batch(tokens=flatten(samples), terms=()),
        update=Update(version=version),
        buffer=buffer,
    )
    assert not faults(got)
    return got


def test_measure_tells_how_old_what_was_trained_and_what_waits_is() -> None:
    measure = Measure()
    buffer = Buffer(groups_per_step=2, samples_per_group=2, max_lag=3, version=5, capacity=9)
    groups = [group(0, [0, 1], 3), group(1, [0, 1], 5), group(2, [0, 1], 4), group(3, [0, 1], 5)]
    for one in groups:
        buffer.start(Lease(id=one.id, task=one.task))
    for one in groups:
        buffer.finish(one, None)
    time.sleep(0.02)
    got = stepped(measure, buffer, taken(buffer, 2), 6)
    assert (got["staleness/lag_0"], got["staleness/lag_2"]) == (1, 1)
    assert "staleness/lag_1" not in got
    assert (got["tokens/lag_0"], got["tokens/lag_2"]) == (5, 5)  # 2 + 3 of each group
    assert got["tokens/trained"] == 10
    assert (got["staleness/waiting_mean"], got["staleness/waiting_max"]) == (1.5, 2)
    assert (got["staleness/waiting_lag_1"], got["staleness/waiting_lag_2"]) == (1, 1)
    assert 0.02 <= got["buffer/age_mean_s"] <= got["buffer/age_max_s"] < 1
    got = stepped(measure, buffer, taken(buffer, 2), 7)
    assert (got["staleness/lag_1"], got["staleness/lag_2"]) == (1, 1)
    assert (got["buffer/age_max_s"], got["staleness/waiting_max"]) == (0, 0)


def test_measure_counts_tokens_by_the_version_of_each_span() -> None:
    measure, buffer = (
        Measure(),
        Buffer(groups_per_step=1, samples_per_group=1, max_lag=2, version=4),
    )
    one = sample(3, 6, 4)
    two = replace(one, spans=(Span(start=3, stop=5, version=3), Span(start=5, stop=9, version=4)))
    mixed = Group(
        id=0,
        task=Task(id="0", prompt="x"),
        trajectories=(Trajectory(id="g0.0", samples=(two,), reward=1.0),),
    )
    buffer.start(Lease(id=0, task=mixed.task))
    buffer.finish(mixed, None)
    got = stepped(measure, buffer, taken(buffer, 1), 5)
    assert (got["tokens/lag_1"], got["tokens/lag_0"]) == (2, 4)
    assert got["staleness/max"] == 1


def test_measure_shows_that_short_rollouts_are_preferred() -> None:
    measure, buffer = Measure(), Buffer(groups_per_step=1, samples_per_group=1)

    def of(number: int, length: int, finish: str) -> Group:
        own = replace(sample(3, length, 0), finish=finish)
        trajectory = Trajectory(id=f"g{number}.0", samples=(own,), reward=1.0)
        return Group(id=number, task=Task(id="0", prompt="x"), trajectories=(trajectory,))

    short, long = of(0, 4, "stop"), of(1, 12, "length")
    lost = Trajectory(id="g2.0", samples=(), failure=Drop(reason="timeout"))
    for one in (short, long, replace(short, id=2, trajectories=(lost,))):
        buffer.start(Lease(id=one.id, task=one.task))
        measure.came_back(one)
        drop = None if one is short else Drop(reason="late")
        buffer.finish(one, drop)
    got = stepped(measure, buffer, taken(buffer, 1), 1)
    assert (got["length/trained"], got["length/returned"]) == (4, 8)
    assert got["length/bias"] == pytest.approx(-0.5)
    assert got["samples/truncated"] == 0.0
    buffer.start(Lease(id=3, task=long.task))
    buffer.finish(again := replace(long, id=3), None)
    measure.came_back(again)
    buffer.published(1)
    buffer.max_lag = 1
    got = stepped(measure, buffer, taken(buffer, 1), 2)
    assert (got["length/trained"], got["samples/truncated"]) == (8, 1.0)


def test_measure_goes_on_with_the_lengths_of_the_run_that_is_resumed() -> None:
    """They began anew, and with them the bias that is told."""
    before, after = Measure(), Measure()
    before.came_back(group(0, [1.0, 0.0], 0))
    before.came_back(group(1, [1.0], 0))
    before.ended([(0, "zero_variance"), (1, "trained"), (2, "run_ended")])
    after.go_on(json.loads(json.dumps(before.lengths())))
    assert after.lengths() == before.lengths() == {"trained": [2, 1], "returned": [7, 3]}


@given(
    st.lists(st.sampled_from(["trained", "late", "buffered", "flying"]), max_size=12),
    st.integers(0, 12),
)
def test_measure_counts_a_group_once_whenever_the_run_is_resumed(
    fates: list[str], resumed: int
) -> None:
    """Groups that were buffered at a checkpoint came back in both the earlier and the later run,
    and were counted in each."""
    groups = [group(n, [1.0] * (1 + n % 3), 0) for n in range(len(fates))]
    calm, before, after = Measure(), Measure(), Measure()
    for one in groups:
        calm.came_back(one)
        calm.ended([(one.id, "trained" if fates[one.id] == "trained" else "late")])
    for one in groups[:resumed]:
        if fates[one.id] != "flying":
            before.came_back(one)
        if fates[one.id] in ("trained", "late"):
            before.ended([(one.id, fates[one.id])])
    after.go_on(before.lengths())
    for one in groups:
        if one.id >= resumed or fates[one.id] in ("flying", "buffered"):  # its lease was open
            after.came_back(one)
            after.ended([(one.id, "trained" if fates[one.id] == "trained" else "late")])
    assert after.lengths() == calm.lengths()


def test_measure_tells_only_what_was_retried_since_a_resume() -> None:
    """The first step after it told again of all that was retried before."""
    measure, buffer = Measure(), Buffer(groups_per_step=1, samples_per_group=2, max_retries=3)
    buffer.retried["t"] = 2  # as it stood in the checkpoint
    assert measure._fates(1, buffer)["groups/retried"] == 0
    buffer._retry(Task(id="t", prompt="x"))
    assert measure._fates(1, buffer)["groups/retried"] == 1


def test_measure_says_that_there_is_no_signal_after_10_steps_20_and_40() -> None:
    measure, told = Measure(), {}
    for step in range(1, 100):
        rewards = [0.0, 1.0] if step == 50 else [0.0, 0.0]
        if said := measure.no_signal([group(step, rewards, 0), group(step, [1.0, 1.0], 0)]):
            told[step] = said
    assert list(told) == [10, 20, 40, 60, 70, 90]
    ((text),) = told[20]
    assert "in 20 steps every group's attempts had equal rewards (zero variance 100 %" in text
    assert "0% of the attempts were truncated" in text
    single = [measure.no_signal([group(step, [0.0], 0)]) for step in range(40)]
    assert not any(single)  # nothing to compare


@pytest.mark.parametrize("seed", range(8))
def test_measure_accounts_add_up_at_every_step(seed: int) -> None:
    """Whatever becomes of groups: what was started is trained, dropped, in flight or waiting."""
    asyncio.run(_random_schedule(seed))


async def _random_schedule(seed: int) -> None:
    dice = random.Random(seed)
    buffer = Buffer(
        groups_per_step=2, samples_per_group=3, max_lag=1, capacity=6, max_retries=2, oversample=9
    )
    measure, totals, flying, version, number = Measure(), Counter(), [], 0, 0
    for _ in range(30):
        while len(buffer.waiting) < 2 or dice.random() < 0.4:
            for _ in range(dice.randrange(3)):
                buffer.start(Lease(id=number, task=Task(id=str(number), prompt="x")))
                flying.append(group(number, [0.0, 1.0, 1.0], version))
                number += 1
            if flying:
                back = flying.pop(dice.randrange(len(flying)))
                reasons = (None, None, "zero_variance", "timeout")
                reason = dice.choice(reasons)
                buffer.finish(back, None if reason is None else Drop(reason=reason))
        try:
            groups = await asyncio.wait_for(buffer.take(2), 0.02)
        except TimeoutError:
            continue  # what was there grew too old
        version += 1
        got = stepped(measure, buffer, groups, version)
        totals.update(
            {
                name: value
                for name, value in got.items()
                if name.split("/")[0] in ("groups", "samples") and name.count("/") > 0
                and name.split("/")[1] in ("started", "trained", "dropped", "retried")
            }
        )  # fmt: skip
        for kind in ("groups", "samples"):
            ended = sum(v for k, v in totals.items() if k.startswith(f"{kind}/dropped/"))
            under_way = got[f"{kind}/in_flight"] + got[f"{kind}/buffered"]
            assert totals[f"{kind}/started"] == totals[f"{kind}/trained"] + ended + under_way
        assert totals["samples/started"] == 3 * totals["groups/started"]
        assert got["samples/running"] == 3 * got["groups/in_flight"]
    assert totals["groups/dropped/stale"] and totals["groups/retried"], "nothing grew too old"


def test_measure_refuses_accounts_that_do_not_add_up() -> None:
    measure, buffer = Measure(), Buffer(groups_per_step=1, samples_per_group=1)
    one = group(0, [1.0], 0)
    buffer.start(Lease(id=0, task=one.task))
    buffer.finish(one, None)
    groups = taken(buffer, 1)
    buffer.accounts.started += 1
    said = r"step 1: the accounts of groups do not add up: Accounts\(started=2, trained=1"
    with pytest.raises(RunError, match=said):
        stepped(measure, buffer, groups, 1)


def test_measure_refuses_a_group_older_than_max_lag() -> None:
    measure, buffer = Measure(), Buffer(groups_per_step=1, samples_per_group=1, max_lag=1)
    one = group(0, [1.0], 0)
    buffer.start(Lease(id=0, task=one.task))
    buffer.finish(one, None)
    groups = taken(buffer, 1)
    buffer.lags = [2]
    said = "step 1: a trained group was 2 versions old; max_lag is 1"
    with pytest.raises(RunError, match=said):
        stepped(measure, buffer, groups, 1)


def test_measure_counts_time_once_where_clocks_are_nested() -> None:
    measure = Measure()
    with measure.timing("publish"):
        time.sleep(0.02)
        with measure.timing("eval_wait"):
            time.sleep(0.05)
    assert 0.02 <= measure._seconds["publish"] < 0.05 <= measure._seconds["eval_wait"]


def test_measure_counts_waiting_for_an_evaluation_apart() -> None:
    async def main() -> list[Group]:
        buffer.start(Lease(id=0, task=one.task))
        buffer.hold()
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, buffer.release)
        loop.call_later(0.06, buffer.finish, one, None)
        with measure.timing("wait"):
            return await buffer.take(1)

    measure, buffer = Measure(), Buffer(groups_per_step=1, samples_per_group=1)
    one = group(0, [1.0], 0)
    measure.evaluated(0)
    measure.evaluated(3)
    got = stepped(measure, buffer, asyncio.run(main()), 1)
    assert got["time/eval_wait_s"] >= 0.04 and 0 <= got["time/wait_s"] < 0.04
    assert got["eval/lag_steps"] == 3


def test_measure_says_how_many_drafted_tokens_were_accepted() -> None:
    measure = Measure()
    measure.engine_health(
        {"engines": 1, "busy_s": 1.0, "tokens": 8, "drafted": 12.0, "accepted": 9.0}
    )
    assert measure._engine(10.0)["engine/accept_rate"] == 0.75
    assert "engine/accept_rate" not in measure._engine(10.0)  # nothing was drafted since
