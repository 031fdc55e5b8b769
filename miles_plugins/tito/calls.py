"""Parsed tool calls in OpenAI's shape.

The text of a call is read elsewhere, in `markup` or by `renderers`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles import Array

__all__ = ["Said", "as_calls"]

Said = tuple[str | None, str, Mapping[str, Any]]
"""A call's own id where its markup has one, its function's name, its arguments."""


def as_calls(tokens: Array, said: Sequence[Said]) -> list[dict[str, Any]]:
    """The calls of a completion, arguments as JSON.

    Ids that the markup does not have are made from the completion's own tokens: unique in it, and
    the same each time it is parsed. Equal completions have equal ids.
    """
    digest = hashlib.blake2s(tokens.astype(np.int32).tobytes(), digest_size=9).hexdigest()
    return [
        {
            "id": own or f"call_{digest}_{number}",
            "type": "function",
            "function": {
                "name": name.encode("utf-8", "replace").decode(),
                "arguments": _written(arguments),
            },
        }
        for number, (own, name, arguments) in enumerate(said)
    ]


def _written(arguments: Mapping[str, Any]) -> str:
    """As JSON that can be sent: a model may write lone surrogates, which then stay escapes."""
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    return text
