"""Where a request that replays its history attaches: the linear and the branching rule.

It looks at messages and tools only, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from miles.errors import EpisodeError, HistoryMismatch, SessionConflict, UnsupportedRequest
from miles.protocols import Tool
from miles.session.matching import Difference
from miles.session.turns import Node
from miles.types import Message

__all__ = ["Place", "append", "branching", "linear", "messages_of", "same_tools", "tools_differ"]


class Place(NamedTuple):
    """Where a new turn goes."""

    parent: Node | None
    """The turn that it follows; None at the beginning."""
    new: tuple[Message, ...]
    """Messages in between."""
    replaces: Node | None = None
    """The turn that a retry takes the place of."""


def messages_of(node: Node | None) -> tuple[Message, ...]:
    """All messages up to and including a turn, as they are stored."""
    if node is None:
        return ()
    found: list[Message] = []
    for one in node.path():
        found += one.messages
        found.append(one.message)
    return tuple(found)


def same_tools(stored: Sequence[Tool], given: Sequence[Tool]) -> bool:
    """Whether the same function schemas are offered, in the same order."""
    return stored is given or list(stored) == list(given)


def append(tip: Node | None, messages: str | Sequence[Message], tools: Sequence[Tool]) -> Place:
    """After the last turn, whatever was said. Raises `EpisodeError` for misplaced raw text and
    `HistoryMismatch` for other tools; none mean those of before."""
    if tip is None:
        return Place(None, () if isinstance(messages, str) else tuple(messages))
    if isinstance(messages, str):
        raise EpisodeError("session: raw text can only be the first turn; give messages")
    if tip.raw:
        raise EpisodeError(
            "session: it began as raw text, so no messages can follow; begin with messages"
        )
    if tools and not same_tools(tip.tools, tools):
        raise HistoryMismatch(tools_differ(tip.tools, tools))
    return Place(tip, tuple(messages))


def linear(
    tip: Node | None, given: tuple[Message, ...], tools: Sequence[Tool], differ: Difference
) -> Place:
    """After the last turn, or in its place. Raises `HistoryMismatch` for anything deeper, naming
    the first message that differs."""
    _refuse_open_assistant(given)
    if tip is None:
        return Place(None, given)
    if tip.raw:
        raise HistoryMismatch("messages: the conversation began as raw text; open another session")
    before = tip.count - len(tip.messages) - 1
    if not same_tools(tip.tools, tools):
        if not before:
            return Place(None, given, tip)
        raise HistoryMismatch(tools_differ(tip.tools, tools))
    stored = messages_of(tip)
    at, how = _first_difference(stored, given, differ)
    if at == len(stored):
        return Place(tip, given[at:])
    # a reply in other words is no retry: the sampled one would be lost, and who knows why
    respelled = at == len(stored) - 1 < len(given) and given[at].get("role") == "assistant"
    if at >= before and len(given) > before and not respelled:
        return Place(tip.parent, given[before:], tip)
    raise HistoryMismatch(
        f"messages[{at}]: {how}; a request must continue the {len(stored)} recorded messages, or "
        f"repeat the last turn (from message {before} on)"
    )


def branching(
    roots: Sequence[Node], given: tuple[Message, ...], tools: Sequence[Tool], differ: Difference
) -> Place:
    """After the deepest turn whose whole path is a prefix of the request; of several, the latest
    stored."""
    _refuse_open_assistant(given)
    best: Node | None = None
    todo = [node for node in roots if same_tools(node.tools, tools)]
    while todo:
        node = todo.pop()
        if node.count > len(given):
            continue
        if node.raw:
            continue
        own = (*node.messages, node.message)
        start = node.count - len(own)
        if any(differ(one, given[start + i]) for i, one in enumerate(own)):
            continue
        if best is None or (node.count, node.index) > (best.count, best.index):
            best = node
        todo += node.children
    if best is not None and best.finish == "length":
        raise SessionConflict(
            f"turn {best.index} was cut by the length limit and cannot be extended; branch off "
            "before it"
        )
    return Place(best, given[best.count if best else 0 :])


def _first_difference(
    stored: Sequence[Message], given: Sequence[Message], differ: Difference
) -> tuple[int, str]:
    """Index of the first stored message that the request does not repeat, and why not."""
    for index, one in enumerate(stored):
        if index == len(given):
            return index, f"missing, recorded was one of role {one.get('role')!r}"
        if how := differ(one, given[index]):
            return index, how
    return len(stored), ""


def _refuse_open_assistant(given: Sequence[Message]) -> None:
    if not given:
        raise UnsupportedRequest("messages: there are none")
    if given[-1].get("role") == "assistant":
        raise UnsupportedRequest(
            f"messages[{len(given) - 1}]: the request ends with an assistant message, which cannot "
            "be continued; end with a user or tool message"
        )


def tools_differ(stored: Sequence[Tool], given: Sequence[Tool]) -> str:
    """How, in words."""
    return (
        f"tools: {_names(given)} offered, {_names(stored)} when the conversation began, and they "
        "are part of its first prompt; offer the same in every request"
    )


def _names(tools: Sequence[Tool]) -> str:
    names = [str(t.get("function", t).get("name")) for t in tools]
    return ", ".join(names) or "none"
