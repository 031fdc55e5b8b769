"""Loss terms: one number a token, from current log-probs and the inputs that an algorithm attached.

Every function here has the signature `fn(logprobs, entropy, inputs, options) -> (T,) tensor`; a
plugin's terms do too. T ranges over any subset of a batch's tokens, chosen by the trainer, so a
term may not look across tokens. `logprobs` is (T,) float32 with gradient; `entropy` is (T,) or None
unless the function is marked with `needs_entropy`; `inputs` are (T,) tensors by name; `options` are
numbers by name. A step's loss is the sum of weight × value; weighting, averaging and summing are
not done here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["entropy_bonus", "kl_k1", "kl_k2", "kl_k3", "needs_entropy", "nll", "policy_gradient"]

_Term = TypeVar("_Term", bound=Callable[..., Tensor])

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before `exp`, so that one absurd token cannot make a step
infinite."""


def needs_entropy(function: _Term) -> _Term:
    """Mark a term whose `entropy` must not be None; the trainer then computes it, with its
    gradient."""
    function.needs_entropy = True  # type: ignore[attr-defined]
    return function


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def policy_gradient(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, float],
) -> Tensor:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347), as a loss.

    With r = exp(logprob - old_logprob) and A = advantage:

        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Separate bounds are DAPO's "clip-higher" (Yu et al. 2025, arXiv:2503.14476). For A < 0,
    `dual_clip` c > 1 bounds the loss from above by -c A (Ye et al. 2019, arXiv:1912.09729); 0
    leaves it out. Inputs: `advantage`, `old_logprobs`. Options: `clip_low`, `clip_high`,
    `dual_clip`.
    """
    advantage = inputs["advantage"]
    ratio = _ratio(logprobs - inputs["old_logprobs"])
    clipped = ratio.clamp(1.0 - options["clip_low"], 1.0 + options["clip_high"])
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    bound = options.get("dual_clip", 0.0)
    if bound > 0:
        loss = torch.where(advantage < 0, torch.minimum(loss, -bound * advantage), loss)
    return loss


def kl_k1(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, float],
) -> Tensor:
    """k1 estimate of KL(policy ‖ reference): logprob - reference_logprob. Unbiased as a value, high
    variance; its gradient as a loss has mean 0 on the policy's own samples, so it measures rather
    than pulls.

    J. Schulman, "Approximating KL Divergence" (2020). Inputs: `reference_logprobs`.
    """
    return logprobs - inputs["reference_logprobs"]


def kl_k2(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, float],
) -> Tensor:
    """k2 estimate: (logprob - reference_logprob)² / 2. Biased as a value; its gradient has the mean
    of the KL's gradient on the policy's own samples.

    J. Schulman, "Approximating KL Divergence" (2020). Inputs: `reference_logprobs`.
    """
    return 0.5 * (logprobs - inputs["reference_logprobs"]).square()


def kl_k3(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, float],
) -> Tensor:
    """k3 estimate: q - 1 - log q with q = exp(reference_logprob - logprob). Unbiased, never
    negative, low variance.

    J. Schulman, "Approximating KL Divergence" (2020); the KL term of GRPO (Shao et al. 2024,
    arXiv:2402.03300). Inputs: `reference_logprobs`.
    """
    log_q = inputs["reference_logprobs"] - logprobs
    return _ratio(log_q) - 1.0 - log_q


@needs_entropy
def entropy_bonus(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, float],
) -> Tensor:
    """Minus the entropy of the next-token distribution, so that a positive weight rewards spread
    (Mnih et al. 2016, arXiv:1602.01783)."""
    if entropy is None:
        raise ValueError(
            "entropy_bonus was called without entropy; its needs_entropy mark was lost"
        )
    return -entropy


def nll(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, float],
) -> Tensor:
    """Negative log-likelihood: -logprob."""
    return -logprobs
