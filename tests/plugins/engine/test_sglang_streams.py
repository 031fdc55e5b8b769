"""Streams of SGLang in both of its shapes: whatever their parts are, they say the same reply."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles import EngineError, Request, Sampling
from miles_plugins.engine.sglang import wording
from miles_plugins.engine.sglang.streamed import Streamed

REQUEST = Request(
    id="r", key="k", tokens=np.array([1, 2, 3], np.int32), seed=1,
    sampling=Sampling(temperature=1.0, max_new_tokens=99),
)  # fmt: skip


def _reply(count: int, *, since: int = 0, finish: str = "") -> dict[str, object]:
    """Tokens `since` to `count` of a completion, in the words of one part."""
    ids = [7 * at % 50 for at in range(since, count)]
    info = {
        "finish_reason": {"type": finish} if finish else None,
        "completion_tokens": count,
        "weight_version": "4",
        "output_token_logprobs": [
            [-0.25 * at, token, None] for at, token in enumerate(ids, start=since)
        ],
    }
    if finish and count:
        half = count // 2
        spans = [("3", 0, half), ("4", half, count)] if half else [("4", 0, count)]
        info["weight_versions"] = [
            {"version": v, "start": start, "end": end} for v, start, end in spans
        ]
    return {"output_ids": ids, "meta_info": info}


def _read(parts):
    said, tokens = Streamed(), []
    for part in parts:
        tokens += said.add(copy.deepcopy(part)).tolist()
    return tokens, wording.completion(REQUEST, said.whole(), version=4)


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    incremental=st.booleans(),
    end=st.sampled_from(["length", "abort", "abort waiting", "abort waiting behind"]),
)
def test_streams_of_any_parts_say_the_whole_reply(sizes, incremental, end):
    """Parts that repeat or do not, also where one that waits is aborted: its last part has all of
    it but one id, after new tokens that were not read yet."""
    finish, waits = end.partition(" ")[::2]
    ends = np.cumsum(sizes).tolist()
    begins = [0, *ends[:-1]] if incremental else [0] * len(ends)
    finishes = [""] * (len(ends) - 1) + ["" if waits else finish]
    parts = [
        _reply(stop, since=start, finish=last)
        for start, stop, last in zip(begins, ends, finishes, strict=True)
    ]
    if waits:
        final = _reply(ends[-1], finish="abort")
        final["output_ids"] = final["output_ids"][-1:]
        if waits == "waiting behind" and incremental:
            unread = parts.pop()
            final["output_ids"][:0] = unread["output_ids"]
            told = unread["meta_info"]["output_token_logprobs"]
            final["meta_info"]["output_token_logprobs"][:0] = told
        parts.append(final)
    tokens, made = _read(parts)
    wanted = wording.completion(REQUEST, _reply(ends[-1], finish=finish), version=4)
    assert tokens == made.tokens.tolist() == wanted.tokens.tolist()
    assert made.logprobs.tolist() == wanted.logprobs.tolist()
    assert (made.spans, made.finish) == (wanted.spans, wanted.finish)


def test_streams_that_lose_a_part_are_errors():
    for lost in (0, 1):
        parts = [_reply(3), _reply(6, since=3), _reply(9, since=6, finish="length")]
        del parts[lost]
        with pytest.raises(EngineError, match="log-probs"):
            _read(parts)
    assert Streamed().whole() is None
