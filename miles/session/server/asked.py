"""What a request to any of the three APIs asks for, in one form, and how its parameters are judged.

A parameter is read, ignored because it cannot change a token, limited to the values that can be
honoured, or refused by name. Nothing here knows the shape of messages; that is `content` and the
modules of the APIs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from miles.errors import UnsupportedRequest, choices
from miles.protocols import Tool
from miles.types import Message, Sampling

__all__ = ["Asked", "ClientSampling", "Only", "drawn", "judge", "read_sampling", "tool"]

ClientSampling = Literal["refuse", "ignore", "honour"]
"""What a client's own temperature, top_p or top_k does when it is not the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, whatever API it came by."""

    messages: tuple[Message, ...]
    """The whole history, in the form that chat templates read."""
    tools: tuple[Tool, ...] = ()
    """Function schemas offered to the model."""
    sampling: Mapping[str, int | float] = field(default_factory=dict)
    """Fields of `Sampling` that the client named."""
    stream: bool = False
    """Answer by server-sent events."""
    usage: bool = True
    """Say at the end of a stream how many tokens there were."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """What the reply of this API repeats of its request."""


@dataclass(frozen=True, slots=True)
class Only:
    """A parameter that is accepted with these values alone."""

    values: tuple[Any, ...]
    """Compared by type and value; None is always accepted."""
    instead: str
    """What to do instead, as the end of a sentence."""


def judge(
    body: Mapping[str, Any],
    *,
    api: str,
    read: Collection[str],
    ignored: Collection[str],
    only: Mapping[str, Only],
) -> None:
    """Raise `UnsupportedRequest`, naming the first parameter that cannot be honoured."""
    for name, value in body.items():
        if value is None or name in read or name in ignored:
            continue
        if name not in only:
            raise UnsupportedRequest(
                f"{api}: there is no parameter {name!r} here; {choices(name, [*read, *only])}; "
                f"accepted and without effect: {', '.join(sorted(ignored))}"
            )
        rule = only[name]
        if not any(type(value) is type(good) and value == good for good in rule.values):
            shown = ", ".join(str(v) or '""' for v in rule.values) or "null"
            raise UnsupportedRequest(
                f"{api}: {name}={_short(value)} cannot be honoured, only {shown}; {rule.instead}"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_sampling(
    body: Mapping[str, Any], *, api: str, limits: Collection[str]
) -> dict[str, int | float]:
    """Fields of `Sampling` from a body; `limits` are this API's names for the longest completion.

    Raises `UnsupportedRequest` for a value out of its range.
    """
    found: dict[str, int | float] = {}
    for name in limits:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedRequest(
                f"{api}: {name} is {_short(value)}, not a whole number above 0"
            )
        found["max_new_tokens"] = min(value, int(found.get("max_new_tokens", value)))
    for name, low, high in (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0)):
        value = body.get(name)
        if value is None:
            continue
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or not low <= value <= high:
            raise UnsupportedRequest(
                f"{api}: {name} is {_short(value)}, not a number from {low:g} to {high:g}"
            )
        found[name] = float(value)
    if found.get("top_p") == 0.0:
        raise UnsupportedRequest(f"{api}: top_p is 0, which keeps no token; use temperature=0")
    if (value := body.get("top_k")) is not None:
        if not isinstance(value, int) or isinstance(value, bool) or value < -1:
            raise UnsupportedRequest(f"{api}: top_k is {_short(value)}, not a whole number")
        found["top_k"] = max(value, 0)
    return found


def drawn(own: Sampling, asked: Mapping[str, int | float], policy: ClientSampling) -> Sampling:
    """The run's sampling, changed as the client may change it: never longer than the run's limit,
    and drawn otherwise only under `honour`. Raises `UnsupportedRequest` under `refuse`."""
    limit = min(own.max_new_tokens, int(asked.get("max_new_tokens", own.max_new_tokens)))
    how = {name: value for name, value in asked.items() if name != "max_new_tokens"}
    if policy == "refuse":
        for name, value in how.items():
            if value != getattr(own, name):
                raise UnsupportedRequest(
                    f"{name}={value:g} cannot be honoured: this session samples with "
                    f"{name}={getattr(own, name):g}, and its log-probs are trained on; leave it out"
                )
    if policy != "honour":
        how = {}
    changes: dict[str, Any] = {"max_new_tokens": limit, **how}
    return replace(own, **changes)


def tool(name: Any, description: Any, parameters: Any, *, where: str) -> Tool:
    """A function schema with its keys in one order, so that every API renders the same prompt."""
    if not isinstance(name, str) or not name:
        raise UnsupportedRequest(f"{where}: a function needs a name, not {_short(name)}")
    made: dict[str, Any] = {"name": name}
    if description is not None:
        if not isinstance(description, str):
            raise UnsupportedRequest(f"{where}: the description of {name} is not text")
        made["description"] = description
    if parameters is not None:
        if not isinstance(parameters, dict):
            raise UnsupportedRequest(f"{where}: the parameters of {name} are not a JSON schema")
        made["parameters"] = parameters
    return {"type": "function", "function": made}
