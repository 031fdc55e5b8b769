"""Loss terms against closed forms and slow scalar references in float64, gradients included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.learn import losses

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0}


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def surrogate(new, old, advantage, low, high, dual):
    """The objective of PPO, DAPO and dual-clip PPO for one token, written as in the papers."""
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    value = min(ratio * advantage, clipped * advantage)
    if dual > 0 and advantage < 0:
        value = max(value, dual * advantage)
    return -value


finite = st.floats(-3, 3)


@settings(max_examples=150, deadline=None)
@given(new=finite, old=finite, advantage=finite, dual=st.sampled_from([0.0, 3.0]))
def test_policy_gradient_equals_the_papers_formula(new, old, advantage, dual):
    options = {**CLIP, "dual_clip": dual}
    inputs = {"advantage": tensor(advantage), "old_logprobs": tensor(old)}
    found = losses.policy_gradient(tensor(new), None, inputs, options)
    expected = surrogate(new, old, advantage, 0.2, 0.28, dual)
    assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "slope"),
    [
        (1.0, 2.0, 0.0, -2.0),  # inside: -r A
        (1.1, -2.0, 0.0, 2.2),
        (1.5, 2.0, 0.0, 0.0),  # good token already likelier by more than clip_high
        (0.5, 2.0, 0.0, -1.0),  # good token that fell is pulled back
        (0.5, -2.0, 0.0, 0.0),  # bad token already rarer by more than clip_low
        (1.5, -2.0, 0.0, 3.0),  # bad token that rose is pushed down
        (5.0, -2.0, 0.0, 10.0),  # without dual clip, without bound
        (5.0, -2.0, 3.0, 0.0),  # with it, bounded: no pull
        (1.25, 2.0, 0.0, -2.5),  # between clip_low and clip_high
    ],
)
def test_policy_gradient_slope_in_every_region(ratio, advantage, dual, slope):
    logprobs = tensor(-1.0 + math.log(ratio)).requires_grad_()
    inputs = {"advantage": tensor(advantage), "old_logprobs": tensor(-1.0)}
    losses.policy_gradient(logprobs, None, inputs, {**CLIP, "dual_clip": dual}).sum().backward()
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-12)


def test_policy_gradient_stays_finite_for_absurd_ratios():
    inputs = {"advantage": tensor(-1.0), "old_logprobs": tensor(-900.0)}
    assert losses.policy_gradient(tensor(-0.1), None, inputs, CLIP).isfinite().all()


def test_kl_estimates_equal_their_definitions_and_slopes():
    new, reference = tensor(-1.0, -0.2, -3.0), tensor(-1.5, -0.2, -2.0)
    inputs = {"reference_logprobs": reference}
    log_q = np.array([-0.5, 0.0, 1.0])
    expected = {
        "kl_k1": (-log_q, np.ones(3)),
        "kl_k2": (log_q**2 / 2, -log_q),
        "kl_k3": (np.exp(log_q) - 1 - log_q, 1 - np.exp(log_q)),
    }
    for name, (values, slopes) in expected.items():
        logprobs = new.clone().requires_grad_()
        found = getattr(losses, name)(logprobs, None, inputs, {})
        found.sum().backward()
        np.testing.assert_allclose(found.detach().numpy(), values, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(logprobs.grad.numpy(), slopes, rtol=1e-12, atol=1e-15)


def test_kl_estimates_have_the_mean_and_slope_they_promise():
    """Exact expectations over a small vocabulary: k1 and k3 have the KL's mean, k2 the KL's slope,
    k1 none."""
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=draw, dtype=torch.float64).requires_grad_()
    reference = torch.randn(6, generator=draw, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    divergence = (policy.exp() * (policy - reference)).sum()
    (slope,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    weights = policy.exp().detach()
    inputs = {"reference_logprobs": reference}
    for name, unbiased in (("kl_k1", True), ("kl_k2", False), ("kl_k3", True)):
        mean = (weights * getattr(losses, name)(policy, None, inputs, {})).sum()
        assert (abs(mean.item() - divergence.item()) < 1e-12) is unbiased
        (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
        if name == "kl_k1":
            assert found.abs().max() < 1e-12
        if name == "kl_k2":
            torch.testing.assert_close(found, slope)


def test_entropy_bonus_is_minus_the_entropy_and_says_that_it_needs_it():
    assert losses.entropy_bonus.needs_entropy
    entropy = tensor(0.3, 1.2).requires_grad_()
    found = losses.entropy_bonus(tensor(0, 0), entropy, {}, {})
    found.sum().backward()
    assert found.tolist() == [-0.3, -1.2]
    assert entropy.grad.tolist() == [-1.0, -1.0]
    with pytest.raises(ValueError, match="needs_entropy mark was lost"):
        losses.entropy_bonus(tensor(0), None, {}, {})


def test_nll_is_minus_the_logprob():
    logprobs = tensor(-0.5, -2.0).requires_grad_()
    found = losses.nll(logprobs, None, {}, {})
    found.sum().backward()
    assert found.tolist() == [0.5, 2.0]
    assert logprobs.grad.tolist() == [-1.0, -1.0]
