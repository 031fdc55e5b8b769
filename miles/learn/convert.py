"""The one conversion of a trainer's weights into those of a Hugging Face checkpoint, as engines and
files take them.

Trainers export through it and every transport moves what it gives. It gathers no shards and reads
no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Conversion", "Parts"]

_OPEN = 4
"""Weights in parts whose places are kept."""


class Conversion:
    """From the names and shapes of one module of `transformers` to those of its checkpoints.

    `transformers` keeps some weights otherwise than checkpoints do (the experts of a layer in one
    tensor, for one); its own mapping is applied backwards, a tensor at a time, so that nothing is
    held twice. Tied weights are exported once, under their first name. Buffers that a checkpoint
    has and frozen weights are exported like all others.
    """

    def __init__(self, module: nn.Module | None) -> None:
        """None: the names are already those of the checkpoint."""
        self._module = module
        self._tied = frozenset() if module is None else _repeated(module)
        self._changes: dict[str, bool] = {}

    def stream(
        self, weights: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor), floating-point ones in `dtype`, of whole (name, tensor) of
        the module, in their order."""
        for name, full in weights:
            if name in self._tied:
                continue
            tensor = full.detach()
            if tensor.is_floating_point():
                tensor = tensor.to(dtype)
            if self._changed(name, tensor):
                yield from self._reverted(name, tensor).items()
            else:
                yield name, tensor

    def shapes(self, name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """What a checkpoint has for one weight of the module, found without its numbers."""
        if self._module is None:
            return {name: tuple(shape)}
        bare = self._reverted(name, torch.empty(tuple(shape), device="meta"))
        return {n: tuple(t.shape) for n, t in bare.items()}

    def places(self, name: str, shape: Sequence[int]) -> dict[str, Tensor]:
        """For each of `shapes`, (elements,) int64: where they are in the flattened weight."""
        where = torch.arange(math.prod(shape)).view(tuple(shape))  # of the weight's shape, int64
        return {n: t.flatten() for n, t in self._reverted(name, where).items()}

    def _changed(self, name: str, tensor: Tensor) -> bool:
        """Whether a checkpoint has it otherwise; looked up once."""
        if name not in self._changes:
            self._changes[name] = self.shapes(name, tensor.shape) != {name: tuple(tensor.shape)}
        return self._changes[name]

    def _reverted(self, name: str, tensor: Tensor) -> dict[str, Any]:
        from transformers.core_model_loading import revert_weight_conversion

        # any module carries the conversions that apply to it
        found: dict[str, Any] = revert_weight_conversion(self._module, {name: tensor})  # type: ignore[arg-type]
        return found


class Parts:
    """Weights that checkpoints have in parts, such as a layer's experts, one by one."""

    def __init__(self, conversion: Conversion, wanted: Mapping[str, Sequence[int]]) -> None:
        """`wanted` is the shape of every weight of the module."""
        self._conversion = conversion
        self.wanted = wanted
        """Weight to its shape."""
        self._places: dict[str, dict[str, Tensor]] = {}
        self.whole: dict[str, str] = {}
        """Part to its weight."""
        self.names: dict[str, tuple[str, ...]] = {}
        """Weight to the names of its parts."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of each part."""
        for name, shape in wanted.items():
            found = conversion.shapes(name, shape)
            if set(found) != {name}:
                self.names[name] = tuple(found)
                self.shapes |= found
                self.whole |= dict.fromkeys(found, name)

    def put(self, name: str, part: Tensor, target: Tensor) -> None:
        """Write a part into its weight, which is contiguous."""
        whole = self.whole[name]
        if whole not in self._places:
            while len(self._places) >= _OPEN:  # files have one layer after the other
                del self._places[next(iter(self._places))]
            self._places[whole] = self._conversion.places(whole, self.wanted[whole])
        where = self._places[whole][name].to(target.device)
        target.view(-1)[where] = part.flatten().to(target)


def _repeated(module: nn.Module) -> frozenset[str]:
    """Names under which a weight appears again."""
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return frozenset(
        name for name, tensor in state.items() if first.setdefault(id(tensor), name) != name
    )
