"""From an error to what a client is told: status, code, whether asking again may help.

Wording is the error's own; its form is the API's (`chat`, `responses`, `messages`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from miles.errors import (
    EngineError,
    EpisodeError,
    GenerationAborted,
    MilesError,
    PromptTooLong,
    RoutingError,
    SessionError,
    TokenMismatch,
)

__all__ = ["MAX_BODY", "Body", "Refusal", "json_reply", "refusal", "refused"]

MAX_BODY = 64 * 1024 * 1024
"""Bytes of a request; a longer one is a 413."""

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

Body = Callable[..., dict[str, Any]]
"""`error_body` of an API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that is not answered."""

    status: int
    """HTTP status."""
    code: str
    """One word for programs."""
    message: str
    """A sentence for people."""
    again: bool = False
    """The very same request may succeed."""

    def body(self, form: Body) -> dict[str, Any]:
        """As an API says it."""
        kind = _KINDS.get(self.status, "api_error")
        return form(kind=kind, message=self.message, code=self.code, param=None)


def refusal(error: MilesError) -> Refusal:
    """What an error means to a client."""
    if isinstance(error, SessionError):
        return Refusal(status=error.status, code=error.reason, message=error.detail)
    if isinstance(error, TokenMismatch):
        return Refusal(status=500, code="token_mismatch", message=error.detail)
    if isinstance(error, EngineError | RoutingError | GenerationAborted):
        return Refusal(status=502, code=error.reason, message=error.detail, again=True)
    if isinstance(error, PromptTooLong):
        return Refusal(status=400, code=error.reason, message=error.detail)
    if isinstance(error, EpisodeError):  # the handler has no words for these messages
        return Refusal(status=400, code="invalid_messages", message=error.detail)
    return Refusal(status=502, code=getattr(error, "reason", "failed"), message=error.detail)


def refused(given: Refusal, form: Body, headers: Mapping[str, str] | None = None) -> Response:
    """The response. OpenAI's and Anthropic's clients obey `x-should-retry`: a conflict that they
    asked again about would take the place of the turn that won."""
    again = {"x-should-retry": "true" if given.again else "false", **(headers or {})}
    return json_reply(given.body(form), status=given.status, headers=again)


_encode = msgspec.json.Encoder().encode


def json_reply(
    data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Plain values as a JSON response."""
    return Response(
        _encode(data), status, headers=dict(headers or {}), media_type="application/json"
    )
