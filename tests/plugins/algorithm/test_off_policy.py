"""Importance weights against sums over all outcomes, slow loops, and GRPO that uses them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import ConfigError, SampleError, Settings, Tokens, flatten
from miles.testing import context, make_group
from miles_plugins.algorithm.grpo import Grpo
from miles_plugins.algorithm.off_policy import OffPolicy, importance_weights

FREE = {"high": 1e9, "veto": 0.0}


def tokens_of(log_q, lengths, *, cut=None):
    """Samples whose first token is the prompt and whose others were sampled."""
    lengths = np.array(lengths, np.int32)
    sampled = np.ones(int(lengths.sum()), bool)
    sampled[np.cumsum(lengths) - lengths] = False
    return Tokens(
        tokens=np.zeros(len(sampled), np.int32),
        lengths=lengths,
        sampled=sampled,
        trainable=sampled,
        versions=np.where(sampled, 0, -1).astype(np.int32),
        logprobs=np.asarray(log_q, np.float32),
        truncated_logprobs=None if cut is None else np.asarray(cut, np.float32),
    )


def test_fresh_samples_weigh_one_and_all_of_them_are_effective():
    log_q = np.log([1, 0.5, 0.25, 1, 0.1])
    tokens = tokens_of(log_q, [3, 2])
    for level, mode in itertools.product(
        ("token", "sequence", "geometric"), ("truncate", "clip", "mask")
    ):
        config = OffPolicy(level=level, mode=mode)
        weights, metrics = importance_weights(tokens, tokens.logprobs, config)
        assert weights.tolist() == [1.0] * 5
        assert metrics["off_policy/ess"] == pytest.approx(1.0)
        assert metrics["off_policy/bounded"] == metrics["off_policy/vetoed"] == 0.0


def test_mean_under_a_cut_distribution_becomes_the_mean_under_the_policy():
    """Over all tokens q can sample, sum q(x) w(x) f(x) = sum p(x) f(x), in closed form."""
    p = np.array([0.4, 0.3, 0.2, 0.1])
    full = np.array([0.1, 0.2, 0.3, 0.4])
    kept = np.array([False, True, True, True])  # top-k 3 of the older policy
    q = np.where(kept, full, 0) / full[kept].sum()
    f = np.array([3.0, -1.0, 2.0, 5.0])
    outcomes = np.flatnonzero(kept)
    log = [v for x in outcomes for v in (0.0, np.log(full[x]))]
    cut = [v for x in outcomes for v in (0.0, np.log(q[x]))]
    current = np.array([v for x in outcomes for v in (0.0, np.log(p[x]))], np.float32)
    tokens = tokens_of(log, [2] * len(outcomes), cut=cut)
    weights, _ = importance_weights(tokens, current, OffPolicy(mode="truncate", **FREE))
    mean = sum(q[x] * weights[2 * i + 1] * f[x] for i, x in enumerate(outcomes))
    assert mean == pytest.approx((p * f)[kept].sum(), rel=1e-5)


def test_sequence_weights_are_exact_over_all_sequences():
    """Two tokens from q: sum over sequences of q w f = sum of p f."""
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    pairs = list(itertools.product(range(3), repeat=2))
    f = {pair: float(i) for i, pair in enumerate(pairs)}
    log_q = [v for a, b in pairs for v in (0.0, np.log(q[a]), np.log(q[b]))]
    log_p = [v for a, b in pairs for v in (0.0, np.log(p[a]), np.log(p[b]))]
    tokens = tokens_of(log_q, [3] * len(pairs))
    config = OffPolicy(mode="truncate", level="sequence", **FREE)
    weights, _ = importance_weights(tokens, np.array(log_p, np.float32), config)
    mean = sum(q[a] * q[b] * weights[3 * i + 1] * f[a, b] for i, (a, b) in enumerate(pairs))
    assert mean == pytest.approx(sum(p[a] * p[b] * f[a, b] for a, b in pairs), rel=1e-5)


samples = st.lists(
    st.lists(st.tuples(st.floats(-6, -0.01), st.floats(-6, -0.01)), min_size=1, max_size=5),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(samples, st.sampled_from(["truncate", "clip", "mask"]), st.sampled_from([0.0, 0.01, 0.3]))
def test_weights_and_effective_size_equal_a_loop(made, mode, veto):
    log_q = [v for s in made for v in (0.0, *(q for q, _ in s))]
    current = np.array([v for s in made for v in (0.0, *(p for _, p in s))], np.float32)
    tokens = tokens_of(log_q, [1 + len(s) for s in made])
    for level in ("token", "sequence", "geometric"):
        config = OffPolicy(mode=mode, level=level, low=0.5, high=2.0, veto=veto)
        weights, metrics = importance_weights(tokens, current, config)
        expected, units, vetoes = [], [], 0
        for s in made:
            logs = [np.float64(np.float32(p)) - np.float64(np.float32(q)) for q, p in s]
            total = {"sequence": sum(logs), "geometric": sum(logs) / len(logs)}
            ratios = [np.exp(x if level == "token" else total[level]) for x in logs]
            units += ratios if level == "token" else ratios[:1]
            vetoed = any(np.exp(x) < veto for x in logs)
            vetoes += vetoed
            expected.append(1.0)
            for r in ratios:
                inside = 0.5 <= r <= 2.0
                bounded = {
                    "truncate": min(r, 2.0),
                    "clip": min(max(r, 0.5), 2.0),
                    "mask": r if inside else 0.0,
                }[mode]
                expected.append(0.0 if vetoed else bounded)
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
        u = np.array(units)
        assert metrics["off_policy/ess"] == pytest.approx(u.sum() ** 2 / len(u) / (u * u).sum())
        assert metrics["off_policy/vetoed"] == pytest.approx(vetoes / len(made))
        assert 0 < metrics["off_policy/ess"] <= 1 + 1e-12


def test_samples_without_logprobs_are_refused():
    tokens = tokens_of([0.0, -1.0], [2])
    bare = Tokens(
        tokens=tokens.tokens,
        lengths=tokens.lengths,
        sampled=tokens.sampled,
        trainable=tokens.trainable,
        versions=tokens.versions,
    )
    with pytest.raises(SampleError, match="no log-probs of what was sampled"):
        importance_weights(bare, np.zeros(2, np.float32), OffPolicy(mode="clip"))


def made(tmp_path, *, max_lag, **fields):
    keys = Settings(max_new_tokens=32, max_lag=max_lag)
    return Grpo(Grpo.Config(**fields), context(tmp_path, settings=keys))


def test_grpo_corrects_by_default_when_groups_may_be_old(tmp_path):
    group = make_group(0, rewards=(1.0, 0.0), lengths=(3, 4))
    tokens = flatten(group.samples)
    current = (tokens.logprobs + np.where(tokens.trainable, np.log(1.5), 0)).astype(np.float32)
    plain, corrected = made(tmp_path, max_lag=0), made(tmp_path, max_lag=2)
    assert (plain.needs(), corrected.needs()) == ((), ("current",))
    before = plain.prepare([group], {}).terms[0]
    batch = corrected.prepare([group], {"current": current})
    np.testing.assert_allclose(batch.terms[0].weights, before.weights * 1.5, rtol=1e-5)
    assert np.array_equal(batch.terms[0].inputs["old_logprobs"], current)
    assert batch.metrics["off_policy/weight_mean"] == pytest.approx(1.5, rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"old_logprobs": "rollout"}, "old_logprobs is rollout and off_policy.mode truncate"),
        ({"off_policy": OffPolicy(low=2.0)}, r"off_policy\.low is 2\.0; 0 to 1"),
        ({"off_policy": OffPolicy(high=0.5)}, r"off_policy\.high is 0\.5; at least 1"),
        ({"off_policy": OffPolicy(veto=1.0)}, r"off_policy\.veto is 1\.0"),
    ],
)
def test_grpo_refuses_corrections_that_make_no_sense(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, max_lag=1, **fields)
