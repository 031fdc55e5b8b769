"""Single precision everywhere.

Data only; what computes lives in the trainer and the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles import Budget, Context
from miles_plugins.precision.stages import fingerprint

__all__ = ["Fp32"]


class Fp32:
    """float32 in all four stages; the mismatch left is the order of additions."""

    master = compute = engine = export = residual = logits = "float32"
    scaling = None

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How far trainer and engine may differ."""

        budget_max: float = 1e-4
        """Largest difference of a token's log-prob, in nats."""
        budget_mean: float = 1e-5
        """Largest mean difference over a step, in nats."""

    def __init__(self, config: Config, context: Context) -> None:
        self.budget = Budget(max=config.budget_max, mean=config.budget_mean)

    def fingerprint(self) -> str:
        """Equal exactly where stages and finer places are equal."""
        return fingerprint(self)
