"""When a step wants sequences scored by an engine, and what it gets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from miles import Group, Span
from miles.learn import mismatch
from miles.testing import make_group
from miles.workers.probe import probe, wants_probe


def aged(group: Group, version: int) -> Group:
    """The group with every span of this version."""
    trajectories = []
    for one in group.trajectories:
        samples = tuple(
            replace(
                s,
                spans=tuple(Span(start=p.start, stop=p.stop, version=version) for p in s.spans),
            )
            for s in one.samples
        )
        trajectories.append(replace(one, samples=samples))
    return replace(group, trajectories=tuple(trajectories))


GROUPS = [aged(make_group(i, rewards=(1.0, 0.0), lengths=(5, 9)), 3) for i in range(6)]


async def score(tokens: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.full(len(tokens) - 1, -0.5)]).astype(np.float32)


def test_probe_is_wanted_when_too_few_tokens_are_of_the_version() -> None:
    assert wants_probe(GROUPS, 4)
    assert not wants_probe(GROUPS, 3)  # 6 groups of 14 sampled tokens
    assert wants_probe(GROUPS[:1], 3)


def test_probe_is_never_wanted_for_demonstrations() -> None:
    bare = GROUPS[0]
    first = bare.trajectories[0]
    silent = replace(first, samples=tuple(replace(s, logprobs=None) for s in first.samples))
    assert not wants_probe([replace(bare, trajectories=(silent,))], 9)


def test_probe_has_whole_sequences_at_the_version_and_no_loss() -> None:
    made = asyncio.run(probe(GROUPS, 7, score))
    assert made is not None and len(made.lengths) == 4
    firsts = np.cumsum(made.lengths) - made.lengths
    assert not made.trainable.any() and not made.sampled[firsts].any()
    assert np.count_nonzero(made.sampled) == len(made.tokens) - 4
    assert set(made.versions[made.sampled].tolist()) == {7}
    assert made.logprobs is not None and set(made.logprobs[made.sampled].tolist()) == {-0.5}


def test_probe_of_sequences_that_are_too_long_is_none() -> None:
    long = [aged(make_group(0, rewards=(1.0, 0.0), lengths=(3000, 3000)), 1)]
    assert asyncio.run(probe(long, 7, score)) is None


def test_mismatch_is_of_the_probe_and_lag_of_the_step() -> None:
    made = asyncio.run(probe(GROUPS, 7, score))
    assert made is not None
    step = {"off_policy/lag_4/tokens": 9.0, "mismatch/unmeasured": 1.0}
    current = np.where(made.sampled, -0.75, 0.0).astype(np.float32)
    found = mismatch.with_probe(step, made, current, 7)
    assert found["mismatch/logprob_abs_max"] == 0.25 and found["mismatch/probed"] == 1.0
    assert found["off_policy/lag_4/tokens"] == 9.0 and "mismatch/unmeasured" not in found
