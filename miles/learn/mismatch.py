"""Trainer log-probs against rollout log-probs: measured on every step, and held against a budget.

It decides nothing about what to train on beyond saying which tokens are over the budget; the
trainer acts on it. Both sides are log-probs under the full distribution at the sampling
temperature, also where sampling was cut by top-p or top-k, so numerics are compared with numerics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from miles.batch import Tokens
from miles.errors import TrainerError
from miles.types import Array

__all__ = ["Limits", "comparable", "enforce", "measure", "with_probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A mismatch budget and what happens when a step is over it."""

    max: float
    """Per token, absolute, in nats."""
    mean: float
    """Mean over the step's tokens of the trainer's version, absolute, in nats."""
    action: Literal["warn", "mask", "fail"] = "warn"
    """`warn` says so; `mask` also gives tokens over `max` weight 0; `fail` refuses the step."""


def comparable(tokens: Tokens, version: int) -> Array:
    """(T,) bool: tokens sampled by the weights the trainer has now, whose log-probs ought to be the
    same."""
    if tokens.logprobs is None:
        return np.zeros(len(tokens.tokens), np.bool_)
    mask: Array = tokens.sampled & (tokens.versions == version)
    return mask


def measure(tokens: Tokens, current: Array, measured: Array, version: int) -> dict[str, float]:
    """Metrics of the difference between `current`, (T,) float32 trainer log-probs, and the
    rollout's.

    Only tokens in `measured`, (T,) bool, are looked at. Those of the trainer's `version` go to
    `mismatch/*`: mean and largest |d|, and the k3 estimate of KL(rollout ‖ trainer), mean of exp(d)
    - 1 - d with d = trainer - rollout. Tokens k versions older go to `off_policy/lag_<k>/*`, so
    that numerics and policy lag are never mixed. Without a token of this version there is no number
    but `mismatch/unmeasured`: 1.0.
    """
    found: dict[str, float] = {}
    seen = measured & tokens.sampled
    if tokens.logprobs is not None:
        lag_T = version - tokens.versions  # (T,) int32
        for lag in np.unique(lag_T[seen]).tolist():
            of_lag = seen & (lag_T == lag)
            prefix = "mismatch" if lag == 0 else f"off_policy/lag_{lag}"
            difference = current[of_lag].astype(np.float64) - tokens.logprobs[of_lag]
            absolute = np.abs(difference)
            found[f"{prefix}/logprob_abs_mean"] = float(absolute.mean())
            found[f"{prefix}/logprob_abs_max"] = float(absolute.max())
            with np.errstate(over="ignore"):
                found[f"{prefix}/k3"] = float((np.expm1(difference) - difference).mean())
            found[f"{prefix}/tokens"] = float(len(difference))
    if "mismatch/tokens" not in found:
        found["mismatch/unmeasured"] = 1.0
    return found


def with_probe(
    metrics: dict[str, float], probe: Tokens, current: Array, version: int
) -> dict[str, float]:
    """`measure`'s numbers, with `mismatch/*` over a probe: sequences that an engine scored at
    `version`, and `current`, (T,) float32, the trainer's log-probs of them."""
    kept = {name: value for name, value in metrics.items() if not name.startswith("mismatch/")}
    return {**kept, **measure(probe, current, probe.sampled, version), "mismatch/probed": 1.0}


def enforce(metrics: dict[str, float], limits: Limits) -> tuple[str, ...]:
    """Hold `measure`'s numbers against the budget; sentences for people when they are over it.

    Raises `TrainerError` when the action is `fail`.
    """
    if "mismatch/tokens" not in metrics:
        return ()
    faults = [
        f"{name} log-prob difference of trainer and rollout is {value:.3g} nats, budget {limit:g} "
        f"({metrics['mismatch/tokens']:.0f} tokens)"
        for name, value, limit in (
            ("largest", metrics["mismatch/logprob_abs_max"], limits.max),
            ("mean", metrics["mismatch/logprob_abs_mean"], limits.mean),
        )
        if not value <= limit  # a NaN is over every budget
    ]
    if faults and limits.action == "fail":
        error = TrainerError("mismatch: " + "; ".join(faults))
        error.add_note("the step was refused and the weights are unchanged (on_mismatch: fail)")
        raise error
    return tuple(faults)
