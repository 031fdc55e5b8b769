"""A digest of tensors that is the same on every device and cheap where the tensors are.

It proves that bytes arrived, against damage and mistakes; it is no cryptographic hash and keeps
nobody out who wants in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["Whole", "contents", "dtype_name", "hexadecimal", "sums"]

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORDS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""8-byte words that are mixed at a time: so many that a busy interpreter is waited for rarely, what
keeps a GPU busy."""
_keys: dict[torch.device, Tensor] = {}


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that has it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _words(tensor: Tensor) -> Tensor:
    """(words,) int64: the bytes of a tensor, filled up with zeros."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = -(-flat.numel() // 8) * 8
    if whole == flat.numel() and flat.storage_offset() % 8 == 0 and flat.data_ptr() % 8 == 0:
        return flat.view(torch.int64)
    filled = torch.zeros(whole, dtype=torch.uint8, device=flat.device)
    filled[: flat.numel()] = flat
    return filled.view(torch.int64)


def _mixed(words: Tensor, keys: Tensor) -> Tensor:
    """(words,) int64: each word mixed with the key of its place (two rounds of a multiplication and
    a shift, as in splitmix64), which is overwritten."""
    keys ^= words
    keys *= _signed(_FIRST)
    keys ^= keys >> 32
    keys *= _signed(_SECOND)
    keys ^= keys >> 29
    return keys


def _keys_of(device: torch.device) -> Tensor:
    """(words,) int64: keys of the first places, as many as are mixed at a time."""
    keys = _keys.get(device)
    if keys is None:
        size = _WORDS.get(device.type, 1 << 20)
        keys = torch.arange(1, size + 1, device=device) * _signed(_GOLDEN)
        _keys[device] = keys
    return keys


def _sum(words: Tensor) -> Tensor:
    """() int64: the sum, modulo 2**64, of each word mixed with its place, so that its order decides
    nothing."""
    keys = _keys_of(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for index, part in enumerate(torch.split(words, len(keys))):
        total += _mixed(part, keys[: len(part)] + _signed(_GOLDEN * index * len(keys))).sum()
    return total


def _sums(words: Sequence[Tensor]) -> list[Tensor]:
    """As `_sum`, of several that are mixed in one go."""
    if len(words) < 2:
        return [_sum(each) for each in words]
    keys, sizes = _keys_of(words[0].device), [len(each) for each in words]
    mixed = _mixed(torch.cat(list(words)), torch.cat([keys[:size] for size in sizes]))
    return [part.sum() for part in torch.split(mixed, sizes)]


def dtype_name(tensor: Tensor) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def contents(tensors: Sequence[Tensor]) -> list[str]:
    """16 hex digits for each tensor, of its bytes in row-major order; one wait for the device for
    all of them."""
    return hexadecimal(sums(tensors))


def sums(tensors: Iterable[Tensor]) -> list[Tensor]:
    """() int64 for each tensor, where it lies; `hexadecimal` makes their digests. Neighbours that
    are small are mixed together."""
    found: list[Tensor] = []
    small: list[Tensor] = []
    room = 0
    for tensor in tensors:
        words = _words(tensor)
        if small and (len(words) > room or words.device != small[0].device):
            found += _sums(small)
            small = []
        if not small:
            room = len(_keys_of(words.device))
        small.append(words)
        room -= len(words)
    return found + _sums(small)


def hexadecimal(found: Sequence[Tensor]) -> list[str]:
    """Digests of `sums`."""
    values = torch.stack(list(found)).tolist() if found else []
    return [f"{value & ((1 << 64) - 1):016x}" for value in values]


class Whole:
    """BLAKE2b of every tensor's name, type, shape and content, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, name: str, dtype: str, shape: Iterable[int], content: str) -> None:
        """Count one tensor in."""
        said = f"{name}\0{dtype}\0{','.join(map(str, shape))}\0{content}\0"
        self._hash.update(said.encode())

    def end(self) -> str:
        """32 hex digits of everything added."""
        return self._hash.hexdigest()
