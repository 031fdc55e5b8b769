"""bfloat16 compute over float32 masters.

Data only; what computes lives in the trainer and the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles import Budget, Context
from miles_plugins.precision.stages import fingerprint

__all__ = ["Bf16"]


class Bf16:
    """float32 masters; bfloat16 in the trainer's forward, in the engine and on the way between them."""

    master = "float32"
    compute = engine = export = "bfloat16"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How far trainer and engine may differ."""

        budget_max: float = 0.5
        """Largest difference of a token's log-prob, in nats."""
        budget_mean: float = 0.02
        """Largest mean difference over a step, in nats."""

    def __init__(self, config: Config, context: Context) -> None:
        self.budget = Budget(max=config.budget_max, mean=config.budget_mean)

    def fingerprint(self) -> str:
        """Equal exactly where the four stages are equal."""
        return fingerprint(self)
