"""Model FLOPs of a step, and their share of what the device can do.

Only counts and divides; when to ask the clock is `worker`'s business.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from miles import Array, ConfigError, Model

__all__ = ["Cost", "Work", "peak_tflops"]

_log = logging.getLogger(__name__)

PEAKS = (
    ("B200", 2250.0),
    ("B300", 2250.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H200", 989.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("GH200", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)
"""Dense TFLOP/s in bfloat16 and in float16 by a part of the device's name, as the vendor's data
sheets say; the first that fits counts."""


def peak_tflops(device_name: str) -> float | None:
    """Dense TFLOP/s of a device in bfloat16 and in float16; None when it is not in the table."""
    return next((peak for part, peak in PEAKS if part in device_name), None)


class Work(NamedTuple):
    """What a pass computes."""

    tokens: float
    """Tokens through the blocks."""
    pairs: float
    """(query, key) pairs that attention scores, in a layer without a window."""
    rows: int
    """Tokens through the output head."""


class Cost:
    """Floating-point operations of a model, from its modules and configuration.

    A weight matrix costs 2 operations a token and entry (one product, one sum), attention 4 × heads
    × head size for each pair of a query and a key that it sees: products with keys and with values.
    A backward pass costs twice its forward pass. This is the count of Chowdhery et al. 2022 (PaLM,
    arXiv:2204.02311, appendix B), except that only pairs a causal mask (or a window) leaves count,
    and that the head counts where it is used; recomputed activations never count. Of experts those
    that a token visits count, embeddings that are only looked up do not.
    """

    def __init__(self, model: nn.Module, registration: Model) -> None:
        hf_config = registration.hf_config()
        hf_config = hf_config.get("text_config") or hf_config
        share = _visited_share(hf_config)
        embeddings = {id(model.get_input_embeddings().weight)}
        head = model.get_output_embeddings().weight
        self.head = head.numel()
        self.blocks = 0.0
        seen = {*embeddings, id(head)}
        for name, weight in model.named_parameters():
            if id(weight) not in seen and weight.ndim >= 2:
                seen.add(id(weight))
                self.blocks += weight.numel() * (share if ".experts." in name else 1.0)
        layers, heads, self.head_dim = _attention(registration, hf_config)
        if not heads:
            _log.warning(
                "model %s does not say its heads: attention is not counted as work",
                type(model).__name__,
            )
        self.pair = 4.0 * layers * heads * self.head_dim

    def forward(self, work: Work) -> float:
        """Operations of a forward pass."""
        return 2.0 * (self.blocks * work.tokens + self.head * work.rows) + self.pair * work.pairs

    def train(self, work: Work) -> float:
        """Operations of a forward and a backward pass."""
        return 3.0 * self.forward(work)

    def of_samples(self, lengths_S: Array) -> Array:
        """(S,) float64: forward operations of whole samples, to balance them by."""
        lengths = np.asarray(lengths_S, np.float64)
        return 2.0 * (self.blocks + self.head) * lengths + self.pair * lengths * (lengths + 1) / 2


def _attention(registration: Model, hf_config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Layers, heads and the size of a head, as the family's registration says, or where the
    embedded engine does not run it, its config under the usual names; zeros where neither does."""
    try:
        shape = registration.decoder()
    except ConfigError:
        layers, heads = (
            int(hf_config.get(name) or 0) for name in ("num_hidden_layers", "num_attention_heads")
        )
        width = int(hf_config.get("hidden_size") or 0) // heads if heads else 0
        return layers, heads, int(hf_config.get("head_dim") or width)
    return shape.layers, shape.heads, shape.head_dim


def _visited_share(hf_config: Mapping[str, Any]) -> float:
    """Share of a layer's experts that a token visits."""
    experts = hf_config.get("num_experts") or hf_config.get("num_local_experts") or 0
    chosen = hf_config.get("num_experts_per_tok") or 0
    return chosen / experts if experts and chosen else 1.0
