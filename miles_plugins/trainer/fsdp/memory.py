"""Keeps freed memory in the process, so that every step does not fault the same pages in again.

Only for CPU training with the GNU C library; elsewhere it does nothing.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameters of `mallopt`, from `malloc.h`."""
KEEP_BYTES = 512 * 2**20
"""Free memory that stays with the process."""
MAP_BYTES = 256 * 2**20
"""An array of this size or more is mapped by itself and given back when it is freed."""


def keep_freed_memory() -> bool:
    """Raise the limits at which the C library gives memory back to the system; whether it did.

    By default an activation of a few MiB is given back as soon as it is freed, and costs a page
    fault every 4 KiB when the next step asks for it again.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES) and mallopt(M_MMAP_THRESHOLD, MAP_BYTES))
