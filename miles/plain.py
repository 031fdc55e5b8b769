"""Values of tasks and messages as JSON, and back as they were: bytes survive, such as images.

Where the text is kept, and what its parts mean, is others' business.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["of_json", "of_plain", "to_json", "to_plain"]

_BYTES = "\0bytes"  # key under which bytes are written


def to_json(value: Any) -> str:
    """As ASCII: lone surrogates and whole numbers of any size come back as they were, sequences as
    lists. Raises `TypeError` for what is no plain value."""
    return json.dumps(value, default=_simpler)


def of_json(text: str | bytes) -> Any:
    """What `to_json` was given."""
    return json.loads(text, object_hook=_bytes)


def to_plain(value: Any) -> Any:
    """What any JSON encoder takes in place of a value. Raises `TypeError` as `to_json`."""
    return json.loads(to_json(value))


def of_plain(value: Any) -> Any:
    """What `to_plain` was given."""
    return of_json(json.dumps(value))


def _simpler(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is no plain value")


def _bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES]) if _BYTES in value else value
