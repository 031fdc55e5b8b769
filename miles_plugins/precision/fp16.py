"""float16 compute over float32 masters, with a scaled loss.

Data only; what computes lives in the trainer and the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from miles import Budget, ConfigError, Context, LossScaling
from miles_plugins.precision.stages import fingerprint

__all__ = ["Fp16"]

UNFIT = ("gemma2", "gemma3", "gemma3_text", "glm4", "plamo2")
"""`model_type`s whose activations leave float16's range; vLLM refuses the same ones."""


class Fp16:
    """float32 masters; float16 in the trainer's forward and backward, in the engine and on the way
    between them, with a scaled loss.

    float16 rounds eight times finer than bfloat16, in trainer and engine alike, so that their
    log-probs agree that much better (Qi et al. 2025, arXiv:2510.26788). What it lacks is range:
    gradients below 6e-8 would be lost, which scaling the loss prevents, and activations above
    65,504 are, which nothing prevents. The budget is twice what SmolLM2-135M differed by on a CPU,
    and more (docs/measurements.md, float16 against bfloat16).
    """

    master = "float32"
    compute = engine = export = "float16"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How the loss is scaled, and how far trainer and engine may differ."""

        residual: Literal["float16", "float32"] = "float16"
        """Type in which the trainer's forward adds up what its layers say; products stay in
        float16. `float32` takes twice the memory where layers meet."""
        logits: Literal["float16", "float32"] = "float32"
        """Type in which logits leave the output head in trainer and engine. SGLang copies its head
        to float32 at every forward for `float32`."""
        loss_scale: float = 65536.0
        """What the loss is multiplied by at first; a power of two, as the two factors are."""
        scale_growth: float = 2.0
        """Factor of the scale after `scale_interval` good steps in a row."""
        scale_backoff: float = 0.5
        """Factor of the scale after a step whose gradients overflowed, which changes no weight."""
        scale_interval: int = 2000
        """Good steps in a row before the scale grows."""
        budget_max: float = 0.15
        """Largest difference of a token's log-prob, in nats."""
        budget_mean: float = 0.01
        """Largest mean difference over a step, in nats."""

    @classmethod
    def check(cls, config: Config, planned: Any = None) -> list[str]:
        """Factors that would round a gradient or never adapt, and models that float16 cannot
        hold."""
        faults = [
            f"{name} is {value}; a power of two from {of}, so that scaling rounds nothing"
            for name, value, good, of in (
                ("loss_scale", config.loss_scale, 1 <= config.loss_scale <= 2**32, "1 to 2**32"),
                ("scale_growth", config.scale_growth, config.scale_growth >= 1, "1"),
                ("scale_backoff", config.scale_backoff, 0 < config.scale_backoff < 1, "0 to 0.5"),
            )
            if not (good and math.isfinite(value) and math.frexp(value)[0] == 0.5)
        ]
        if config.scale_interval < 1:
            faults.append(f"scale_interval is {config.scale_interval}; at least 1")
        model = None if planned is None else planned.built.get("model")
        kind = "" if model is None else model.hf_config().get("model_type", "")
        if kind in UNFIT:
            faults.append(
                f"models of type {kind} have activations above 65,504, the largest number of "
                "float16; use precision=bf16"
            )
        return faults

    def __init__(self, config: Config, context: Context) -> None:
        if faults := self.check(config):
            raise ConfigError(f"precision fp16: {'; '.join(faults)}")
        self.residual, self.logits = config.residual, config.logits
        self.budget = Budget(max=config.budget_max, mean=config.budget_mean)
        self.scaling = LossScaling(
            initial=config.loss_scale,
            growth=config.scale_growth,
            backoff=config.scale_backoff,
            interval=config.scale_interval,
        )

    def fingerprint(self) -> str:
        """Equal exactly where stages and finer places are equal."""
        return fingerprint(self)
