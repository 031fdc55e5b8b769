"""bfloat16 compute over float32 masters.

Data only; what computes lives in the trainer and the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles import Budget, Context
from miles_plugins.precision.stages import fingerprint

__all__ = ["Bf16"]


class Bf16:
    """float32 masters; bfloat16 in the trainer's forward, in the engine and on the way between
    them.

    bfloat16 has 8 bits of mantissa, so logits near 8 lie 0.06 apart, and two orders of addition can
    round a logit either way. Measured on a CPU between the embedded engine and `transformers`: mean
    0.045, max 0.41 nats on SmolLM2-135M (30 layers, 258 tokens); mean 0.03 on a two-layer model.
    The budget is about twice that: it lets rounding pass and catches a wrong weight or position.
    """

    master = "float32"
    compute = export = "bfloat16"
    scaling = None

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How fine the roundings are, and how far trainer and engine may differ."""

        engine: Literal["bfloat16", "float16"] = "bfloat16"
        """Type the engine computes in. `float16` rounds eight times finer; values above 65,504 are
        lost in it, so that a model with such activations stops with log-probs that are not finite.
        """
        residual: Literal["bfloat16", "float32"] = "bfloat16"
        """Type in which the trainer's forward adds up what its layers say; products stay in
        bfloat16. `float32` takes twice the memory where layers meet."""
        logits: Literal["bfloat16", "float32"] = "bfloat16"
        """Type in which logits leave the output head in trainer and engine. SGLang copies its head
        to float32 at every forward for it."""
        budget_max: float = 1.0
        """Largest difference of a token's log-prob, in nats."""
        budget_mean: float = 0.1
        """Largest mean difference over a step, in nats."""

    def __init__(self, config: Config, context: Context) -> None:
        self.engine, self.residual, self.logits = config.engine, config.residual, config.logits
        self.budget = Budget(max=config.budget_max, mean=config.budget_mean)

    def fingerprint(self) -> str:
        """Equal exactly where stages and finer places are equal."""
        return fingerprint(self)
