"""Weights as they come, made into those that a forward uses.

It changes nothing that is served, so it may run in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import torch

from miles import Decoder
from miles_plugins.engine.torch.decoder import Parameters, collect, fuse, wanted

__all__ = ["size", "taken"]


def size(decoder: Decoder, dtype: torch.dtype) -> int:
    """Bytes of all weights."""
    return sum(prod(shape) for shape in wanted(decoder).values()) * dtype.itemsize


def taken(
    decoder: Decoder,
    engine_name: Callable[[str], str | None],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[dict[str, str], Parameters]:
    """Canonical names with those under which tensors came, and the fused weights. Raises
    `WeightSyncError` as `collect`."""
    names: dict[str, str] = {}

    def named(name: str) -> str | None:
        if (canonical := engine_name(name)) is not None:
            names[canonical] = name
        return canonical

    found = collect(decoder, named, weights)
    return names, fuse(decoder, found, dtype=dtype, device=device)
