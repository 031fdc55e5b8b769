"""Weights as they come, made into those that a forward uses.

It changes nothing that is served, so it may run in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod

import torch

from miles import Decoder
from miles.learn.digest import contents
from miles_plugins.engine.torch.decoder import Parameters, collect, fuse, wanted

__all__ = ["Origins", "size", "taken"]

Origins = dict[str, tuple[str, str]]
"""By the name under which it came, of a tensor that the engine's type cannot hold: the digest of
what it is rounded to, in the type in which it came, and of what came."""


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
) -> tuple[dict[str, str], Origins, Parameters]:
    """Canonical names with those under which tensors came, digests of those that `dtype` rounds,
    and the fused weights. Raises `WeightSyncError` as `collect`."""
    names: dict[str, str] = {}
    origins: Origins = {}

    def named(name: str) -> str | None:
        if (canonical := engine_name(name)) is not None:
            names[canonical] = name
        return canonical

    found = collect(decoder, named, _noted(weights, dtype, origins))
    return names, origins, fuse(decoder, found, dtype=dtype, device=device)


def _noted(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, origins: Origins
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if torch.promote_types(tensor.dtype, dtype) != dtype:
            made, came = contents([tensor.to(dtype).to(tensor.dtype), tensor])
            origins[name] = made, came
        yield name, tensor
