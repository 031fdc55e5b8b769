"""The Qwen3 family, dense.

Names and numbers only; the mixture-of-experts family is another `model_type` and not this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_plugins.model.checkpoint import Dense
from miles_plugins.model.registered import Qwen3Moe

__all__ = ["Qwen3"]


class Qwen3(Dense):
    """Dense Qwen3: grouped queries, per-head norm on queries and keys."""

    family = "qwen3"
    architecture = "Qwen3ForCausalLM"
    qk_norm = True
    tito = "qwen3"

    @classmethod
    def choose_tito(cls, config: Mapping[str, Any]) -> str:
        """Bytes for a random model; for a checkpoint the handler that its chat template shows."""
        chosen = super().choose_tito(config)
        return Qwen3Moe.choose_tito(config) if chosen == cls.tito else chosen
