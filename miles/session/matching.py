"""When a replayed message counts as the recorded one: three comparisons, and what differs.

It compares messages and tool-call ids; where a request attaches is `miles.session.tree`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from miles.types import Message

__all__ = [
    "Difference",
    "call_id",
    "differences",
    "tool_ids",
    "unmatched_tool_ids",
    "with_call_ids",
]

Difference = Callable[[Message, Message], str]
"""(stored, given) -> how they differ, in words; empty when they count as the same."""

_REASONING = ("reasoning_content", "reasoning", "thinking")
_WINDOW = 24  # characters shown around a difference


def differences(rule: str) -> Difference:
    """The comparison of that name: `strict`, `json_arguments` or `role_text`."""
    return _RULES[rule]


def _strict(stored: Message, given: Message, *, as_json: bool = False) -> str:
    if stored == given and not stored.get("tool_calls"):  # Python's == takes 1 for True
        return ""
    for name, read in (("role", _role), ("content", _content), ("reasoning", _reasoning)):
        if (ours := read(stored)) != (theirs := read(given)):
            return _words(name, ours, theirs)
    for name in ("tool_call_id", "name"):
        if (one := stored.get(name)) and (two := given.get(name)) and one != two:
            return _words(name, one, two)
    return _calls_differ(_calls(stored), _calls(given), as_json)


def _role_text(stored: Message, given: Message) -> str:
    if (one := _role(stored)) != (two := _role(given)):
        return _words("role", one, two)
    if (one := _text(stored)) != (two := _text(given)):
        return _words("text", one, two)
    return ""


_RULES: Mapping[str, Difference] = {
    "strict": _strict,
    "json_arguments": partial(_strict, as_json=True),
    "role_text": _role_text,
}


def _role(message: Message) -> Any:
    return message.get("role")


def _reasoning(message: Message) -> Any:
    return next((found for name in _REASONING if (found := message.get(name))), "")


def _content(message: Message) -> Any:
    """Text, or where there is more than text, its parts; None and [] are ""."""
    content = message.get("content") or ""
    if not isinstance(content, list | tuple):
        return content
    if all(_is_text(part) for part in content):
        return _text(message)
    return [part["text"] if _is_text(part) else part for part in content]


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if _is_text(part))


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _calls_differ(stored: Sequence[Any], given: Sequence[Any], as_json: bool) -> str:
    if len(stored) != len(given):
        return f"there are {len(given)} tool calls, {len(stored)} were recorded"
    for index, (one, two) in enumerate(zip(stored, given, strict=True)):
        where = f"tool call {index}'s"
        if (a := one.get("id")) and (b := two.get("id")) and a != b:
            return _words(f"{where} id", a, b)
        one, two = one.get("function") or one, two.get("function") or two
        if one.get("name") != two.get("name"):
            return _words(f"{where} name", one.get("name"), two.get("name"))
        a, b = one.get("arguments") or "", two.get("arguments") or ""
        same = _same_json(a, b) if type(a) is not str or type(b) is not str else a == b
        if not same and not (as_json and _same_json(_parsed(a), _parsed(b))):
            return _words(f"{where} arguments", a, b)
    return ""


class _NotJSON:
    """Equal to nothing, itself included."""


def _parsed(arguments: Any) -> Any:
    """A JSON object; `_NotJSON` for anything else, duplicate keys and numbers that JSON lacks."""
    if not isinstance(arguments, str):
        return arguments if isinstance(arguments, Mapping) else _NotJSON()
    try:
        value = json.loads(
            arguments,
            object_pairs_hook=_object,
            parse_constant=_refuse,
            parse_float=_finite,
        )
    except (ValueError, RecursionError):
        return _NotJSON()
    return value if isinstance(value, dict) else _NotJSON()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("duplicate keys")
    return made


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{digits} is beyond every float")
    return value


def _same_json(one: Any, two: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are one number, `true` is no number."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(_same_json(v, two[k]) for k, v in one.items())
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(_same_json, one, two))
    if isinstance(one, _NotJSON) or isinstance(one, bool) != isinstance(two, bool):
        return False
    return bool(one == two)


def _words(name: str, stored: Any, given: Any) -> str:
    if not isinstance(stored, str) or not isinstance(given, str):
        return f"{name} is {_short(given)}, recorded was {_short(stored)}"
    at = next(
        (i for i, (a, b) in enumerate(zip(stored, given, strict=False)) if a != b),
        min(len(stored), len(given)),
    )
    if max(len(stored), len(given)) <= 2 * _WINDOW:
        return f"{name} is {given!r}, recorded was {stored!r}"
    window = slice(max(0, at - _WINDOW // 2), at + _WINDOW)
    return (
        f"{name} differs at character {at}: {given[window]!r}, recorded was {stored[window]!r} "
        f"({len(given)} and {len(stored)} characters)"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 4 * _WINDOW else f"{text[: 4 * _WINDOW]}..."


def tool_ids(messages: Iterable[Message]) -> list[str]:
    """Ids of the tool calls in messages, in order."""
    return [str(call["id"]) for m in messages for call in _calls(m) if call.get("id")]


def unmatched_tool_ids(stored: Sequence[Message], given: Sequence[Message]) -> list[str]:
    """Tool-call ids of a request that do not correspond to the recorded history which its first
    `len(stored)` messages were taken for: ids called or answered there under another name, and
    answers after it to calls that nobody made."""
    wrong: list[str] = []
    for ours, theirs in zip(stored, given, strict=False):
        known = {*tool_ids([ours]), ours.get("tool_call_id")}
        asked = [*tool_ids([theirs]), theirs.get("tool_call_id")]
        wrong += [str(one) for one in asked if one and one not in known]
    known = {*tool_ids(stored), *tool_ids(given[len(stored) :])}
    for message in given[len(stored) :]:
        if (one := message.get("tool_call_id")) and one not in known:
            wrong.append(str(one))
    return list(dict.fromkeys(wrong))


def call_id(turn: int, position: int) -> str:
    """Id of the tool call at a position of a turn, where the model's markup has none."""
    return f"call_{turn}_{position}"


def with_call_ids(message: Message, turn: int) -> Message:
    """The message with an id for each tool call that has none."""
    calls = message.get("tool_calls")
    if not calls or all(call.get("id") for call in calls):
        return message
    named = [
        call if call.get("id") else {**call, "id": call_id(turn, position)}
        for position, call in enumerate(calls)
    ]
    return {**message, "tool_calls": named}
