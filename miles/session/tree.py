"""One conversation, token by token: a tree of turns over flat arrays, which owns its tokens.

It renders through a tito handler, decides where a request attaches, and stores what was sampled.
It asks no engine (`miles.session.dialogue`) and writes no file (`miles.session.journal`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from miles.errors import (
    EngineError,
    EpisodeError,
    GenerationAborted,
    PromptTooLong,
    SessionClosed,
    SessionConflict,
    SessionFull,
    TokenMismatch,
)
from miles.protocols import Tito, Tool
from miles.session import attach
from miles.session.attach import Place, messages_of
from miles.session.checks import check_extends, faults_of
from miles.session.following import follow
from miles.session.images import encoded_images, refuse_images
from miles.session.matching import differences, unmatched_tool_ids, with_call_ids
from miles.session.samples import kept_leaves, samples
from miles.session.storage import Storage
from miles.session.turns import Counters, Node, Prompt, Recorder, Turn
from miles.settings import SessionKeys
from miles.types import Array, Completion, Message, Sample, Trajectory

__all__ = ["Session"]

_log = logging.getLogger(__name__)
_RULES = SessionKeys()
_INT32 = np.dtype(np.int32)
_WARNINGS = 16  # kept of a session


class Session:
    """The record of one conversation.

    `prompt` says what to sample after, `commit` stores what was sampled, `abandon` forgets a prompt
    that came to nothing. Prompts of a linear path are views of what is stored; only a request that
    leaves it has its tokens gathered.
    """

    __slots__ = (
        "_next", "_pending", "_storage", "_tito", "_words",
        "closed", "counters", "data", "failure", "id", "max_tokens", "recorder", "rules",
        "truncated", "warnings",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        tito: Tito,
        *,
        rules: SessionKeys = _RULES,
        max_tokens: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """`max_tokens`: longest prompt with its completion; None or 0 for no limit beside
        `rules.max_tokens`. `data`: plain values to keep beside the session. Raises `EpisodeError`
        for an empty id."""
        if not id:
            raise EpisodeError("session: the id, which is its routing key, is empty")
        self.id = id
        """Also the routing key."""
        self.rules = rules
        most = rules.max_tokens
        self.max_tokens = min(most, max_tokens) if most and max_tokens else most or max_tokens or 0
        """Longest prompt with its completion; 0 for no limit."""
        self.data: Mapping[str, Any] = data or {}
        self.counters = Counters()
        self.warnings: list[str] = []
        """The last of what was logged as a warning."""
        self.failure: TokenMismatch | SessionClosed | None = None
        """Why there is nothing to train on."""
        self.closed = ""
        """Why no more requests are taken; empty while they are."""
        self.truncated = False
        """A prompt left no room for a completion."""
        self.recorder: Recorder | None = None
        self._tito = tito
        self._storage = Storage()
        self._pending: dict[int, Prompt] = {}
        self._next = 0
        self._words: str | None = None  # of the last turn

    # ---- looking

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation that ends in the turn stored last, in the stored spelling."""
        return messages_of(self._storage.tip)

    @property
    def replies(self) -> Iterator[Message]:
        """What was sampled in every stored turn, in the stored spelling."""
        return (node.message for node in self._storage.nodes.values())

    @property
    def turns(self) -> int:
        """Turns that are stored."""
        return len(self._storage.nodes)

    @property
    def tokens(self) -> int:
        """Tokens that are stored, of all branches."""
        return self._storage.stored

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, spare room included."""
        return self._storage.nbytes

    @property
    def pending(self) -> int:
        """Prompts being answered."""
        return len(self._pending)

    def has(self, index: int) -> bool:
        """Whether the turn of that index is stored; -1 is the beginning."""
        return index < 0 or index in self._storage.nodes

    def offers(self, index: int) -> Sequence[Tool]:
        """The function schemas that the turn of an index offered; of -1 none."""
        node = self._storage.nodes.get(index)
        return () if node is None else node.tools

    def samples(self) -> tuple[Sample, ...]:
        """One per kept leaf. Raises what made the session fail (`TokenMismatch`), and when nothing
        was sampled `PromptTooLong`, if a prompt left no room, or `EpisodeError`."""
        return samples(self._leaves(), self._storage.columns)

    def trajectory(
        self, *, reward: float, metrics: Mapping[str, float] | None = None
    ) -> Trajectory:
        """Everything so far, as the trajectory to train on. Raises as `samples`."""
        leaves = self._leaves()
        return Trajectory(
            id=self.id,
            samples=samples(leaves, self._storage.columns),
            reward=reward,
            text=self.text,
            metrics={} if metrics is None else metrics,
        )

    def _leaves(self) -> list[Node]:
        if self.failure is not None:
            raise self.failure
        if not (leaves := kept_leaves(self._storage.nodes.values(), self.rules.keep)):
            kind = PromptTooLong if self.truncated else EpisodeError
            raise kind(f"session {self.id}: nothing was sampled that could be trained on")
        return leaves

    @property
    def text(self) -> str:
        """The turn stored last, decoded, without its stop token."""
        if self._words is not None or (tip := self._storage.tip) is None:
            return self._words or ""
        return self._spoken(self._storage.tokens.rows(tip.split, tip.stop), self._tito.stop_ids)

    def _spoken(self, tokens: Array, stop_ids: Sequence[int]) -> str:
        """Text of a completion without the stop token that it ended with."""
        closed = len(tokens) and int(tokens[-1]) in stop_ids
        return self._tito.decode(tokens[:-1] if closed else tokens)

    # ---- asking

    def prompt(
        self, messages: str | Sequence[Message], *, tools: Sequence[Tool] = (), append: bool = False
    ) -> Prompt:
        """What to sample after. `messages` is the whole history with what is new, or with `append`
        only what is new after the turn stored last (no tools then mean those of before), or raw
        text for a first prompt.

        Raises `HistoryMismatch`, `UnsupportedRequest`, `SessionConflict`, `SessionFull`,
        `SessionClosed`, `PromptTooLong` (the session is then marked truncated), `TokenMismatch`,
        `EpisodeError` for misplaced raw text, and what the tito handler raises. The session is then
        as before.
        """
        if self.closed or self.failure is not None:
            self._refuse()
        place = self._place(messages, tools, append=append)
        new, parent = place.new, place.parent
        if len(self._storage.nodes) + len(self._pending) >= self.rules.max_turns:
            self._refuse_when_full(place)
        own = encoded_images(new)
        if own and not getattr(self._tito, "multimodal", False):
            refuse_images(own, self._tito)
        above: tuple[bytes, ...] = ()
        fresh = True
        if parent is not None:
            tools = parent.tools  # the same, and stored once
            above = tuple(image for node in parent.token_path() for image in node.images)
            fresh, added = self._following(parent, new, tools)
        elif isinstance(messages, str):
            added = self._tito.encode(messages)
        else:
            added = self._tito.render(new, tools=tools)
        before = None if fresh else parent
        size = len(added) if before is None else len(added) + before.size
        if not size or added.dtype != _INT32 or 0 < self.max_tokens <= size:
            self._refuse_unfit(size, added, parent)
        index = self._next
        self._pending[index] = prompt = Prompt(
            index=index,
            parent=-1 if parent is None else parent.index,
            tokens=self._storage.offer(index, before, added, in_place=place.replaces is None),
            added=added,
            new=new,
            tools=tools,
            images=(*above, *own) if above else own,
            fresh=fresh,
            raw=isinstance(messages, str),
            replaces=-1 if place.replaces is None else place.replaces.index,
            own_images=(*above, *own) if above and fresh else own,
        )
        self._next = index + 1
        return prompt

    def abandon(self, prompt: Prompt) -> None:
        """Nothing was sampled after this prompt: the session is as before it. Of a prompt that is
        not being answered (any more), nothing."""
        if self._pending.pop(prompt.index, None) is None:
            return
        self._storage.release(prompt.index)
        if prompt.index == self._next - 1:
            self._next -= 1  # asked again, it is the same turn

    def commit(
        self, prompt: Prompt, completion: Completion, *, stop_ids: Sequence[int] | None = None
    ) -> Turn:
        """Store what was sampled after a prompt. `stop_ids` are those asked for, the handler's
        without any.

        Raises `TokenMismatch` when the prompt is not what is stored; `EngineError` when the
        completion contradicts itself; `GenerationAborted`; `SessionClosed`; `SessionConflict` for a
        prompt that is not being answered. The prompt is then still to be abandoned.
        """
        if self.closed:
            raise SessionClosed(f"session {self.id}: {self.closed}")
        offered = self._pending.get(prompt.index)
        if offered is None:
            raise SessionConflict(
                f"session {self.id}: prompt {prompt.index} is not being answered; commit it once"
            )
        parent = self._storage.nodes.get(offered.parent)
        if prompt is not offered:  # one that was away: what it was sampled after is not known
            try:
                where = f"session {self.id}: turn {prompt.index}"
                check_extends(offered.tokens, prompt.tokens, where=where, decode=self._tito.decode)
            except TokenMismatch as error:
                self._mismatched(error)
                raise
        if completion.finish == "abort":
            raise GenerationAborted(f"session {self.id}: turn {prompt.index} was aborted")
        oldest = -1 if offered.fresh or parent is None else parent.version
        if wrong := faults_of(completion, oldest):
            raise EngineError(f"session {self.id}: turn {prompt.index}: the engine gave {wrong}")
        message = self._tito.parse(completion.tokens, tools=offered.tools)
        if message.get("tool_calls"):
            message = with_call_ids(message, prompt.index)
        if self.recorder is not None:
            self.recorder.turn(self, offered, completion, message)
        self.store(offered, completion, message)
        stops = self._tito.stop_ids if stop_ids is None else stop_ids
        self._words = text = self._spoken(completion.tokens, stops)
        return Turn(offered.index, message, text, len(offered.tokens), completion)

    def store(self, prompt: Prompt, completion: Completion, message: Message) -> None:
        """Store a turn that was checked, or that a journal brings back."""
        storage, counters = self._storage, self.counters
        self._pending.pop(prompt.index, None)
        if self._next <= prompt.index:
            self._next = prompt.index + 1
        node = storage.add(prompt, completion, message)
        counters.turns += 1
        counters.prompt_tokens += node.size - len(completion.tokens)
        counters.sampled_tokens += len(completion.tokens)
        counters.cached_tokens += completion.cached_tokens
        if prompt.replaces >= 0:
            counters.rollbacks += 1
        elif node.fresh and node.parent is not None:
            counters.rebased += 1
        elif len(storage.roots if node.parent is None else node.parent.children) > 1:
            counters.branches += 1
        self._words = None

    def close(self, reason: str, *, failure: SessionClosed | None = None) -> None:
        """Take no more requests. With a `failure`, what was recorded is not to be trained on."""
        self.closed = reason
        self.failure = self.failure or failure

    def mark(self, what: str, value: Any) -> None:
        """Note that no completion fits after the turn of an index (`truncated`), or that a mismatch
        of these words `failed` the session; also what a journal brings back."""
        if what == "failed":
            self.failure = TokenMismatch(value)
            return
        self.truncated = True
        if (node := self._storage.nodes.get(value)) is not None:
            node.truncated = True

    # ---- where a request goes

    def _place(
        self, messages: str | Sequence[Message], tools: Sequence[Tool], *, append: bool
    ) -> Place:
        tip, rules = self._storage.tip, self.rules
        try:
            if self._pending and (append or rules.extension == "linear"):
                raise SessionConflict("another request is being answered; wait for it, or branch")
            if append or isinstance(messages, str):
                return attach.append(tip, messages, tools)
            given, differ = tuple(messages), differences(rules.compare)
            if rules.extension == "linear":
                place = attach.linear(tip, given, tools, differ)
            else:
                place = attach.branching(self._storage.roots, given, tools, differ)
        except SessionConflict:
            self.counters.conflicts += 1
            raise
        if rules.compare == "role_text" and place.parent is not None:
            self._report_ids(unmatched_tool_ids(messages_of(place.parent), given))
        return place

    def _report_ids(self, wrong: Sequence[str]) -> None:
        if not wrong:
            return
        self.counters.unmatched_tool_ids += len(wrong)
        self._warn(
            "role_text took a request's history for the recorded one although these tool-call ids "
            f"do not correspond: {', '.join(wrong)}"
        )

    def _warn(self, what: str) -> None:
        _log.warning("session %s: %s", self.id, what)
        self.warnings = [*self.warnings[1 - _WARNINGS :], what]

    def _refuse(self) -> NoReturn:
        if self.closed:
            raise SessionClosed(f"session {self.id}: {self.closed}")
        kind = SessionClosed if isinstance(self.failure, SessionClosed) else TokenMismatch
        raise kind(str(self.failure))

    def _refuse_when_full(self, place: Place) -> None:
        limit = self.rules.max_turns
        if self.turns + len(self._pending) - (place.replaces is not None) >= limit:
            raise SessionFull(
                f"session {self.id}: it holds {self.turns} turns; session.max_turns is {limit}"
            )

    # ---- what the next prompt is

    def _following(
        self, parent: Node, new: tuple[Message, ...], tools: Sequence[Tool]
    ) -> tuple[bool, Array]:
        stored, history = self._storage.tokens_of(parent), messages_of(parent)
        rebase = self.rules.history == "rebase"
        try:
            found = follow(self._tito, stored, history, new, tools, rebase=rebase)
        except TokenMismatch as error:
            self._mismatched(error)
            raise
        self.counters.kept_history += found.kept
        return found.fresh, found.added

    def _refuse_unfit(self, size: int, added: Array, parent: Node | None) -> None:
        if not size:
            raise EpisodeError(f"session {self.id}: the prompt is empty")
        if added.dtype != _INT32:
            raise EpisodeError(f"session {self.id}: tito gave {added.dtype} tokens, not int32")
        self.counters.truncated += 1
        index = -1 if parent is None else parent.index
        if self.recorder is not None:
            self.recorder.mark(self, "truncated", index)
        self.mark("truncated", index)
        raise PromptTooLong(
            f"session {self.id}: a prompt of {size} tokens leaves no room in a context of "
            f"{self.max_tokens}"
        )

    def _mismatched(self, error: TokenMismatch) -> None:
        """Count it, and unless tokens are only masked, let it be the end of the session: the turn
        it happened in is not stored either way."""
        self.counters.token_mismatches += 1
        self._warn(f"token mismatch: {error}")
        if self.rules.on_mismatch == "fail":
            if self.recorder is not None:
                self.recorder.mark(self, "failed", str(error))
            self.mark("failed", str(error))
