"""One model family's markup through the `renderers` library, behind miles' protocol.

What a family is, its class in `families` says as data; how a checkpoint is held against it is in
`fitting`. The library is imported when a handler is built; it needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from miles import Array, Context, EpisodeError, Message, TokenMismatch, Tool
from miles_plugins.tito.calls import Said, as_calls
from miles_plugins.tito.pieces import after_last, as_sampled, shared
from miles_plugins.tito.surrogate import MARK, byte_surrogate
from miles_plugins.tito.template import plain
from miles_plugins.tito.vocabulary import Vocabulary, copy, directory_of

__all__ = ["IMAGE", "Rendered", "Variant"]

IMAGE = "\ufdd0"
"""Stands for one image inside a text on its way to ids; a character that Unicode gives nobody."""

_THOUGHT = ("<think>", "</think>")
_USER: Message = {"role": "user", "content": "a"}
_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What the library raises for messages that it cannot write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One template that a family has been published with."""

    renderer: str
    """Its name in `renderers`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Template arguments that it was published with."""


class Rendered:
    """A family whose markup `renderers` writes and reads; append-only, old reasoning kept.

    Turns are extended from the sampled ids alone, so a prompt costs what is new in it. What a
    template would have dropped from old turns stays; `rewrites` says when that happens.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Where the tokenizer comes from, and what of the template may be chosen."""

        path: str = ""
        """Directory of the tokenizer; empty takes the model's."""
        arguments: Mapping[str, Any] = field(default_factory=dict)
        """Template arguments, of those that the family leaves open (`miles plugins show`); another,
        or another value of one that is fixed, is an error."""
        unverified: bool = False
        """Use the family although nothing says that its markup is the checkpoint's: neither a
        published template nor `renderers` has it, or the checkpoint has no template of its own to
        tell which variant it is."""

    name: ClassVar[str]
    """Registered name."""
    variants: ClassVar[tuple[Variant, ...]]
    """Published templates, the usual one first."""
    tokens: ClassVar[tuple[str, ...]]
    """Special tokens that the tokenizer must have."""
    open_arguments: ClassVar[tuple[str, ...]] = ()
    """Template arguments that a run may choose; every other is fixed."""
    appendable: ClassVar[tuple[str, ...]] = ("user", "tool", "system")
    """Roles that may follow an assistant's turn."""
    rewritten_by: ClassVar[tuple[str, ...]] = ("user",)
    """Roles whose messages may make the template take back reasoning."""
    next_role_closes: ClassVar[tuple[str, ...]] = ()
    """Where no mark of its own ends a turn: the tokens of the roles that follow a turn without and
    with tool calls."""
    image: ClassVar[tuple[str, ...]] = ()
    """Tokens that stand for an image in a prompt; empty for a family that reads text only."""
    verified: ClassVar[bool] = True
    """Its markup was held against a published template or the library's own tests."""
    results_in_call_order: ClassVar[bool] = False
    """The template sorts tool results by the calls that they answer."""
    results_by_name: ClassVar[bool] = False
    """The markup of a tool's result shows the tool's name, which the call says."""
    whole_history: ClassVar[bool] = False
    """What the template appends depends on turns long past, so all of them are rendered each time,
    at a cost that grows with the conversation."""
    tools_by_code: ClassVar[bool] = False
    """The tokenizer's own code writes the offered tools; the template says them otherwise."""

    stop_ids: tuple[int, ...]
    vocab_size: int
    multimodal: bool
    """Images in messages are carried, each as `image`."""
    recognizes_markup: bool
    """Special tokens spelled out in a text become special tokens: the family's markup passes
    through text, so that the two cannot be told apart."""

    @classmethod
    def example_config(cls, directory: Path) -> Mapping[str, Any]:
        """For the contract suite: a tokenizer of bytes with the family's special tokens."""
        byte_surrogate(directory, cls.tokens)
        return {"path": str(directory), "unverified": True}

    @classmethod
    def warnings(cls, config: Config, planned: Any) -> list[str]:
        """That the family is used unverified, or with a tokenizer that only stands in."""
        handler = planned.built.get("tito")
        if not isinstance(handler, cls):
            return []
        found = []
        if not handler.vocabulary.template and (len(cls.variants) > 1 or not cls.verified):
            found.append(
                f"tito {cls.name} is unverified for {handler.directory}: nothing there says that "
                f"its markup is {handler.variant.renderer}'s"
            )
        if (handler.directory / MARK).is_file():
            found.append(
                f"tito {cls.name}: the tokenizer in {handler.directory} is a surrogate, so token "
                "boundaries are not the model's"
            )
        return found

    def __init__(self, config: Config, context: Context) -> None:
        from miles_plugins.tito.fitting import fit

        self.directory = directory_of(config.path, context, self.name)
        self.vocabulary = Vocabulary(self.directory, self.name)
        self.variant, self._renderer = fit(type(self), self.vocabulary, config)
        self.vocab_size = self.vocabulary.size
        self.stop_ids = tuple(self._renderer.get_stop_token_ids())
        self.multimodal = bool(self.image)
        if self.image:
            self.vocabulary.pieces[IMAGE] = [
                self.vocabulary.convert_tokens_to_ids(token) for token in self.image
            ]
        self._prompt = self._whole([_USER], opened=True)
        self._opening = self._role_opening()
        self._thought_ids = tuple(map(self.vocabulary.tokenizer.token_to_id, _THOUGHT))
        self._prefilled = self._prefill()
        self._close_ids = self.vocabulary.convert_tokens_to_ids(self.next_role_closes)
        self.recognizes_markup = not self.vocabulary.plain

    # ---------------------------------------------------------------- text and ids

    def encode(self, text: str) -> Array:
        """(tokens,) int32 of the text alone."""
        return np.array(self.vocabulary.encode(text), np.int32)  # (tokens,) int32

    def decode(self, tokens: Array) -> str:
        """Text of ids, special tokens included."""
        return self.vocabulary.decode(tokens.tolist())

    def save(self, directory: Path) -> None:
        """Copy the tokenizer's files."""
        copy(self.directory, directory)

    # ---------------------------------------------------------------- prompts

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Array:
        """(tokens,) int32 as the family's template writes them, the assistant's turn open.

        Raises `EpisodeError` when the family has no words for the messages."""
        written = self._plain(messages)
        return np.array(self._whole(written, tools, opened=True), np.int32)  # (tokens,) int32

    def extend(
        self,
        stored: Array,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
    ) -> Array:
        """(new tokens,) int32 to append to `stored`; costs what is new, not what is stored.

        Raises `EpisodeError` for messages that may not follow a turn, `TokenMismatch` when nothing
        can be appended without touching what was sampled.
        """
        self._refuse_roles(messages)
        last = history[-1] if history else {}
        added = self._added(last, messages)
        said = after_last(stored, self._opening)
        past = self._plain(history) if self.whole_history else [_USER, *self._plain([last])]
        new = self._bridged(said, added, tools) if added and not self.whole_history else None
        if new is None:  # the library leaves some turns to a rendering of their own
            new = self._after(past, said, added)
        return np.array(new, np.int32)  # (new tokens,) int32

    def rewrites(
        self,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
    ) -> bool:
        """Whether the template, now that `messages` follow, would take back something of `history`
        that it showed when the last turn was sampled: reasoning, as a rule."""
        asked = any(m.get("role") in self.rewritten_by for m in messages)
        if self._renderer.is_prefix_stable or not asked or not any(map(_reasons, history)):
            return False
        past = self._plain(history)
        whole = self._render([*past, *self._plain(messages)], tools, opened=True)
        before = self._whole(past[:-1], tools, opened=False) if len(past) > 1 else []
        if whole.token_ids[: len(before)] != before:
            return True
        thought = str(past[-1].get("reasoning_content") or "").strip()
        own = [
            token
            for token, index in zip(whole.token_ids, whole.message_indices, strict=True)
            if index == len(past) - 1
        ]
        return thought not in self.vocabulary.decode(own)

    # ---------------------------------------------------------------- completions

    def parse(self, tokens: Array, *, tools: Sequence[Tool] = ()) -> Message:
        """The completion as an assistant message, white space as sampled. A call that cannot be
        read stays in `content` as it was written."""
        ids = tokens.tolist()
        ended = next((i for i, token in enumerate(ids) if token in self.stop_ids), len(ids))
        text = self.vocabulary.decode(ids[:ended])
        how = {"tools": [dict(t) for t in tools] or None, "prompt_ids": self._prefilled}
        try:
            found = self._renderer.parse_response(ids, **how)
        except (ValueError, RecursionError):  # a number of 5000 digits, lists 1000 deep
            return {"role": "assistant", "content": text}
        message: dict[str, Any] = {"role": "assistant"}
        at = 0
        if found.reasoning_content:
            thought, at = as_sampled(found.reasoning_content, text, 0)
            message["reasoning_content"] = thought
        content, said = as_sampled(found.content or "", text, at)[0], list[Said]()
        for call in found.tool_calls:
            if call.name and isinstance(call.arguments, dict):
                said.append((call.id, call.name, call.arguments))
            else:
                span = call.token_span
                content += self.vocabulary.decode(ids[span[0] : span[1]]) if span else call.raw
        message["content"] = content
        if said:
            message["tool_calls"] = as_calls(tokens, said)
        return message

    def demonstrate(self, said: str | Message) -> Array:
        """(tokens,) int32 of what a model would have sampled to say it, stop id included.

        Where the prompt opens the reasoning and nothing is thought, it is closed first; where the
        prompt closes it, what was thought is left out."""
        message = {"role": "assistant", "content": said} if isinstance(said, str) else dict(said)
        think, thought = self._thought_ids
        if thought in self._prefilled:
            message.pop("reasoning_content", None)
        ids = self._sampled(message)
        if think in self._prefilled and thought not in {*self._prefilled, *ids}:
            shown = self._sampled({**message, "content": "C", "reasoning_content": "R"})
            after = self.vocabulary.decode(shown).partition("</think>")[2].partition("C")[0]
            ids = [thought, *self.vocabulary.encode(after), *ids]
        closes = self._close_ids or [self.stop_ids[0]] * 2
        ids.append(closes[bool(message.get("tool_calls"))])
        return np.array(ids, np.int32)  # (tokens,) int32

    def _sampled(self, message: Message) -> list[int]:
        """What the template writes of a first turn after its prompt, without the stop id."""
        whole = self._whole(self._plain([_USER, message]), opened=False)
        ids = whole[shared(self._prompt, whole) :]
        return ids[: next((i for i, t in enumerate(ids) if t in self.stop_ids), len(ids))]

    # ---------------------------------------------------------------- parts

    @classmethod
    def spell(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as this family's template tells them apart."""
        return messages

    def _plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return self.spell(plain(messages, who=self.name, image=IMAGE if self.image else None))

    def _render(self, messages: Sequence[Any], tools: Sequence[Tool], *, opened: bool) -> Any:
        try:
            return self._renderer.render(
                list(messages),
                tools=[dict(t) for t in tools] or None,
                add_generation_prompt=opened,
            )
        except _REFUSALS as error:
            raise EpisodeError(
                f"tito {self.name}: the markup has no words for {len(messages)} messages: {error}"
            ) from error

    def _whole(
        self, messages: Sequence[Any], tools: Sequence[Tool] = (), *, opened: bool
    ) -> list[int]:
        ids: list[int] = self._render(messages, tools, opened=opened).token_ids
        return ids

    def _role_opening(self) -> list[int]:
        """Ids that open every assistant's turn: what a first one and one after a tool's result
        share."""
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
        talk = [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        talk.append({"role": "tool", "content": "a", "tool_call_id": "c", "name": "f"})
        tails = []
        for messages in ([_USER], talk):
            closed = self._whole(messages, opened=False)
            opened = self._whole(messages, opened=True)
            tails.append(opened[shared(closed, opened) :])
        common = shared(tails[0], tails[1])
        return tails[0][:common] or tails[0]

    def _prefill(self) -> list[int]:
        """What of a turn the prompt says already, where it opens the reasoning; otherwise the last
        id of the opening. The library looks in it for that and for nothing else."""
        think = self._thought_ids[0]
        closed = self._whole([_USER], opened=False)
        opening = self._prompt[shared(closed, self._prompt) :]
        at = opening.index(think) if think in opening else len(opening) - 1
        return opening[at:]

    def _refuse_roles(self, messages: Sequence[Message]) -> None:
        for index, message in enumerate(messages):
            if message.get("role") not in self.appendable:
                raise EpisodeError(
                    f"tito {self.name}: message {index} has role {message.get('role')!r}; after "
                    f"an assistant's turn may follow: {', '.join(self.appendable)}"
                )

    def _added(self, last: Message, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The new messages, with what the markup of tool results takes from the calls."""
        calls = [c for c in last.get("tool_calls") or () if c.get("id")]
        order = {c["id"]: i for i, c in enumerate(calls)}
        names = {c["id"]: c.get("function", {}).get("name") for c in calls}
        added = self._plain(messages)
        for message in added:
            own = message.get("tool_call_id")
            if self.results_by_name and message["role"] == "tool" and own in names:
                message.setdefault("name", names[own])
        if self.results_in_call_order:
            results = [m for m in added if m["role"] == "tool"]
            results.sort(key=lambda m: order.get(m.get("tool_call_id"), len(order)))
            queue = iter(results)
            added = [next(queue) if m["role"] == "tool" else m for m in added]
        return added

    def _bridged(
        self, said: list[int], added: list[dict[str, Any]], tools: Sequence[Tool]
    ) -> list[int] | None:
        before = [*self._prefilled, *said]
        try:
            made = self._renderer.bridge_to_next_turn(
                self._prefilled, said, added, tools=[dict(t) for t in tools] or None
            )
        except _REFUSALS as error:
            raise EpisodeError(
                f"tito {self.name}: the markup has no words for {len(added)} new messages: {error}"
            ) from error
        if made is None:
            return None
        ids: list[int] = made.token_ids
        at = shared(before, ids)
        if at < len(before):
            raise TokenMismatch(
                f"tito {self.name}: token {at} of the last turn would change: "
                f"sampled {self.vocabulary.decode(before[at : at + 12])!r}, "
                f"next prompt {self.vocabulary.decode(ids[at : at + 12])!r}"
            )
        new = ids[at:]
        if self._close_ids and (not said or said[-1] not in self.stop_ids):
            # the role that follows is the close; the library would put an end of text before it
            ended = next(i for i, token in enumerate(new) if token in self.stop_ids)
            if new[ended] not in self._close_ids:
                del new[ended]
        return new

    def _after(
        self, past: list[dict[str, Any]], said: list[int], added: list[dict[str, Any]]
    ) -> list[int]:
        """What a rendering of the past and the new messages has after the past's last turn."""
        made = self._render([*past, *added], (), opened=True)
        own = [
            i
            for i, index in enumerate(made.message_indices)
            if index == len(past) - 1 and made.token_ids[i] in self.stop_ids
        ]
        if not own:
            raise TokenMismatch(
                f"tito {self.name}: the markup does not close the turn that was sampled, so "
                f"nothing can follow it: {self.vocabulary.decode(said[-24:])!r}"
            )
        closed = bool(said) and said[-1] in self.stop_ids
        ids: list[int] = made.token_ids
        return ids[own[-1] + closed :]


def _reasons(message: Message) -> bool:
    said = message.get("content")
    return bool(message.get("reasoning_content")) or (isinstance(said, str) and "</think>" in said)
