"""A streamed reply as it comes: parts that each repeat the ones before, or that hold only what is
new.

Servers started with `--incremental-streaming-output` say the second, all others the first. It opens
no connection; what a whole reply means is `wording`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from miles import Array
from miles_plugins.engine.sglang import wording

__all__ = ["Streamed"]


class Streamed:
    """What a stream has said of one request so far. A part counts all tokens until then, and so
    tells by itself whether it repeats."""

    def __init__(self) -> None:
        self._last: Mapping[str, Any] | None = None
        self._triples: list[Any] = []
        self._ids: list[int] | None = None

    @wording.typed
    def add(self, part: Mapping[str, Any]) -> Array:
        """(new tokens,) int32 of the next part. Raises `EngineError`."""
        triples, ids = wording.triples(part, "output_token_logprobs"), part.get("output_ids")
        count = part["meta_info"].get("completion_tokens")
        given = len(self._triples)
        self._last = part
        if given and given + len(triples) == count:
            self._triples.extend(triples)
            if self._ids is not None and ids is not None:
                self._ids.extend(ids)
        elif count is not None and len(triples) > count:
            # One that was put back to wait is aborted with all its tokens, and these are put after
            # new ones that nobody had read yet (0.5.16 to 0.5.23); its ids are of both.
            self._triples, self._ids = triples[len(triples) - count :], None
        else:
            self._triples, self._ids = triples, ids
        return np.array([triple[1] for triple in self._triples[given:]], np.int32)

    def whole(self) -> Mapping[str, Any] | None:
        """The last part with everything that was said before it, as a reply that is no stream;
        None before there is any."""
        if self._last is None:
            return None
        info = {**self._last["meta_info"], "output_token_logprobs": self._triples}
        return {**self._last, "output_ids": self._ids, "meta_info": info}
