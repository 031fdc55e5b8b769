"""Whether a folder can be written, told before anything is, and without creating it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["unwritable"]

_KERNELS = (Path("/proc"), Path("/sys"))
"""File systems in which root is told that it may write, and nobody can."""


def unwritable(folder: str | Path) -> str:
    """Why nothing can be written in a folder that is there or would be made; empty when it can."""
    path = Path(folder).absolute()
    parent = path
    while not os.path.lexists(parent):
        parent = parent.parent
    if not os.path.isdir(parent):  # false also where looking is forbidden
        below = "" if parent == path else f"{parent} "
        return f"{path}: {below}is not a folder"
    real = parent.resolve()
    if any(real.is_relative_to(kernel) for kernel in _KERNELS) or not os.access(
        parent, os.W_OK | os.X_OK
    ):
        return f"{path}: {parent} cannot be written"
    return ""
