"""Any tokenizer with a chat template: a first prompt is rendered whole, later ones by the text that
was added.

The template is used as it is. Families whose markup is known have handlers of their own, which are
faster and sort out more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from miles import Array, ConfigError, Context, EpisodeError, Message, TokenMismatch, Tool
from miles_plugins.tito.bytes import Bytes
from miles_plugins.tito.calls import as_calls
from miles_plugins.tito.markup import markup_of
from miles_plugins.tito.pieces import shared
from miles_plugins.tito.template import Template, plain
from miles_plugins.tito.vocabulary import Vocabulary, copy, directory_of

# stands for an assistant's text when the template is asked how it closes a turn
_MARK = "miles-marks-this-answer"
_WINDOW = 12  # tokens shown on each side of a mismatch
_USER = {"role": "user", "content": "a"}


class Generic:
    """Tokens of any Hugging Face tokenizer with a chat template, append-only and checked.

    The next prompt is the stored ids plus the ids of the text that the template adds; what the
    template would have rewritten (old reasoning, say) stays as it was sampled, and `rewrites` says
    so. Reasoning between `<think>` marks and the common markups of tool calls are read. Markup
    inside a text becomes special tokens, as with `transformers`.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Where tokenizer and template come from."""

        path: str = ""
        """Directory of the tokenizer; empty takes the model's."""
        template: str = ""
        """File with a Jinja chat template to use instead of the tokenizer's own."""
        arguments: Mapping[str, Any] = field(default_factory=dict)
        """Variables handed to the template, such as `enable_thinking`."""
        stop: tuple[str, ...] = ()
        """More tokens that end an assistant's turn, by their text."""

    name: ClassVar[str] = "generic"
    stop_ids: tuple[int, ...]
    vocab_size: int
    multimodal = False
    grows_lists: ClassVar[bool] = False
    """The template appends to lists of its own."""
    recognizes_markup = True  # the contract suite asks others that markup in a text stays text

    @classmethod
    def example_config(cls, directory: Path) -> Mapping[str, Any]:
        """For the contract suite: a tokenizer of bytes with the ChatML template."""
        Bytes(Bytes.Config(), Context(directory=directory)).save(directory)
        return {"path": str(directory)}

    @classmethod
    def warnings(cls, config: Config, planned: Any) -> list[str]:
        """That a checkpoint's family has no handler of its own."""
        model = planned.built.get("model")
        directory = model.directory() if model is not None else None
        if directory is None or "tito" not in planned.built:
            return []
        kind = model.hf_config().get("model_type")
        return [
            f"tito: the checkpoint {directory} ({kind}) has no handler of its own, or its chat "
            "template is not its family's; tito=generic uses the template as it is"
        ]

    def __init__(self, config: Config, context: Context) -> None:
        self._directory = directory_of(config.path, context, self.name)
        vocabulary = Vocabulary(self._directory, self.name)
        self._vocabulary, self._tokenizer = vocabulary, vocabulary.tokenizer
        self._own_template = bool(config.template)
        self._template = Template(
            _template(config, vocabulary),
            who=self.name,
            variables={**vocabulary.named, **config.arguments},
            grows_lists=self.grows_lists,
        )
        self._markup = markup_of(self._template.text)
        self.vocab_size = vocabulary.size
        stops = {*vocabulary.declared_stops, *(self._id(text) for text in config.stop)}
        self._closing, self._between = self._turn_end(stops)
        self.stop_ids = tuple(sorted(stops | {self._ids(self._closing)[-1]}))
        self._thinking, self._silent = self._thought_in_prompt()

    def encode(self, text: str) -> Array:
        """(tokens,) int32 of the text; added tokens written in it are recognised."""
        return np.array(self._ids(text), np.int32)  # (tokens,) int32

    def decode(self, tokens: Array) -> str:
        """Text of ids, special tokens included."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Array:
        """(tokens,) int32 of the template's text, the assistant's turn open.

        Raises `EpisodeError` when the template refuses the messages."""
        return self.encode(self._text(messages, tools, opened=True))

    def extend(
        self,
        stored: Array,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
    ) -> Array:
        """(new tokens,) int32 to append to `stored`. Raises `TokenMismatch` when it cannot be told
        what the template adds, and `EpisodeError` when it refuses the messages.

        What was sampled counts as said, whatever the template would have made of it. When the whole
        text does not begin with the stored text, what is added stands after the template's own text
        of the history, or after the end of its last turn.
        """
        whole = self._text([*history, *messages], tools, opened=True)
        said = self.decode(stored)
        if whole.startswith(said):
            return self._continue(stored, whole[len(said) :])
        before = self._text(history, tools, opened=False)
        end = self._closing + self._between
        closed = len(stored) > 0 and int(stored[-1]) in self.stop_ids
        head = self._between if closed else end
        if whole.startswith(before) and before.endswith(end):
            return self._continue(stored, head + whole[len(before) :])
        added = self._added(whole, history, messages, tools)
        if added is None:
            raise self._mismatch(stored, whole)
        return self._continue(stored, added if closed else self._closing + added)

    def rewrites(
        self,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
    ) -> bool:
        """Whether the template, now that `messages` follow, would take back something of `history`
        that it showed when the last turn was sampled: reasoning, as a rule."""
        if not history or history[-1].get("role") != "assistant":
            return False
        whole = self._text([*history, *messages], tools, opened=True)
        before = self._text(history[:-1], tools, opened=False) if len(history) > 1 else ""
        if not whole.startswith(before):
            return True
        thought = str(history[-1].get("reasoning_content") or "").strip()
        return self._markup.thinks and thought not in whole[len(before) :]

    def parse(self, tokens: Array, *, tools: Sequence[Tool] = ()) -> Message:
        """The completion as an assistant message, white space as sampled, the stop id removed.

        A call that cannot be read stays in `content`. Ids of calls are made from the completion's
        own tokens: unique in it, and the same each time it is parsed."""
        closed = len(tokens) > 0 and int(tokens[-1]) in self.stop_ids
        text = self.decode(tokens[:-1] if closed else tokens)
        found = self._markup.read(text, opened=self._thinking, tools=tools)
        message: dict[str, Any] = {"role": "assistant", "content": found.content}
        if found.reasoning is not None:
            message["reasoning_content"] = found.reasoning
        if found.calls:
            message["tool_calls"] = as_calls(tokens, found.calls)
        return message

    def demonstrate(self, said: str | Message) -> Array:
        """(tokens,) int32 of what a model would have sampled to say it, up to the stop id: a text
        as it is; a message with reasoning or calls as the template writes it."""
        message = {"role": "assistant", "content": said} if isinstance(said, str) else dict(said)
        if self._silent:
            message.pop("reasoning_content", None)
        bare = not message.get("tool_calls") and not message.get("reasoning_content")
        if bare and not self._thinking:
            return self.encode(str(message.get("content") or "") + self._closing)
        ids = self._sampled(message)
        if self._thinking and "</think>" not in self._vocabulary.decode(ids):
            ids = [*self._ids(self._thought_end()), *ids]
        return np.array([*ids, *self._ids(self._closing)], np.int32)  # (tokens,) int32

    def _sampled(self, message: Message) -> list[int]:
        """What the template writes of a first turn after its prompt, without its close."""
        opened = self._ids(self._text([_USER], opened=True))
        whole = self._ids(self._text([_USER, message], opened=False))
        ids, end = whole[shared(opened, whole) :], self._ids(self._closing)
        at = next((i for i in range(len(ids)) if ids[i : i + len(end)] == end), len(ids))
        return ids[:at]

    def _thought_end(self) -> str:
        """What stands between a thought and what is said; templates that show no thought have it
        as most do."""
        shown = self._sampled({"role": "assistant", "content": "C", "reasoning_content": "R"})
        before, mark, after = self._vocabulary.decode(shown).partition("</think>")
        return before.partition("R")[2] + mark + after.partition("C")[0] or "\n</think>\n\n"

    def save(self, directory: Path) -> None:
        """Copy the tokenizer's files; a template given in the configuration becomes
        `chat_template.jinja`."""
        copy(self._directory, directory)
        if self._own_template:
            (directory / "chat_template.jinja").write_text(self._template.text, encoding="utf-8")

    # ---------------------------------------------------------------- parts

    def _ids(self, text: str) -> list[int]:
        return self._vocabulary.encode(text)

    def _id(self, text: str) -> int:
        found = self._tokenizer.token_to_id(text)
        if found is None:
            raise ConfigError(
                f"tito.stop: {text!r} is not a token of the tokenizer in {self._directory}"
            )
        return int(found)

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opened: bool
    ) -> str:
        written = plain(messages, who=self.name)
        return self._template.render(written, tools=tools, opened=opened)

    def _added(
        self,
        whole: str,
        history: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> str | None:
        """What a template that rewrites history writes after the end of its last turn; None when
        history shows there as well."""
        marked = [*history[:-1], {**history[-1], "content": _MARK}] if history else []
        past = self._after_mark(self._text(marked, tools, opened=False))
        added = self._after_mark(self._text([*marked, *messages], tools, opened=True))
        return added if past == self._between and added and whole.endswith(added) else None

    def _after_mark(self, text: str) -> str:
        """The text behind the end of the marked turn; empty without one."""
        at = text.rfind(_MARK)
        cut = text.find(self._closing, at) if at >= 0 else -1
        return text[cut + len(self._closing) :] if cut >= 0 else ""

    def _continue(self, stored: Array, text: str) -> Array:
        """(new tokens,) int32 of text that follows `stored`. The last stored token goes in front
        and comes off again, because some tokenizers treat the beginning of a text as the beginning
        of a word."""
        last = int(stored[-1])
        token = self._tokenizer.id_to_token(last)
        ids = self._ids(token + text) if last in self.stop_ids else self._ids(text)
        if last in self.stop_ids and ids[:1] == [last]:
            ids = ids[1:]
        return np.array(ids, np.int32)  # (new tokens,) int32

    def _thought_in_prompt(self) -> tuple[bool, bool]:
        """Whether the prompt itself opens the reasoning, and whether it closes it."""
        if not self._markup.thinks:
            return False, False
        try:
            opened = self._text([_USER], opened=True)
        except EpisodeError:
            return False, False  # a template that wants more than a user's word
        return opened.rfind("<think>") > opened.rfind("</think>"), "</think>" in opened

    def _turn_end(self, stops: set[int]) -> tuple[str, str]:
        """How the template closes an assistant's turn: the text up to its stop token, and what
        follows before the next turn. Raises `ConfigError` when there is no stop token in it."""
        talk = [_USER, {"role": "assistant", "content": _MARK}]
        try:
            text = self._text(talk, opened=False)
        except EpisodeError as error:
            raise ConfigError(f"{error} (asked for one user and one assistant turn)") from error
        end = text[text.rfind(_MARK) + len(_MARK) :] if _MARK in text else ""
        ids = self._ids(end)
        added = self._tokenizer.get_added_tokens_decoder()
        candidates = [t for t in ids if t in stops] or [t for t in ids if t in added]
        if not candidates:
            raise ConfigError(
                f"tito {self.name}: the chat template closes an assistant's turn with {end!r}, "
                "which holds no stop token of "
                f"the tokenizer in {self._directory}; name one with tito.stop=[...] or give "
                "tito.template=FILE"
            )
        mark = self._tokenizer.id_to_token(candidates[0])
        cut = end.index(mark) + len(mark)
        return end[:cut], end[cut:]

    def _mismatch(self, stored: Array, whole: str) -> TokenMismatch:
        rendered = self.encode(whole)
        shared = min(len(stored), len(rendered))
        differs = np.flatnonzero(stored[:shared] != rendered[:shared])
        index = int(differs[0]) if len(differs) else shared
        window = slice(max(0, index - _WINDOW), index + _WINDOW)
        error = TokenMismatch(
            f"tito {self.name}: the chat template is not append-only: token {index} of the stored "
            f"{len(stored)} differs: "
            f"stored {self.decode(stored[window])!r}, template {self.decode(rendered[window])!r}"
        )
        error.add_note(
            "give a template that keeps earlier turns as they were sampled: tito.template=FILE"
        )
        return error


def _template(config: Generic.Config, vocabulary: Vocabulary) -> str:
    if config.template:
        path = Path(config.template)
        if not path.is_file():
            raise ConfigError(f"tito.template: no file {path}")
        return path.read_text(encoding="utf-8")
    if not vocabulary.template:
        raise ConfigError(
            f"tito generic: the tokenizer in {vocabulary.directory} has no chat template; give one "
            "with tito.template=FILE"
        )
    return vocabulary.template
