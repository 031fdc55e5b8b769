"""The Qwen3 family, dense.

Names and numbers only; the mixture-of-experts family is another `model_type` and not this one.
"""

from __future__ import annotations

from miles_plugins.model.checkpoint import Dense

__all__ = ["Qwen3"]


class Qwen3(Dense):
    """Dense Qwen3: grouped queries, per-head norm on queries and keys."""

    family = "qwen3"
    architecture = "Qwen3ForCausalLM"
    qk_norm = True
