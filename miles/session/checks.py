"""What is verified before a turn is stored: that it extends the stored tokens, and does not
contradict itself.

Nothing is repaired here; a fault is an error with its first place.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from miles.errors import EngineError, TokenMismatch
from miles.types import Array, Completion

__all__ = ["check_completion", "check_extends"]

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


def check_completion(completion: Completion, where: str, oldest: int) -> None:
    """Raise `EngineError` unless lengths agree, spans tile the tokens, and versions do not fall,
    below `oldest` neither."""
    tokens = completion.tokens
    size = len(tokens)
    if tokens.dtype != np.int32:
        raise EngineError(f"{where}: the engine gave {tokens.dtype} tokens, not int32")
    for values in (completion.logprobs, completion.truncated_logprobs, completion.experts):
        if values is not None and len(values) != size:
            raise EngineError(f"{where}: {len(values)} per-token values for {size} sampled tokens")
    at, version = 0, oldest
    for span in completion.spans:
        if span.start != at or span.stop <= at:
            raise EngineError(
                f"{where}: span [{span.start}, {span.stop}) does not follow token {at}; spans tile "
                "the sampled tokens"
            )
        if span.version < version:
            raise EngineError(
                f"{where}: sampled under version {span.version} after version {version}"
            )
        at, version = span.stop, span.version
    if at != size:
        raise EngineError(f"{where}: spans cover {at} of {size} sampled tokens")
