"""A residual stream in float32 around layers that compute in a narrower type.

Layers add what they say to the stream, and every one of those sums is rounded to the stream's type:
sixty times in thirty layers. With `widen` the stream is float32 and each norm hands its layer the
narrower type, so that products stay as fast and nothing is rounded twice. Only hooks are added, to
instances.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from miles.errors import ConfigError

__all__ = ["widen"]


def widen(model: nn.Module, compute: torch.dtype) -> int:
    """Make embeddings float32 as they leave their table, and what norms make of the stream
    `compute`; how many norms there are.

    Positions follow the stream's type, so that queries and keys are rotated in float32 as well.
    Raises `ConfigError` for a model without norms that are one vector, whose layers would get
    float32, and for one with torch's `LayerNorm`, which takes no other type than its weights'.
    """
    norms = [module for module in model.modules() if _is_norm(module)]
    strict = any(isinstance(module, nn.LayerNorm) for module in model.modules())
    if strict or not norms:
        why = "torch's LayerNorm, which takes no other type than its weights'"
        if not strict:
            why = "no norms that could hand its layers another type"
        raise ConfigError(
            f"precision: residual is float32, but {type(model).__name__} has {why}; use "
            f"precision.residual={str(compute).removeprefix('torch.')}"
        )
    model.get_input_embeddings().register_forward_hook(_float)  # type: ignore[operator]
    for norm in norms:
        norm.register_forward_hook(_Narrow(compute))
    for module in model.modules():  # where norms come after layers, the stream itself is given
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_fit)
    return len(norms)


def _is_norm(module: nn.Module) -> bool:
    """Norms of `transformers` have the names of their kind, and one vector."""
    own = [name for name, _ in module.named_parameters()]
    return type(module).__name__.endswith("Norm") and own in (["weight"], ["weight", "bias"])


def _float(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out.float()


def _fit(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].to(module.weight.dtype), *args[1:])


class _Narrow:
    """A hook that rounds a module's result."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out.to(self._dtype)
