"""Where pieces of ids and texts begin and end.

Knows no tokenizer and no markup.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles import Array

__all__ = ["after_last", "as_sampled", "shared"]

_BLOCK = 4096  # ids looked at in one go, from the end


def shared(one: Sequence[int], two: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return index
    return min(len(one), len(two))


def after_last(stored: Array, opening: Sequence[int]) -> list[int]:
    """What follows the last `opening` in (tokens,) int32, all of it where there is none; looks at
    no more than that."""
    low = len(stored)
    while low > 0:
        high, low = low, max(0, low - _BLOCK)
        for at in np.flatnonzero(stored[low:high] == opening[0])[::-1]:
            start = low + int(at)
            if stored[start : start + len(opening)].tolist() == list(opening):
                return list(stored[start + len(opening) :].tolist())
    return list(stored.tolist())


def as_sampled(piece: str, text: str, start: int) -> tuple[str, int]:
    """A stripped piece of a text with the white space around it, and where it ends; the piece as
    it is when the text, from `start` on, does not hold it."""
    at = text.find(piece, start) if piece else -1
    if at < 0:
        return piece, start
    end = at + len(piece)
    while at > start and text[at - 1].isspace():
        at -= 1
    while end < len(text) and text[end].isspace():
        end += 1
    return text[at:end], end
