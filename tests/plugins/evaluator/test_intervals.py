"""pass@k against counting every choice, intervals against what defines them."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_plugins.evaluator.intervals import bootstrap, interval, pass_at_k, wilson


def test_pass_at_k_is_the_share_of_choices_with_a_pass() -> None:
    for attempts in range(1, 8):
        for passed in range(attempts + 1):
            outcomes = [True] * passed + [False] * (attempts - passed)
            for k in range(1, attempts + 1):
                chosen = [any(c) for c in combinations(outcomes, k)]
                assert pass_at_k(attempts, passed, k) == pytest.approx(np.mean(chosen))


@given(st.integers(1, 400), st.data())
@settings(max_examples=60, deadline=None)
def test_pass_at_k_is_the_closed_form(attempts: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, attempts))
    k = data.draw(st.integers(1, attempts))
    exact = 1 - comb(attempts - passed, k) / comb(attempts, k)
    assert pass_at_k(attempts, passed, k) == pytest.approx(exact, abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    """Averaged over attempts drawn with chance p, it is 1 - (1 - p)^k; c/n to the power is not."""
    p, attempts, k = 0.3, 10, 4
    chances = [comb(attempts, c) * p**c * (1 - p) ** (attempts - c) for c in range(attempts + 1)]
    mean = sum(w * pass_at_k(attempts, c, k) for c, w in enumerate(chances))
    assert mean == pytest.approx(1 - (1 - p) ** k)
    plug_in = sum(w * (1 - (1 - c / attempts) ** k) for c, w in enumerate(chances))
    assert abs(plug_in - mean) > 0.01


@pytest.mark.parametrize(("attempts", "passed", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0)])
def test_pass_at_k_refuses_what_means_nothing(attempts: int, passed: int, k: int) -> None:
    said = f"pass@{k} of {passed} among {attempts} attempts means nothing"
    with pytest.raises(ValueError, match=said):
        pass_at_k(attempts, passed, k)


@given(st.integers(1, 500), st.data())
@settings(max_examples=60, deadline=None)
def test_wilson_ends_are_where_the_score_test_turns(attempts: int, data: st.DataObject) -> None:
    passed, z = data.draw(st.integers(0, attempts)), 1.959963984540054
    share = passed / attempts
    low, high = wilson(passed, attempts)
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert (share - end) ** 2 == pytest.approx(z * z * end * (1 - end) / attempts)


def test_wilson_gives_the_known_interval() -> None:
    assert wilson(1, 10) == pytest.approx((0.01787621, 0.40415002), abs=1e-6)
    assert wilson(0, 8)[0] == 0.0 and wilson(8, 8)[1] == 1.0
    with pytest.raises(ValueError, match="no interval for 1 of 0 attempts"):
        wilson(1, 0)


def test_bootstrap_is_near_the_normal_interval_and_repeats() -> None:
    values = np.random.default_rng(1).normal(2.0, 1.0, 400)
    low, high = bootstrap(values.tolist(), seed=3)
    half = 1.96 * values.std(ddof=1) / 20
    assert low == pytest.approx(values.mean() - half, abs=0.02)
    assert high == pytest.approx(values.mean() + half, abs=0.02)
    assert bootstrap(values.tolist(), seed=3) == (low, high) != bootstrap(values.tolist(), seed=4)


def test_interval_covers_the_mean_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        means = random.binomial(4, 0.4, 60) / 4  # tasks of four attempts
        low, high = interval(means.tolist(), seed=seed)
        covered += low <= 0.4 <= high
    assert 0.9 <= covered / 200 <= 0.99


def test_interval_has_a_width_when_every_task_is_alike() -> None:
    low, high = interval([0.0] * 16, seed=0)
    assert low == 0.0 and 0.1 < high < 0.3
