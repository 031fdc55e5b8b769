"""The values a session deals in: prompts to sample after, turns that were sampled, what it counts.

Data only; `miles.session.tree` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from miles.protocols import Tool
from miles.types import Array, Completion, Finish, Message, Span

if TYPE_CHECKING:
    from miles.session.tree import Session

__all__ = ["Counters", "Node", "Prompt", "Recorder", "Turn"]


@dataclass(slots=True, kw_only=True)
class Counters:
    """What happened in a session, or in all of a store's."""

    turns: int = 0
    """Turns sampled and stored, those rolled back later included."""
    prompt_tokens: int = 0
    """Tokens of their prompts, whole ones."""
    sampled_tokens: int = 0
    """Tokens of their completions."""
    cached_tokens: int = 0
    """Prompt tokens whose KV cache an engine reused."""
    token_mismatches: int = 0
    """Turns that failed because tokens did not extend the stored ones."""
    unmatched_tool_ids: int = 0
    """Tool-call ids that did not correspond where `role_text` took two histories for one."""
    rollbacks: int = 0
    """Turns replaced by a retry (`linear`)."""
    branches: int = 0
    """Turns that began a branch beside an earlier one (`branching`)."""
    kept_history: int = 0
    """Turns before which the template would have rewritten history, and it was kept."""
    rebased: int = 0
    """Turns before which history was rewritten as the template would, in a branch of its own."""
    truncated: int = 0
    """Requests refused because their prompt left no room."""
    conflicts: int = 0
    """Requests refused because another was being answered, or the turn had ended by length."""

    def plain(self) -> dict[str, int]:
        """Counts by name."""
        return {name: getattr(self, name) for name in _COUNTS}

    def add(self, other: Counters) -> None:
        """Take another's counts on top."""
        for name in _COUNTS:
            if count := getattr(other, name):
                setattr(self, name, getattr(self, name) + count)


_COUNTS = tuple(one.name for one in fields(Counters))


class Node:
    """One stored turn: what was appended after its parent, and what was sampled then.

    Tokens and values lie in the session's columns: of `tokens`, `[start, split)` was appended and
    `[split, stop)` sampled; the other columns have rows for sampled tokens only.
    """

    __slots__ = (
        "children",
        "continued",
        "count",
        "experts",
        "finish",
        "fresh",
        "images",
        "index",
        "logprobs",
        "message",
        "messages",
        "origin",
        "parent",
        "raw",
        "size",
        "spans",
        "split",
        "start",
        "stop",
        "tools",
        "truncated",
        "truncated_logprobs",
        "version",
    )

    index: int  # order of asking; unique in the session
    parent: Node | None  # whose messages come before; None at the beginning
    fresh: bool  # its appended tokens are the whole prompt: no tokens of `parent` come before
    raw: bool  # the prompt was raw text
    messages: tuple[Message, ...]  # appended
    message: Message  # sampled, as parsed
    tools: Sequence[Tool]  # offered
    images: tuple[bytes, ...]  # of the appended messages
    count: int  # messages up to here
    start: int
    split: int
    stop: int
    origin: int  # where all tokens up to here begin, when they lie together; otherwise -1
    size: int  # tokens up to here
    spans: tuple[Span, ...]  # by position in the completion
    finish: Finish
    logprobs: int  # where its rows begin in the column of that name; -1 if it has none there
    truncated_logprobs: int
    experts: int
    version: int  # newest that sampled a token up to here; -1 of none
    truncated: bool  # a prompt after it left no room
    children: list[Node]  # in order of storing
    continued: int  # children whose tokens follow its own

    def path(self) -> list[Node]:
        """From the beginning of the conversation to here."""
        found = [self]
        node = self
        while (parent := node.parent) is not None:
            found.append(parent)
            node = parent
        found.reverse()
        return found

    def token_path(self) -> list[Node]:
        """From the beginning of its tokens to here."""
        found = [self]
        node = self
        while not node.fresh and node.parent is not None:
            node = node.parent
            found.append(node)
        found.reverse()
        return found


@dataclass(slots=True, kw_only=True, eq=False)  # a frozen one costs 2 µs more, every turn
class Prompt:
    """What one turn is sampled after. Hand it back to `Session.commit` or `Session.abandon`."""

    index: int
    """Order of asking; the turn's number."""
    parent: int
    """Index of the turn that it follows; -1 at the beginning."""
    tokens: Array
    """(tokens,) int32, read-only: the whole prompt."""
    added: Array
    """(new tokens,) int32: its end, which was not stored before."""
    new: tuple[Message, ...]
    """Messages appended by this request; empty for raw text."""
    tools: Sequence[Tool] = ()
    """Function schemas offered to the model."""
    images: tuple[bytes, ...] = ()
    """Encoded images of the whole prompt, in the order of their placeholders."""
    fresh: bool = True
    """`added` is the whole prompt."""
    raw: bool = False
    """The prompt is raw text."""
    replaces: int = -1
    """Index of the turn that a retry takes the place of; -1 of none."""
    own_images: tuple[bytes, ...] = ()
    """Images of the appended messages alone."""


@dataclass(slots=True, eq=False)
class Turn:
    """One stored assistant turn."""

    index: int
    """Its number in the session."""
    message: Message
    """As the tito handler parsed it; tool calls have ids."""
    text: str
    """Decoded, without the stop token."""
    prompt_tokens: int
    """How many tokens came before."""
    completion: Completion
    """As the engine gave it."""

    @property
    def finish(self) -> Finish:
        """stop or length."""
        return self.completion.finish

    @property
    def tokens(self) -> int:
        """How many were sampled."""
        return len(self.completion.tokens)

    @property
    def cached_tokens(self) -> int:
        """Of the prompt's, how many an engine had cached."""
        return self.completion.cached_tokens

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions that sampled it, in order."""
        return tuple(dict.fromkeys(span.version for span in self.completion.spans))


class Recorder(Protocol):
    """Told of every change of a session before it happens; what it raises prevents the change."""

    def turn(
        self, session: Session, prompt: Prompt, completion: Completion, message: Message
    ) -> None:
        """A turn is about to be stored."""

    def mark(self, session: Session, what: str, value: Any) -> None:
        """`truncated` after the turn of that index, or `failed` with the words of a mismatch."""
