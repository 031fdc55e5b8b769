"""Mismatch: which tokens are compared, the numbers, and the budget."""

from __future__ import annotations

import numpy as np
import pytest

from miles import Tokens, TrainerError
from miles.learn.mismatch import Limits, comparable, enforce, measure


def tokens(versions, logprobs, **more):
    versions = np.array(versions, np.int32)
    sampled = versions >= 0
    return Tokens(
        tokens=np.zeros(len(versions), np.int32),
        lengths=np.array([len(versions)], np.int32),
        sampled=sampled,
        trainable=sampled,
        versions=versions,
        logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        **more,
    )


def everything(t):
    return np.ones(len(t.tokens), np.bool_)


def test_measure_separates_numerics_from_lag():
    t = tokens([-1, 4, 4, 3, 1], [0, -1.0, -2.0, -1.0, -1.0])
    current = np.array([-9, -1.25, -1.5, -0.5, -2.0], np.float32)
    found = measure(t, current, everything(t), 4)
    k3 = lambda d: np.exp(d) - 1 - d  # noqa: E731
    assert found == pytest.approx(
        {
            "mismatch/logprob_abs_mean": 0.375,
            "mismatch/logprob_abs_max": 0.5,
            "mismatch/k3": (k3(-0.25) + k3(0.5)) / 2,
            "mismatch/tokens": 2.0,
            "off_policy/lag_1/logprob_abs_mean": 0.5,
            "off_policy/lag_1/logprob_abs_max": 0.5,
            "off_policy/lag_1/k3": k3(0.5),
            "off_policy/lag_1/tokens": 1.0,
            "off_policy/lag_3/logprob_abs_mean": 1.0,
            "off_policy/lag_3/logprob_abs_max": 1.0,
            "off_policy/lag_3/k3": k3(-1.0),
            "off_policy/lag_3/tokens": 1.0,
        }
    )
    assert comparable(t, 4).tolist() == [False, True, True, False, False]


def test_measure_without_tokens_of_this_version_gives_no_number():
    old = tokens([-1, 0, 0], [0, -1, -1])
    found = measure(old, np.zeros(3, np.float32), everything(old), 1)
    assert found["mismatch/unmeasured"] == 1.0
    assert not [name for name in found if name.startswith("mismatch/log")]
    demonstrated = tokens([0, 0], None)
    found = measure(demonstrated, np.zeros(2, np.float32), everything(demonstrated), 0)
    assert found == {"mismatch/unmeasured": 1.0}


def test_measure_compares_full_with_full_where_sampling_was_cut():
    t = tokens([0, 0], [-1.0, -2.0], truncated_logprobs=np.array([-0.5, -1.5], np.float32))
    found = measure(t, np.array([-1.0, -2.0], np.float32), everything(t), 0)
    assert found["mismatch/logprob_abs_max"] == 0.0


def test_measure_looks_only_at_what_was_measured():
    t = tokens([0, 0], [-1.0, -2.0])
    found = measure(t, np.array([0.0, -2.0], np.float32), np.array([False, True]), 0)
    assert found["mismatch/tokens"] == 1.0
    assert found["mismatch/logprob_abs_max"] == 0.0


OVER = {
    "mismatch/logprob_abs_mean": 0.01,
    "mismatch/logprob_abs_max": 0.5,
    "mismatch/k3": 0.1,
    "mismatch/tokens": 12.0,
}


def test_enforce_warns_in_words_with_the_numbers():
    said = enforce(OVER, Limits(max=0.1, mean=0.02))
    assert said == (
        "largest log-prob difference of trainer and rollout is 0.5 nats, budget 0.1 (12 tokens)",
    )
    assert enforce(OVER, Limits(max=0.6, mean=0.02)) == ()
    assert enforce({"mismatch/unmeasured": 1.0}, Limits(max=0, mean=0, action="fail")) == ()


def test_enforce_fail_raises_and_a_nan_is_over_every_budget():
    with pytest.raises(TrainerError, match=r"mean log-prob difference .* 0.01 nats, budget 0.001"):
        enforce(OVER, Limits(max=1, mean=0.001, action="fail"))
    nan = {**OVER, "mismatch/logprob_abs_max": float("nan")}
    with pytest.raises(TrainerError, match="is nan nats"):
        enforce(nan, Limits(max=1, mean=1, action="fail"))
