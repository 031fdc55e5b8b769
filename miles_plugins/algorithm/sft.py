"""Supervised fine-tuning: imitate what the samples say.

Rewards are ignored; which tokens count is written in the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from miles import Array, Batch, Context, Group, Term, flatten
from miles_plugins.algorithm.weighting import samples_of, token_weights

__all__ = ["Sft"]


class Sft:
    """Negative log-likelihood of the trainable tokens, usually with `engine=demonstration`."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """What the step minimises."""

        aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
        """Mean over all trainable tokens, or first within each trajectory."""

    def __init__(self, config: Config, context: Context) -> None:
        self.config = config

    @classmethod
    def warnings(cls, config: Config, planned: Any) -> Sequence[str]:
        """That the policy would imitate itself."""
        engine = planned.specs["engine"]  # None where there is no such engine
        if engine is None or not planned.samples or not planned.settings.steps:
            return ()
        return (
            f"algorithm 'sft': engine {engine.name!r} samples, so that the policy "
            "imitates whatever it says itself; engine=demonstration replays the tasks' solutions "
            "(on the command line engine=NAME is for all stages, stages.STAGE.engine=NAME for one)",
        )

    def needs(self) -> tuple[str, ...]:
        """No passes."""
        return ()

    def terms(self) -> Mapping[str, str]:
        """One term."""
        return {"nll": "miles.learn.losses:nll"}

    def prepare(self, groups: Sequence[Group], passes: Mapping[str, Array]) -> Batch:
        """The samples of all groups with one term."""
        samples, owners = samples_of(groups)
        tokens = flatten(samples)
        weights = token_weights(
            tokens.trainable,
            np.repeat(owners, tokens.lengths),
            sum(len(g.trajectories) for g in groups),
            self.config.aggregation,
            0,
        )
        nll = Term(name="nll", function=self.terms()["nll"], weights=weights)
        return Batch(tokens=tokens, terms=(nll,))
