"""What is verified before a turn is stored: that it extends the stored tokens, and does not
contradict itself.

Nothing is repaired here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from miles.errors import TokenMismatch
from miles.types import Array, Completion

__all__ = ["check_extends", "faults_of"]

_INT32 = np.dtype(np.int32)
_CONTEXT = 8  # tokens decoded on each side of the first that differs


def check_extends(
    stored: Array, given: Array, *, where: str, decode: Callable[[Array], str]
) -> None:
    """Raise `TokenMismatch` unless both are the same tokens."""
    if np.array_equal(stored, given):
        return
    shared = min(len(stored), len(given))
    differs = np.flatnonzero(stored[:shared] != given[:shared])
    index = int(differs[0]) if len(differs) else shared
    window = slice(max(0, index - _CONTEXT), index + _CONTEXT)
    raise TokenMismatch(
        f"{where}: the tokens it was sampled after do not extend the stored ones: token {index} "
        f"differs ({len(stored)} stored, {len(given)} given): stored {decode(stored[window])!r}, "
        f"given {decode(given[window])!r}"
    )


def faults_of(completion: Completion, oldest: int) -> str:
    """What is wrong with it, or nothing: lengths that disagree, spans that do not tile the tokens,
    versions that fall, also below `oldest`."""
    tokens = completion.tokens
    size = len(tokens)
    if tokens.dtype != _INT32:
        return f"{tokens.dtype} tokens, not int32"
    for values in (completion.logprobs, completion.truncated_logprobs, completion.experts):
        if values is not None and len(values) != size:
            return f"{len(values)} per-token values for {size} sampled tokens"
    at, version = 0, oldest
    for span in completion.spans:
        if span.start != at or span.stop <= at:
            return f"span [{span.start}, {span.stop}) does not follow token {at}"
        if span.version < version:
            return f"sampled under version {span.version} after version {version}"
        at, version = span.stop, span.version
    return "" if at == size else f"spans cover {at} of {size} sampled tokens"
