"""Replies of any shape: each is read, or is a typed error, whatever JSON a server says."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from miles import EngineError, Request, Sampling
from miles_plugins.engine.sglang import facts, wording

REQUEST = Request(
    id="r", key="k", tokens=np.array([1, 2, 3], np.int32), seed=1,
    sampling=Sampling(temperature=1.0, max_new_tokens=4),
)  # fmt: skip
TOKENS = np.array([1, 2], np.int32)

COMPLETION = {
    "output_ids": [5, 6],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 2},
        "completion_tokens": 2, "cached_tokens": 0, "weight_version": "7", "spec_verify_ct": 1,
        "output_token_logprobs": [[-0.1, 5, None], [-0.2, 6, None]],
        "weight_versions": [{"version": "7", "start": 0, "end": 2}],
    },
}  # fmt: skip
SCORED = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None]]}}
INFO = {"version": "0.5.23", "max_req_input_len": 9, "dp_size": 1, "disaggregation_mode": "null"}
CHECKSUMS = {"success": True, "ranks": [{"checksums": {"a": "1"}}]}
LOADS = {"loads": [{"num_waiting_reqs": 0, "token_usage": 0.5}]}
OTHERS = (None, [], {}, "x", -1, 1.5, True, [None], [[]], {"a": 1}, 10**12)


def twisted(value: Any) -> Iterator[Any]:
    """The same with one part, or all, replaced by each of `OTHERS`."""
    yield from OTHERS
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        within = twisted(part) if isinstance(part, dict | list) else OTHERS
        for other in within:
            made = copy.copy(value)
            made[key] = other
            yield made


@pytest.mark.parametrize(
    ("read", "reply"),
    [
        (lambda reply: wording.completion(REQUEST, reply, version=7), COMPLETION),
        (wording.sampled, COMPLETION),
        (lambda reply: wording.scored(reply, TOKENS), SCORED),
        (wording.version, COMPLETION["meta_info"]),
        (wording.speculation, COMPLETION["meta_info"]),
        (facts.facts, INFO),
        (facts.checksums, CHECKSUMS),
        (facts.load_of, LOADS),
    ],
    ids=["completion", "sampled", "scored", "version", "counts", "facts", "checksums", "load"],
)
def test_shapes_that_no_server_has_are_typed_errors(read, reply):
    read(reply)
    refused = []
    for other in twisted(reply):
        try:
            read(other)
        except EngineError as error:
            refused.append(str(error))
    assert refused or read is wording.version
    assert all(error.startswith("engine sglang: ") for error in refused)
