"""The Llama family: Llama 2 and 3 checkpoints without scaled positions, SmolLM2, TinyLlama and
their like.

Names and numbers only.
"""

from __future__ import annotations

from miles_plugins.model.checkpoint import Dense

__all__ = ["Llama"]


class Llama(Dense):
    """Llama-type decoders, SmolLM2 among them."""

    family = "llama"
    architecture = "LlamaForCausalLM"
    qk_norm = False
