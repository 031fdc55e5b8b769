"""Images inside messages: their encoded bytes, in order.

Nothing is fetched and no pixel is looked at; what a placeholder becomes is the tito handler's
affair.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from miles.errors import UnsupportedRequest
from miles.protocols import Tito
from miles.types import IMAGE_PARTS, Message

__all__ = ["encoded_images", "refuse_images"]


def encoded_images(messages: Iterable[Message]) -> tuple[bytes, ...]:
    """Bytes of every image part: `{"type": "image", "image": bytes}`, or `{"type": "image_url",
    "image_url": {"url": "data:image/...;base64,..."}}`. Raises `UnsupportedRequest` for any other
    kind of source."""
    found: list[bytes] = []
    for message in messages:
        content = message.get("content")
        if content.__class__ is str or not isinstance(content, list | tuple):
            continue
        for part in content:
            if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
                found.append(_bytes_of(part))
    return tuple(found)


def _bytes_of(part: Mapping[str, Any]) -> bytes:
    source: Any = part.get("image", part.get("image_url"))
    if isinstance(source, Mapping):
        source = source.get("url")
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and source.startswith("data:"):
        head, _, data = source.partition(",")
        if head.endswith(";base64"):
            try:
                return base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError) as error:
                raise UnsupportedRequest(
                    f"image: the data URL is not valid base64: {error}"
                ) from error
    shown = repr(source)[:60]
    raise UnsupportedRequest(
        f"image: the source {shown} is neither bytes nor a base64 data URL; nothing is fetched, so "
        "send the image itself"
    )


def refuse_images(found: Sequence[bytes], tito: Tito) -> NoReturn:
    """For a handler that is not `multimodal`. Raises `UnsupportedRequest`."""
    raise UnsupportedRequest(
        f"messages: {len(found)} images, but the tito handler {type(tito).__name__} is for text "
        "alone"
    )
