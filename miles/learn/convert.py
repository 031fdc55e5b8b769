"""The one conversion of a trainer's weights into those of a Hugging Face checkpoint, as engines and
files take them.

Trainers export through it and every transport moves what it gives. It gathers no shards and reads
no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Conversion"]


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

    def shapes(self, name: str, tensor: Tensor) -> dict[str, torch.Size]:
        """What a checkpoint has for one weight of the module, found without its numbers."""
        if self._module is None:
            return {name: tensor.shape}
        bare = self._reverted(name, torch.empty_like(tensor, device="meta"))
        return {n: t.shape for n, t in bare.items()}

    def places(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """For each of `shapes`, (elements,) int64: where they are in the flattened weight."""
        where = torch.arange(tensor.numel()).view(tensor.shape)  # of the weight's shape, int64
        return {n: t.flatten() for n, t in self._reverted(name, where).items()}

    def _changed(self, name: str, tensor: Tensor) -> bool:
        """Whether a checkpoint has it otherwise; looked up once."""
        if name not in self._changes:
            self._changes[name] = self.shapes(name, tensor) != {name: tensor.shape}
        return self._changes[name]

    def _reverted(self, name: str, tensor: Tensor) -> dict[str, Any]:
        from transformers.core_model_loading import revert_weight_conversion

        # any module carries the conversions that apply to it
        found: dict[str, Any] = revert_weight_conversion(self._module, {name: tensor})  # type: ignore[arg-type]
        return found


def _repeated(module: nn.Module) -> frozenset[str]:
    """Names under which a weight appears again."""
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return frozenset(
        name for name, tensor in state.items() if first.setdefault(id(tensor), name) != name
    )
