"""Any tokenizer with a chat template: a first prompt is rendered whole, later ones by the text that
was added.

It uses the template as it is and parses no tool calls or reasoning; families that need more have
their own handler.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from miles import Array, ConfigError, Context, EpisodeError, Message, TokenMismatch, Tool
from miles_plugins.tito.bytes import Bytes

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
# stands for an assistant's text when the template is asked how it closes a turn
_MARK = "miles-marks-this-answer"
_WINDOW = 12  # tokens shown on each side of a mismatch


class Generic:
    """Tokens of any Hugging Face tokenizer with a chat template, append-only and checked.

    The next prompt is the stored ids plus the ids of the text that the template adds. A template
    that rewrites earlier turns (dropping old reasoning, say) is a `TokenMismatch` that names the
    first token that differs. Markup inside a text becomes special tokens, as with `transformers`.
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

    stop_ids: tuple[int, ...]
    vocab_size: int
    recognizes_markup = True  # the contract suite asks others that markup in a text stays text

    @classmethod
    def example_config(cls, directory: Path) -> Mapping[str, Any]:
        """For the contract suite: a tokenizer of bytes with the ChatML template."""
        Bytes(Bytes.Config(), Context(directory=directory)).save(directory)
        return {"path": str(directory)}

    def __init__(self, config: Config, context: Context) -> None:
        self._arguments = dict(config.arguments)
        self._directory = _directory(config, context)
        loaded = _load(self._directory)
        self._tokenizer = loaded.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = {
            name: getattr(loaded, name)
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if getattr(loaded, name)
        }
        self._own_template = bool(config.template)
        self._template = _template(config, loaded, self._directory)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        stops = {*_eos_ids(self._directory), *(self._id(text) for text in config.stop)}
        if loaded.eos_token_id is not None:
            stops.add(loaded.eos_token_id)
        self._closing, self._between = self._turn_end(stops)
        self.stop_ids = tuple(sorted(stops | {self._ids(self._closing)[-1]}))

    def encode(self, text: str) -> Array:
        """(tokens,) int32 of the text; added tokens written in it are recognised."""
        return np.array(self._ids(text), np.int32)  # (tokens,) int32

    def decode(self, tokens: Array) -> str:
        """Text of ids, special tokens included."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Array:
        """(tokens,) int32 of the template's text, the assistant's turn open.

        Raises `EpisodeError` when the template refuses the messages."""
        return self.encode(self._text(messages, opened=True))

    def extend(
        self,
        stored: Array,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
    ) -> Array:
        """(new tokens,) int32 to append to `stored`. Raises `TokenMismatch` when the template does
        not continue what it said before, and `EpisodeError` when it refuses the messages.

        What was sampled counts as said, whatever the template would have made of it: when the whole
        text does not begin with the stored text, it must begin with the template's own text of the
        history.
        """
        whole = self._text([*history, *messages], opened=True)
        said = self.decode(stored)
        if whole.startswith(said):
            return self._continue(stored, whole[len(said) :])
        before = self._text(history, opened=False)
        end = self._closing + self._between
        if not whole.startswith(before) or not before.endswith(end):
            raise self._mismatch(stored, whole)
        closed = len(stored) > 0 and int(stored[-1]) in self.stop_ids
        return self._continue(stored, (self._between if closed else end) + whole[len(before) :])

    def parse(self, tokens: Array, *, tools: Sequence[Tool] = ()) -> Message:
        """The completion as an assistant message: all of its text, the stop id removed."""
        closed = len(tokens) > 0 and int(tokens[-1]) in self.stop_ids
        return {"role": "assistant", "content": self.decode(tokens[:-1] if closed else tokens)}

    def demonstrate(self, said: str | Message) -> Array:
        """(tokens,) int32 of the text and what closes a turn, up to the stop id."""
        text = said if isinstance(said, str) else str(said["content"])
        return self.encode(text + self._closing)

    def save(self, directory: Path) -> None:
        """Copy the tokenizer's files; a template given in the configuration becomes
        `chat_template.jinja`."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            if (self._directory / name).is_file():
                shutil.copyfile(self._directory / name, directory / name)
        if self._own_template:
            (directory / "chat_template.jinja").write_text(self._template, encoding="utf-8")

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _id(self, text: str) -> int:
        found = self._tokenizer.token_to_id(text)
        if found is None:
            raise ConfigError(
                f"tito.stop: {text!r} is not a token of the tokenizer in {self._directory}"
            )
        return int(found)

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

    def _text(self, messages: Sequence[Message], *, opened: bool) -> str:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, _ = render_jinja_template(
                conversations=[[dict(m) for m in messages]],
                chat_template=self._template,
                add_generation_prompt=opened,
                **self._special,
                **self._arguments,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise EpisodeError(
                f"tito generic: the chat template refuses {len(messages)} messages: {error}"
            ) from error
        return str(texts[0])

    def _turn_end(self, stops: set[int]) -> tuple[str, str]:
        """How the template closes an assistant's turn: the text up to its stop token, and what
        follows before the next turn. Raises `ConfigError` when there is no stop token in it."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
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
                f"tito generic: the chat template closes an assistant's turn with {end!r}, which "
                "holds no stop token of "
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
            f"tito generic: the chat template is not append-only: token {index} of the stored "
            f"{len(stored)} differs: "
            f"stored {self.decode(stored[window])!r}, template {self.decode(rendered[window])!r}"
        )
        error.add_note(
            "give a template that keeps earlier turns as they were sampled: tito.template=FILE"
        )
        return error


def _directory(config: Generic.Config, context: Context) -> Path:
    found = (
        Path(config.path)
        if config.path
        else context.model.directory()
        if context.model is not None
        else None
    )
    if found is None:
        raise ConfigError(
            "tito generic: no tokenizer: the model is random and has no directory; "
            "set tito.path=DIRECTORY, or use tito=bytes with a byte-level model"
        )
    if not found.is_dir():
        raise ConfigError(f"tito.path: {found} is not a directory")
    return found


def _load(directory: Path) -> Any:
    """The tokenizer with its configuration, as `transformers` reads it."""
    from transformers import PreTrainedTokenizerFast

    if (directory / "tokenizer.json").is_file():
        # not AutoTokenizer, which imports torch: seconds and memory that the driver does without
        return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    files = [name for name in _FILES if (directory / name).is_file()]
    error = ConfigError(
        f"tito generic: no tokenizer.json in {directory} (tokenizer files there: "
        f"{', '.join(files) or 'none'})"
    )
    error.add_note(
        "make one with transformers: "
        "AutoTokenizer.from_pretrained(SOURCE).save_pretrained(DIRECTORY)"
    )
    raise error


def _template(config: Generic.Config, loaded: Any, directory: Path) -> str:
    if config.template:
        path = Path(config.template)
        if not path.is_file():
            raise ConfigError(f"tito.template: no file {path}")
        return path.read_text(encoding="utf-8")
    found = loaded.chat_template
    if isinstance(found, Mapping):  # several by name
        found = found.get("default")
    if not found:
        raise ConfigError(
            f"tito generic: the tokenizer in {directory} has no chat template; give one with "
            "tito.template=FILE"
        )
    return str(found)


def _eos_ids(directory: Path) -> set[int]:
    """End-of-turn ids that the checkpoint's own files name."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (json.JSONDecodeError, AttributeError) as error:
            raise ConfigError(f"tito generic: {path} is not a JSON object: {error}") from error
        found.update([value] if isinstance(value, int) else value or [])
    return found
