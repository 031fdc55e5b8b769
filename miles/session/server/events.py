"""A finished turn in the one form that all three APIs are written from, and how events are framed.

Knows no API; those are `chat`, `responses` and `messages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from miles.types import Message

__all__ = ["Delta", "Said", "sse"]


@dataclass(frozen=True, slots=True)
class Delta:
    """Some more text of a reply that is still being sampled."""

    kind: Literal["reasoning", "content"]
    """What it belongs to."""
    text: str
    """Never empty, never part of a character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One assistant turn as it is told to a client."""

    id: str
    """Unique on the server."""
    model: str
    """Name of what sampled it."""
    created: int
    """Unix seconds."""
    message: Message
    """As it is stored."""
    content: str
    """Text for the user."""
    reasoning: str
    """Reasoning, or empty."""
    calls: tuple[Mapping[str, Any], ...]
    """Tool calls in OpenAI's shape, arguments as they were sampled."""
    finish: Literal["stop", "length"]
    """Why it ended."""
    tokens: int = 0
    """How many were sampled."""
    prompt_tokens: int = 0
    """How many stood before them."""
    cached_tokens: int = 0
    """How many of those the engine had in its cache."""
    room: bool = True
    """False when the prompt left no room for a token, and nothing was sampled or recorded."""


_encode = msgspec.json.Encoder().encode


def sse(data: Mapping[str, Any], event: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n".encode() if event else b""
    return b"".join([head, b"data: ", _encode(data), b"\n\n"])
