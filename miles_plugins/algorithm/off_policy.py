"""Importance weights for tokens that another distribution sampled: an older policy, or one cut by
top-p or top-k.

With p the trainer's policy before its step and q the distribution that was sampled from, a token's
ratio is p / q, so that means over samples of q become means under p (on the tokens that q can
sample). How ratios become weights is here; which loss they multiply is the algorithm's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from miles import Array, SampleError, Tokens

__all__ = ["OffPolicy", "importance_weights"]

_LIMIT = 20.0  # log-ratios beyond ± this change nothing any more


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    """How much a token counts that another distribution sampled."""

    mode: Literal["auto", "none", "truncate", "clip", "mask"] = "auto"
    """Ratios above `high` become `high` (truncate), those below `low` become `low` as well (clip),
    or tokens outside the bounds count nothing (mask). auto is truncate when max_lag is above 0,
    otherwise none."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """A ratio for each token; one for each sample, the product over its tokens; or their geometric
    mean."""
    low: float = 0.5
    """Lower bound of ratios; truncate has none."""
    high: float = 2.0
    """Upper bound of ratios."""
    veto: float = 1e-4
    """A sample with one token whose own ratio is below this counts nothing; 0 vetoes none."""

    def faults(self) -> list[str]:
        """What is wrong with the numbers, in words."""
        found = []
        if not 0 <= self.low <= 1:
            found.append(f"off_policy.low is {self.low}; 0 to 1")
        if self.high < 1:
            found.append(f"off_policy.high is {self.high}; at least 1")
        if not 0 <= self.veto < 1:
            found.append(f"off_policy.veto is {self.veto}; 0, or below 1")
        return found


def importance_weights(
    tokens: Tokens, current: Array, config: OffPolicy
) -> tuple[Array, Mapping[str, float]]:
    """(T,) float32 weights, 1 where nothing is trainable, and metrics.

    `current` is (T,) float32: the trainer's log-probs before its step. The ratio's denominator is
    the log-prob under the distribution that was sampled from: cut by top-p or top-k where that was
    so. Metrics are over trainable tokens: `off_policy/ess`, the effective sample size
    (Σw)² / (n Σw²) of the unbounded ratios, from 0 to 1 (Kong 1992); `off_policy/weight_mean` of
    the weights; `off_policy/bounded`, the share of ratios outside the bounds; `off_policy/vetoed`,
    the share of samples. Raises `SampleError` when samples carry no log-probs.

    Truncation: Ionides 2008, and IMPALA (Espeholt et al. 2018, arXiv:1802.01561).
    """
    sampled = tokens.logprobs if tokens.truncated_logprobs is None else tokens.truncated_logprobs
    if sampled is None:
        raise SampleError("off-policy correction: samples carry no log-probs of what was sampled")
    trainable = tokens.trainable
    owners = np.repeat(np.arange(len(tokens.lengths)), tokens.lengths)  # (T,) sample of each token
    log_ratio = np.where(trainable, current.astype(np.float64) - sampled, 0.0)  # (T,) float64
    own = np.exp(log_ratio.clip(-_LIMIT, _LIMIT))
    ratio = own if config.level == "token" else _of_samples(log_ratio, owners, tokens, config.level)
    weights = _bounded(ratio, config)
    vetoed = np.zeros(len(tokens.lengths), bool)
    vetoed[owners[trainable & (own < config.veto)]] = True
    weights[vetoed[owners]] = 0.0
    weights[~trainable] = 1.0
    return weights.astype(np.float32), _metrics(ratio, weights, tokens, vetoed, config)


def _of_samples(log_ratio: Array, owners: Array, tokens: Tokens, level: str) -> Array:
    """(T,) float64: the product of a sample's ratios, or their geometric mean, at each token."""
    count = len(tokens.lengths)
    total = np.bincount(owners, weights=log_ratio, minlength=count)
    if level == "geometric":
        sizes = np.bincount(owners, weights=tokens.trainable, minlength=count)
        total = total / np.maximum(sizes, 1)
    spread: Array = np.exp(total.clip(-_LIMIT, _LIMIT))[owners]
    return spread


def _bounded(ratio: Array, config: OffPolicy) -> Array:
    if config.mode == "mask":
        return np.where((ratio >= config.low) & (ratio <= config.high), ratio, 0.0)
    return ratio.clip(config.low if config.mode == "clip" else 0.0, config.high)


def _metrics(
    ratio: Array, weights: Array, tokens: Tokens, vetoed: Array, config: OffPolicy
) -> dict[str, float]:
    trainable = tokens.trainable
    if not trainable.any():
        return {}
    units = ratio[trainable]
    if config.level != "token":  # one ratio a sample: at its first trainable token
        owners = np.repeat(np.arange(len(tokens.lengths)), tokens.lengths)[trainable]
        units = units[np.unique(owners, return_index=True)[1]]
    low = 0.0 if config.mode == "truncate" else config.low
    outside = (units < low) | (units > config.high)
    return {
        "off_policy/ess": float(units.sum() ** 2 / (len(units) * (units**2).sum())),
        "off_policy/weight_mean": float(weights[trainable].mean()),
        "off_policy/bounded": float(outside.mean()),
        "off_policy/vetoed": float(vetoed.mean()),
    }
