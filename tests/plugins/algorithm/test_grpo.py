"""GRPO: advantages and weights against slow references, terms, passes and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import ConfigError, SampleError, Settings, flatten
from miles.testing import context, make_group
from miles_plugins.algorithm.grpo import Grpo


@pytest.fixture
def grpo(tmp_path):
    def make(**fields):
        settings = Settings(max_new_tokens=32)
        return Grpo(Grpo.Config(**fields), context(tmp_path, settings=settings))

    return make


GROUPS = (
    make_group(0, rewards=(1.0, 0.0, 0.0), lengths=(4, 7, 2)),
    make_group(1, rewards=(0.25, 0.5), lengths=(3, 5)),
    make_group(2, rewards=(1.0, 1.0), lengths=(2, 2)),
)


def weights_of(batch, name="policy"):
    """Weights of trainable tokens, one array a sample."""
    (term,) = [t for t in batch.terms if t.name == name]
    edges = np.cumsum(batch.tokens.lengths)[:-1]
    parts = zip(np.split(term.weights, edges), np.split(batch.tokens.trainable, edges), strict=True)
    return [weights[mask] for weights, mask in parts]


rewards = st.lists(st.lists(st.floats(-50, 50), min_size=1, max_size=5), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(rewards)
def test_advantages_equal_a_loop_over_groups(tmp_path_factory, values):
    around = context(tmp_path_factory.mktemp("run"))
    groups = [make_group(i, rewards=r) for i, r in enumerate(values)]
    for kind in ("group", "mean"):
        found = Grpo(Grpo.Config(advantage=kind), around).advantages(groups)
        expected = []
        for group in values:
            array = np.array(group)
            if array.max() == array.min():
                expected += [0.0] * len(array)
                continue
            centred = array - array.mean()
            expected += (centred / (array.std() + 1e-6) if kind == "group" else centred).tolist()
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_advantages_of_equal_rewards_are_exactly_zero(grpo):
    """The mean of three times 0.1 is not 0.1; divided by a tiny deviation it must not blow up."""
    assert grpo().advantages([make_group(0, rewards=(0.1, 0.1, 0.1))]).tolist() == [0.0] * 3


def test_prepare_gives_all_samples_and_tokens_of_a_trajectory_its_advantage(grpo):
    group = make_group(0, rewards=(1.0, 0.0))
    first, second = group.trajectories
    branched = replace(first, samples=(first.samples[0], second.samples[0]))
    group = replace(group, trajectories=(branched, second))
    batch = grpo(advantage="mean").prepare([group], {})
    per_sample = np.split(batch.terms[0].inputs["advantage"], np.cumsum(batch.tokens.lengths)[:-1])
    assert [set(a.tolist()) for a in per_sample] == [{0.5}, {0.5}, {-0.5}]


def test_aggregation_weights_add_up_as_their_names_say(grpo):
    tokens, trajectories = 25, 7
    for weights in weights_of(grpo(aggregation="token_mean").prepare(GROUPS, {})):
        np.testing.assert_allclose(weights, 1 / tokens, rtol=1e-6)
    for weights in weights_of(grpo(aggregation="sequence_mean").prepare(GROUPS, {})):
        np.testing.assert_allclose(weights, 1 / (trajectories * len(weights)), rtol=1e-6)
    for weights in weights_of(grpo(aggregation="fixed_length").prepare(GROUPS, {})):
        np.testing.assert_allclose(weights, 1 / (trajectories * 32), rtol=1e-6)
    fixed = grpo(aggregation="fixed_length", fixed_length=10).prepare(GROUPS, {})
    np.testing.assert_allclose(weights_of(fixed)[0], 1 / (trajectories * 10), rtol=1e-6)


def test_sequence_mean_leaves_out_trajectories_without_trainable_tokens(grpo):
    group = make_group(0, rewards=(1.0, 0.0))
    first, second = group.trajectories
    sample = replace(first.samples[0], trainable=np.zeros(7, np.bool_))
    group = replace(group, trajectories=(replace(first, samples=(sample,)), second))
    silent, heard = weights_of(grpo(aggregation="sequence_mean").prepare([group], {}))
    assert len(silent) == 0
    assert heard.sum() == pytest.approx(1.0)


def test_terms_carry_their_coefficients_inputs_and_options(grpo):
    algorithm = grpo(
        kl=0.1, kl_kind="k2", entropy=0.01, old_logprobs="current", clip_high=0.28, dual_clip=3.0
    )
    assert algorithm.needs() == ("current", "reference")
    size = len(flatten([s for g in GROUPS for s in g.samples]).tokens)
    passes = {
        "current": np.linspace(-3, -1, size, dtype=np.float32),
        "reference": np.linspace(-2, -1, size, dtype=np.float32),
    }
    batch = algorithm.prepare(GROUPS, passes)
    policy, kl, entropy = batch.terms
    assert policy.function == "miles.learn.losses:policy_gradient"
    assert policy.options == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert (policy.inputs["old_logprobs"] == passes["current"]).all()
    assert kl.function == "miles.learn.losses:kl_k2"
    assert (kl.inputs["reference_logprobs"] == passes["reference"]).all()
    np.testing.assert_allclose(kl.weights, 0.1 * policy.weights, rtol=1e-6)
    np.testing.assert_allclose(entropy.weights, 0.01 * policy.weights, rtol=1e-6)
    assert batch.metrics["advantage/std"] == pytest.approx(
        np.std(algorithm.advantages(GROUPS)), rel=1e-6
    )


def test_rollout_logprobs_are_the_full_ones_where_sampling_was_cut(grpo):
    group = make_group(0, rewards=(1.0, 0.0))
    first, second = group.trajectories
    sample = first.samples[0]
    cut = replace(sample, truncated_logprobs=(sample.logprobs * 0.5).astype(np.float32))
    group = replace(group, trajectories=(replace(first, samples=(cut,)), second))
    assert grpo().needs() == ()
    batch = grpo().prepare([group], {})
    assert (batch.terms[0].inputs["old_logprobs"][: len(sample.tokens)] == sample.logprobs).all()


def test_prepare_refuses_demonstrations(grpo):
    with pytest.raises(SampleError, match="samples carry no rollout log-probs"):
        grpo().prepare([make_group(0, logprobs=False)], {})


def test_config_refuses_impossible_numbers_all_at_once(grpo):
    with pytest.raises(
        ConfigError, match=r"clip_low is 2.*; dual_clip is 0.5; above 1.*; kl is -1"
    ):
        grpo(clip_low=2.0, dual_clip=0.5, kl=-1.0)
