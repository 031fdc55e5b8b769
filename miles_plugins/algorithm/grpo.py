"""Group-relative policy optimisation: attempts at one task are compared with each other.

It computes advantages and attaches them to loss terms; the terms' formulas are in
`miles.learn.losses`, and nothing here touches a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from miles import Array, Batch, ConfigError, Context, Group, SampleError, Term, Tokens, flatten
from miles_plugins.algorithm.off_policy import OffPolicy, importance_weights
from miles_plugins.algorithm.weighting import Aggregation, samples_of, token_weights

__all__ = ["Grpo"]

SMALL = 1e-6
"""Added to a group's standard deviation before dividing by it."""


class Grpo:
    """GRPO: advantages within a group, a clipped policy-gradient term, optional KL and entropy
    terms.

    A trajectory's advantage is its reward minus the mean of its group, divided (`group`) by the
    group's population standard deviation, or not (`mean`). All samples and all trainable tokens of
    a trajectory share it.

    When groups may be older than the weights (`max_lag` above 0), importance weights against the
    log-probs of what was sampled multiply the policy term (`off_policy`), and the clipped ratio is
    against the trainer's own weights before the step: Hilton et al. 2021, arXiv:2110.00641.

    The policy ratio compares full distributions at the sampling temperature on both sides, also
    when sampling was cut by top-p or top-k. The log-prob under the cut distribution is larger by
    -log(kept mass); dividing a full new probability by a cut old one would make ratios
    systematically below 1 on fresh samples. With full against full the ratio is 1 on fresh
    samples; what remains of the cut is that tokens are drawn from it, for which `off_policy`
    corrects on the tokens that were kept.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """What the step maximises."""

        advantage: Literal["group", "mean"] = "group"
        """Divide by the group's standard deviation, or only subtract its mean."""
        clip_low: float = 0.2
        """The ratio counts down to 1 - clip_low."""
        clip_high: float = 0.2
        """The ratio counts up to 1 + clip_high; larger than clip_low is "clip-higher"."""
        dual_clip: float = 0.0
        """Bound on the loss of a bad token, as a multiple of its advantage, above 1; 0 leaves it
        out."""
        old_logprobs: Literal["auto", "rollout", "current"] = "auto"
        """Denominator of the ratio: what the engine reported, or a pass of the trainer before the
        step; auto is the pass when `off_policy` corrects, otherwise the engine's."""
        off_policy: OffPolicy = field(default_factory=OffPolicy)
        """Importance weights of tokens that another distribution sampled."""
        kl: float = 0.0
        """Weight of the KL term towards the weights that the stage began with; 0 leaves it out."""
        kl_kind: Literal["k1", "k2", "k3"] = "k3"
        """Which estimate of the KL divergence is the loss."""
        entropy: float = 0.0
        """Weight of the entropy bonus; 0 leaves it out."""
        aggregation: Aggregation = "token_mean"
        """How tokens are averaged: over all tokens, first within each trajectory, or by a fixed
        length."""
        fixed_length: int = 0
        """Tokens that `fixed_length` divides by; 0 takes the longest completion allowed,
        `max_new_tokens`."""

    def __init__(self, config: Config, context: Context) -> None:
        self.config = config
        self._length = config.fixed_length or context.settings.max_new_tokens
        mode = config.off_policy.mode
        if mode == "auto":
            mode = "truncate" if context.settings.max_lag else "none"
        self._off_policy = replace(config.off_policy, mode=mode)
        self._corrects = mode != "none"
        old = config.old_logprobs
        self._passes_current = old == "current" or (old == "auto" and self._corrects)
        faults = [
            text
            for wrong, text in (
                (not 0 <= config.clip_low <= 1, f"clip_low is {config.clip_low}; 0 to 1"),
                (config.clip_high < 0, f"clip_high is {config.clip_high}; at least 0"),
                (
                    config.dual_clip != 0 and config.dual_clip <= 1,
                    f"dual_clip is {config.dual_clip}; above 1, or 0 for none",
                ),
                (config.kl < 0, f"kl is {config.kl}; at least 0"),
                (config.fixed_length < 0, f"fixed_length is {config.fixed_length}; at least 0"),
            )
            if wrong
        ]
        faults += config.off_policy.faults()
        if self._corrects and old == "rollout":
            faults.append(
                f"old_logprobs is rollout and off_policy.mode {mode}: both divide by what the "
                "engine reported; take old_logprobs=auto, or off_policy.mode=none"
            )
        if faults:
            raise ConfigError(f"algorithm grpo: {'; '.join(faults)}")

    @classmethod
    def check(cls, config: Config, planned: Any) -> list[str]:
        """Rollouts from which nothing could be learned."""
        faults = []
        if not planned.samples:
            faults.append(
                "compares what the policy sampled, but the engine replays demonstrations; "
                "algorithm=sft imitates them, or choose an engine that samples"
            )
        if planned.settings.samples_per_group < 2:
            faults.append(
                "compares attempts within a group, so samples_per_group "
                f"({planned.settings.samples_per_group}) must be at least 2"
            )
        return faults

    @classmethod
    def warnings(cls, config: Config, planned: Any) -> Sequence[str]:
        """That a random model is rewarded for nothing, so that there is nothing to compare."""
        model, settings = planned.built.get("model"), planned.settings
        learns = settings.steps and not settings.simulate  # whose model is a stand-in
        if model is None or not model.random or not planned.fresh or not learns:
            return ()
        return (
            "algorithm 'grpo': the model's weights are random and no stage before this one trains "
            "them: where rewards are sparse, all its attempts earn the same and it learns nothing; "
            "begin with a stage of engine=demonstration and algorithm=sft, as experiment=arithmetic"
            " does, or load weights (model.init=load model.path=DIRECTORY)",
        )

    def needs(self) -> tuple[str, ...]:
        """`current` when the ratio asks for it, `reference` when there is a KL term."""
        current = self._passes_current or self._corrects
        return (*(("current",) if current else ()), *(("reference",) if self.config.kl else ()))

    def terms(self) -> Mapping[str, str]:
        """The loss terms this configuration uses."""
        terms = {"policy": "miles.learn.losses:policy_gradient"}
        if self.config.kl:
            terms["kl"] = f"miles.learn.losses:kl_{self.config.kl_kind}"
        if self.config.entropy:
            terms["entropy"] = "miles.learn.losses:entropy_bonus"
        return terms

    def prepare(self, groups: Sequence[Group], passes: Mapping[str, Array]) -> Batch:
        """Advantages and terms. Raises `SampleError` when log-probs that the ratio needs are not
        there."""
        samples, owners = samples_of(groups)
        tokens = flatten(samples)
        advantages = self.advantages(groups)  # (N,) float64
        owners_T = np.repeat(owners, tokens.lengths)
        config = self.config
        weights = token_weights(
            tokens.trainable, owners_T, len(advantages), config.aggregation, self._length
        )
        metrics = {"advantage/std": float(advantages.std())}
        policy_weights = weights
        if self._corrects:
            importance, more = importance_weights(tokens, passes["current"], self._off_policy)
            policy_weights, metrics = weights * importance, {**metrics, **more}
        functions = self.terms()
        terms = [
            Term(
                name="policy",
                function=functions["policy"],
                weights=policy_weights,
                inputs={
                    "advantage": advantages[owners_T].astype(np.float32),
                    "old_logprobs": self._old(tokens, passes),
                },
                options={
                    "clip_low": config.clip_low,
                    "clip_high": config.clip_high,
                    "dual_clip": config.dual_clip,
                },
            )
        ]
        if config.kl:
            terms.append(
                Term(
                    name="kl",
                    function=functions["kl"],
                    weights=weights * np.float32(config.kl),
                    inputs={"reference_logprobs": passes["reference"]},
                )
            )
        if config.entropy:
            terms.append(
                Term(
                    name="entropy",
                    function=functions["entropy"],
                    weights=weights * np.float32(config.entropy),
                )
            )
        return Batch(tokens=tokens, terms=tuple(terms), metrics=metrics)

    def advantages(self, groups: Sequence[Group]) -> Array:
        """(trajectories,) float64, in order: (r - mean) / (std + 1e-6), or r - mean. Attempts that
        all earned the same get exactly 0."""
        sizes = np.array([len(g.trajectories) for g in groups])
        rewards = np.array([t.reward for g in groups for t in g.trajectories], np.float64)
        of = np.repeat(np.arange(len(groups)), sizes)
        centred = rewards - (np.bincount(of, weights=rewards) / sizes)[of]
        # A mean of equal numbers can miss them by a rounding, which dividing by the deviation would
        # blow up.
        starts = np.cumsum(sizes) - sizes
        low, high = np.minimum.reduceat(rewards, starts), np.maximum.reduceat(rewards, starts)
        centred[(low == high)[of]] = 0.0
        if self.config.advantage == "mean":
            return centred
        deviation = np.sqrt(np.bincount(of, weights=centred**2) / sizes)
        scaled: Array = centred / (deviation + SMALL)[of]
        return scaled

    def _old(self, tokens: Tokens, passes: Mapping[str, Array]) -> Array:
        if self._passes_current:
            return passes["current"]
        if tokens.logprobs is None:
            error = SampleError("algorithm grpo: samples carry no rollout log-probs")
            error.add_note("a demonstration was not sampled; use algorithm=sft with its engine")
            raise error
        return tokens.logprobs
