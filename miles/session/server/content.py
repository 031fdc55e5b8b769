"""Message content of any of the three APIs as chat templates read it: text, or text with images.

Images stay inside the message as data URLs, so that a journal can hold them; nothing is ever
fetched from a network. Roles and tool calls belong to the modules of the APIs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miles.errors import UnsupportedRequest

__all__ = [
    "Image",
    "flat",
    "image_of_data",
    "image_of_url",
    "items",
    "refuse_part",
    "text_field",
]

_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")

Image = Mapping[str, Any]
"""`{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`."""


def items(value: Any, *, where: str) -> list[dict[str, Any]]:
    """A list of objects. Raises `UnsupportedRequest` for anything else."""
    if not isinstance(value, list):
        raise UnsupportedRequest(f"{where} is {type(value).__name__}, not a list")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise UnsupportedRequest(f"{where}[{index}] is {type(item).__name__}, not an object")
    return value


def text_field(item: Mapping[str, Any], name: str, *, where: str) -> str:
    """A field that must be text. Raises `UnsupportedRequest`."""
    value = item.get(name)
    if not isinstance(value, str):
        raise UnsupportedRequest(f"{where}.{name} is {type(value).__name__}, not text")
    return value


def flat(parts: Iterable[str | Image], *, join: str) -> str | list[dict[str, Any]]:
    """Parts as one text where there are only texts, otherwise as a list of parts in their order."""
    kept = list(parts)
    if all(isinstance(part, str) for part in kept):
        return join.join(str(part) for part in kept)
    return [
        {"type": "text", "text": part} if isinstance(part, str) else dict(part) for part in kept
    ]


def image_of_url(url: Any, *, images: bool, where: str) -> Image:
    """An image given by its URL, which must hold the image itself. Raises `UnsupportedRequest` when
    the handler is for text alone or the URL points elsewhere."""
    if not images:
        raise UnsupportedRequest(f"{where} is an image, and this model's handler takes text only")
    if not isinstance(url, str) or not url.startswith("data:"):
        raise UnsupportedRequest(
            f"{where}: an image must be a data URL (data:image/png;base64,...); nothing is fetched"
        )
    head, comma, data = url.partition(",")
    kind, _, coding = head.removeprefix("data:").partition(";")
    if not comma or coding != "base64":
        raise UnsupportedRequest(f"{where}: the data URL is not base64")
    return image_of_data(kind, data, images=images, where=where)


def image_of_data(kind: Any, data: Any, *, images: bool, where: str) -> Image:
    """An image given by its type and base64 data. Raises `UnsupportedRequest`."""
    if not images:
        raise UnsupportedRequest(f"{where} is an image, and this model's handler takes text only")
    if kind not in _TYPES:
        raise UnsupportedRequest(f"{where}: an image of type {kind!r}; valid: {', '.join(_TYPES)}")
    try:
        raw = base64.b64decode(data, validate=True) if isinstance(data, str) else b""
    except (binascii.Error, ValueError):
        raw = b""
    if not raw:
        raise UnsupportedRequest(f"{where}: the image's data is not base64")
    url = f"data:{kind};base64,{base64.b64encode(raw).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def refuse_part(kind: Any, valid: Sequence[str], *, where: str) -> UnsupportedRequest:
    """The error for a part of a kind that is not carried."""
    return UnsupportedRequest(f"{where} has type {kind!r}; valid: {', '.join(valid)}")
