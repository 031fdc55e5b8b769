"""A step's metrics against counts made by hand, and against the table of names."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from miles import Batch, Drop, Group, Sample, Span, Task, Trajectory, Update, flatten
from miles.buffer import Buffer, Lease
from miles.measure import Measure


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
