"""Turns over flat arrays: where the tokens and values of a session lie, and how turns join them.

It decides nothing: which turn follows which is the session's business. A prompt's new tokens are
written in place when they follow the end of what is stored, so that prompts of a linear path are
views.
"""

from __future__ import annotations

import numpy as np

from miles.session.flat import Column
from miles.session.samples import pieces
from miles.session.turns import Node, Prompt
from miles.types import Array, Completion, Message

__all__ = ["Storage"]


class Storage:
    """Columns of one session and the turns that lie in them."""

    __slots__ = ("_reserved", "_reserved_at", "columns", "nodes", "roots", "tip", "tokens")

    def __init__(self) -> None:
        self.tokens = Column()
        self.columns = {"tokens": self.tokens}
        """By name: `tokens`, and of sampled ones `logprobs`, `truncated_logprobs`, `experts`."""
        self.nodes: dict[int, Node] = {}
        """Turns by index."""
        self.roots: list[Node] = []
        """Turns at the beginning."""
        self.tip: Node | None = None
        """The turn stored last."""
        self._reserved = -1  # index of the prompt whose new tokens lie at the end
        self._reserved_at = 0  # and from where on

    @property
    def stored(self) -> int:
        """Tokens of turns; those of a prompt that is being answered are left out."""
        return len(self.tokens) if self._reserved < 0 else self._reserved_at

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(column.nbytes for column in self.columns.values())

    def tokens_of(self, node: Node) -> Array:
        """(tokens,) int32, read-only: all tokens up to and including a turn."""
        if node.origin >= 0:
            return self.tokens.view(node.origin, node.stop)
        gathered = self.tokens.copy(pieces(node.token_path()))
        gathered.setflags(write=False)
        return gathered

    def offer(self, index: int, parent: Node | None, added: Array, *, in_place: bool) -> Array:
        """(tokens,) int32, read-only: the whole prompt number `index`, in which `added` follows the
        tokens of `parent`."""
        end = len(self.tokens)
        follows = not end if parent is None else parent.origin >= 0 and parent.stop == end
        if in_place and follows and self._reserved < 0:
            self.tokens.append(added)
            self._reserved, self._reserved_at = index, end
            if parent is not None:
                return self.tokens.view(parent.origin, end + len(added))
        if parent is not None:
            added = np.concatenate([self.tokens_of(parent), added])
        added.setflags(write=False)
        return added

    def release(self, index: int) -> None:
        """Forget the new tokens of a prompt that came to nothing, if they were written."""
        if self._reserved == index:
            self.tokens.cut(self._reserved_at)
            self._reserved = -1

    def add(self, prompt: Prompt, completion: Completion, message: Message) -> Node:
        """Store a turn; the work is proportional to its own new tokens."""
        if prompt.replaces >= 0:
            self._remove(self.nodes[prompt.replaces])
        if self._reserved == prompt.index:
            start, self._reserved = self._reserved_at, -1
        else:
            if self._reserved >= 0:  # that prompt keeps its own view of what is written over
                self.release(self._reserved)
            start = len(self.tokens)
            self.tokens.append(prompt.added)
        node = Node()
        node.index, node.fresh, node.raw = prompt.index, prompt.fresh, prompt.raw
        node.messages, node.message, node.tools = prompt.new, message, prompt.tools
        node.images, node.finish, node.truncated = prompt.own_images, completion.finish, False
        node.children, node.continued = [], 0
        node.start, node.split = start, start + len(prompt.added)
        node.spans = completion.spans
        self.tokens.append(completion.tokens)
        node.stop = node.split + len(completion.tokens)
        node.logprobs = self._keep("logprobs", completion.logprobs)
        node.truncated_logprobs = self._keep("truncated_logprobs", completion.truncated_logprobs)
        node.experts = self._keep("experts", completion.experts)
        self._join(node, self.nodes.get(prompt.parent))
        self.nodes[node.index] = self.tip = node
        return node

    def _keep(self, name: str, rows: Array | None) -> int:
        if rows is None:
            return -1
        if (column := self.columns.get(name)) is None:
            column = self.columns[name] = Column()
        row = len(column)
        column.append(rows)
        return row

    def _join(self, node: Node, parent: Node | None) -> None:
        node.parent = parent
        node.count = len(node.messages) + 1
        node.size = node.stop - node.start
        node.origin = node.start
        node.version = node.spans[-1].version if node.spans else -1
        if parent is None:
            self.roots.append(node)
            return
        node.count += parent.count
        parent.children.append(node)
        if node.fresh:
            return
        parent.continued += 1
        node.size += parent.size
        node.origin = parent.origin if node.start == parent.stop else -1
        node.version = max(node.version, parent.version)

    def _remove(self, node: Node) -> None:
        """Take the last turn away, with its tokens and values, which lie at the end."""
        del self.nodes[node.index]
        siblings = self.roots if node.parent is None else node.parent.children
        siblings.remove(node)
        if node.parent is not None and not node.fresh:
            node.parent.continued -= 1
        self.tokens.cut(node.start)
        for name in ("logprobs", "truncated_logprobs", "experts"):
            if (row := getattr(node, name)) >= 0:
                self.columns[name].cut(row)
        self.tip = node.parent
