"""Weights of a Hugging Face directory, as a trainer would export them.

It looks at names and types only; which tensors an engine needs is `decoder`'s affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from miles import WeightSyncError

__all__ = ["read_weights"]


def read_weights(directory: Path, *, export: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every safetensors file, numbers with a point in the type `export`, so that
    an engine gets the same bits as from a publish. Raises `WeightSyncError` naming a file that is
    missing or damaged."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightSyncError(f"{directory} holds no safetensors files")
    for file in files:
        try:
            with safe_open(file, framework="pt") as held:
                for name in held.keys():  # noqa: SIM118 - not a mapping
                    tensor = held.get_tensor(name)
                    yield name, tensor.to(export) if tensor.is_floating_point() else tensor
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"cannot read {file}: {error}") from error
