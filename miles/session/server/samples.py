"""What a session recorded, as JSON or as one safetensors file, for trainers that are not miles.

Reads samples and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from miles.types import Array, Sample

__all__ = ["SAFETENSORS", "as_json", "as_safetensors"]

SAFETENSORS = "application/vnd.safetensors"
"""Media type; any that names safetensors is taken in an `Accept` header."""


def _versions(sample: Sample) -> Array:
    """(tokens,) int32: the weight version of each sampled token, -1 elsewhere."""
    versions = np.full(len(sample.tokens), -1, np.int32)  # (tokens,) int32
    for span in sample.spans:
        versions[span.start : span.stop] = span.version
    return versions


def as_json(samples: Sequence[Sample], *, reward: float) -> bytes:
    """`{"samples": [{"tokens", "sampled", "trainable", "logprobs", "versions", "reward",
    "finish"}]}`, one value a token in each list; `logprobs` is null for demonstrations."""
    made = [
        {
            "tokens": sample.tokens.tolist(),
            "sampled": sample.sampled.tolist(),
            "trainable": sample.trainable.tolist(),
            "logprobs": None if sample.logprobs is None else sample.logprobs.tolist(),
            "versions": _versions(sample).tolist(),
            "reward": reward,
            "finish": sample.finish,
        }
        for sample in samples
    ]
    return msgspec.json.encode({"samples": made})


def as_safetensors(samples: Sequence[Sample], *, reward: float) -> bytes:
    """Tensors `samples.N.tokens`, `.sampled`, `.trainable`, `.logprobs`, `.versions`, `.reward`,
    and where there are some `.truncated_logprobs` and `.experts`; `.finish` is in the metadata."""
    from safetensors.numpy import save

    tensors: dict[str, Array] = {}
    metadata = {"samples": str(len(samples))}
    for number, sample in enumerate(samples):
        head = f"samples.{number}"
        values: dict[str, Any] = {
            "tokens": sample.tokens,
            "sampled": sample.sampled,
            "trainable": sample.trainable,
            "logprobs": sample.logprobs,
            "versions": _versions(sample),
            "reward": np.array([reward], np.float32),  # (1,) float32
            "truncated_logprobs": sample.truncated_logprobs,
            "experts": sample.experts,
        }
        for name, value in values.items():
            if value is not None:
                tensors[f"{head}.{name}"] = np.ascontiguousarray(value)
        metadata[f"{head}.finish"] = sample.finish
    return bytes(save(tensors, metadata))
