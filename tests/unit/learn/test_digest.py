"""Digests of tensors, against the same sum in Python's own integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.learn import digest
from miles.learn.digest import contents

ALL = (1 << 64) - 1


def reference(data: bytes) -> str:
    """The sum of mixed words, as `miles.learn.digest` describes it."""
    data += bytes(-len(data) % 8)
    total = 0
    for place, word in enumerate(np.frombuffer(data, np.uint64).tolist(), start=1):
        # shifts of signed words, as torch's are, carry the sign along
        mixed = ((place * 0x9E3779B97F4A7C15) & ALL) ^ word
        mixed = (mixed * 0xBF58476D1CE4E5B9) & ALL
        mixed ^= (mixed - ((mixed >> 63) << 64) >> 32) & ALL
        mixed = (mixed * 0x94D049BB133111EB) & ALL
        mixed ^= (mixed - ((mixed >> 63) << 64) >> 29) & ALL
        total += mixed
    return f"{total & ALL:016x}"


def made(size: int, seed: int) -> torch.Tensor:
    """(size,) int32 of any bits."""
    bits = np.random.default_rng(seed).integers(-(2**31), 2**31, size)
    return torch.tensor(bits.tolist(), dtype=torch.int32)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 24))
def test_contents_are_the_sums_of_words_mixed_with_their_places(
    sizes: list[int], together: int
) -> None:
    tensors = [made(size, seed) for seed, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:  # tensors of both kinds: cut, and mixed together
        patch.setattr(digest, "_WORDS", {"cpu": together})
        patch.setattr(digest, "_keys", {})
        assert contents(tensors) == [reference(t.numpy().tobytes()) for t in tensors]


def test_contents_of_tensors_together_are_those_of_each_alone() -> None:
    tensors = [made(3, 0), made(1 << 18, 1), made(64, 2).view(8, 8).t(), made(5, 3)[1:], made(0, 4)]
    assert contents(tensors) == [contents([tensor])[0] for tensor in tensors]
