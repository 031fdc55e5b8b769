"""What a completion must be, and when two are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles.testing.contract.case import expect
from miles.types import Array, Completion

__all__ = ["expect_equal", "expect_whole"]


def expect_equal(one: Completion, two: Completion, what: str) -> None:
    same = np.array_equal(one.tokens, two.tokens)
    expect(same, f"{what}: tokens {one.tokens.tolist()} and {two.tokens.tolist()}")
    for name in ("logprobs", "truncated_logprobs"):
        a, b = getattr(one, name), getattr(two, name)
        same = (a is None and b is None) or np.array_equal(a, b)
        expect(same, f"{what}: the tokens are equal, their {name} differ by {_worst(a, b)}")


def _worst(a: Array | None, b: Array | None) -> str:
    if a is None or b is None:
        return "one being None"
    return f"{float(np.abs(a - b).max()):.3g}"


def expect_whole(completion: Completion, engine: Any) -> None:
    size = len(completion.tokens)
    expect(completion.tokens.dtype == np.int32, f"tokens are {completion.tokens.dtype}, not int32")
    expect(completion.finish in ("stop", "length", "abort"), f"finish is {completion.finish!r}")
    _expect_tiled(completion.spans, size)
    for name in ("logprobs", "truncated_logprobs"):
        values = getattr(completion, name)
        if values is None:
            expect(name != "logprobs" or not engine.samples, "a sampling engine gave no log-probs")
            continue
        good = values.shape == (size,) and values.dtype == np.float32
        expect(good, f"{name} are {values.dtype} {values.shape} for {size} tokens")
        expect(np.isfinite(values).all(), f"{name} are not finite")
        expect((values <= 1e-6).all(), f"{name} exceed 0: {float(values.max()):.3g}")


def _expect_tiled(spans: Sequence[Any], size: int) -> None:
    end, version = 0, -1
    for span in spans:
        expect(span.start == end, f"a span starts at {span.start}, the one before ends at {end}")
        expect(span.stop > span.start, f"span [{span.start}, {span.stop}) is empty")
        expect(span.version >= version, f"versions fall from {version} to {span.version}")
        end, version = span.stop, span.version
    expect(end == size, f"spans end at {end} of {size} tokens")
