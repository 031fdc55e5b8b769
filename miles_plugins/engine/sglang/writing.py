"""Weights that come as tensors, as files that a server can read.

It writes what it is given; which names belong to a model is the trainer's affair.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from miles import WeightSyncError
from miles_plugins.engine.sglang.server import write_json

__all__ = ["written"]

_FILE_BYTES = 4 << 30


@asynccontextmanager
async def written(
    model: Any, weights: Iterable[tuple[str, Any]], folder: Path
) -> AsyncIterator[Path]:
    """A Hugging Face directory of (name, tensor) weights, for as long as the block lasts. Raises
    `WeightSyncError` when it cannot be written."""
    # In a thread, which nothing can cancel: who is cancelled leaves when it has ended.
    writing = asyncio.ensure_future(asyncio.to_thread(_directory, model, weights, folder))
    try:
        try:
            await asyncio.shield(writing)
        except OSError as error:
            raise WeightSyncError(f"engine sglang: {folder}: {error}") from error
        yield folder
    finally:
        await asyncio.gather(writing, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _directory(model: Any, weights: Iterable[tuple[str, Any]], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", model.hf_config())
    _files(weights, folder)


def _files(weights: Iterable[tuple[str, Any]], folder: Path) -> None:
    """Several files, each up to 4 GB or one tensor, and their index."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    held: dict[str, Any] = {}
    where: dict[str, str] = {}
    size = total = 0

    def flush() -> None:
        name = f"model-{len(set(where.values())):05d}.safetensors"
        try:
            save_file(held, str(folder / name))
        except SafetensorError as error:  # what it makes of a full disk
            raise OSError(f"{name}: {error}") from error
        where.update(dict.fromkeys(held, name))
        held.clear()

    for name, tensor in weights:
        if name in where or name in held:
            raise WeightSyncError(f"engine sglang: {name} came twice")
        if held and size + tensor.nbytes > _FILE_BYTES:
            flush()
            size = 0
        # a copy: files refuse tensors that share memory
        held[name] = tensor.detach().cpu().contiguous().clone()
        size += tensor.nbytes
        total += tensor.nbytes
    if held:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    write_json(folder / "model.safetensors.index.json", index)
