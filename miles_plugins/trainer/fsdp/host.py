"""Host memory that a GPU copies to and from at full speed: pinned arrays, and arrays mapped to a
file.

It only allocates; what lies there is decided in `evict` and `streaming`.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from miles import TrainerError

__all__ = ["host_array", "mapped_array"]

_log = logging.getLogger(__name__)


def host_array(size: int, dtype: torch.dtype, *, pin: bool) -> Tensor:
    """(size,) of `dtype` on the CPU, uninitialised; locked in memory for a GPU's copies when `pin`.

    Memory is locked as it is, because torch's own pinned allocator rounds up to a power of two.
    Where the system refuses to lock it, that is logged, and copies are slower.
    """
    array = torch.empty(size, dtype=dtype)
    if pin and size:
        cudart = torch.cuda.cudart()
        address = array.data_ptr()
        code = int(cudart.cudaHostRegister(address, array.nbytes, 0))
        if code:
            _log.warning(
                "cannot pin %d bytes of host memory (CUDA error %d): copies to and from the GPU "
                "will be slower; raise the limit of locked memory (ulimit -l)",
                array.nbytes,
                code,
            )
        else:
            weakref.finalize(array.untyped_storage(), cudart.cudaHostUnregister, address)
    return array


def mapped_array(size: int, dtype: torch.dtype, directory: Path) -> Tensor:
    """(size,) of `dtype`, zeros, mapped to a file below `directory` that has no name any more, so
    that nothing is left of it when the process ends.

    Its whole size is reserved at once: a disk that is too small is a `TrainerError` here, and not a
    crash in the middle of a step.
    """
    nbytes = size * dtype.itemsize
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix="optimizer_", dir=directory)
        try:
            if nbytes:
                os.posix_fallocate(descriptor, 0, nbytes)
            return torch.from_file(name, shared=True, size=size, dtype=dtype)
        finally:
            os.close(descriptor)
            os.unlink(name)
    except OSError as error:
        raise TrainerError(
            f"trainer fsdp: cannot keep {nbytes} bytes of optimizer state in {directory}: {error}"
        ) from error
