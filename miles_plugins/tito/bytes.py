"""A tokenizer whose ids are the bytes of UTF-8, with the ChatML markup of the embedded model.

It has three special tokens and no merges; words for tools are in `toolwords`. It knows nothing of
reasoning, images or other markups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from miles import Array, Context, EpisodeError, Message, Tool
from miles_plugins.tito import toolwords

END_OF_TEXT, TURN_START, TURN_END = 256, 257, 258
_SPECIAL = {END_OF_TEXT: "<|endoftext|>", TURN_START: "<|im_start|>", TURN_END: "<|im_end|>"}
_BYTES = {byte: bytes((byte,)) for byte in range(256)} | {
    k: v.encode() for k, v in _SPECIAL.items()
}
_UNKNOWN = "\ufffd".encode()


def _ids(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8).astype(np.int32)  # (bytes,) int32


def _marked(*parts: int | bytes) -> Array:
    """(tokens,) int32 from ids and bytes in turn."""
    out: list[int] = []
    for part in parts:
        out.extend(part if isinstance(part, bytes) else (part,))
    return np.array(out, np.int32)  # (tokens,) int32


_OPEN = _marked(TURN_START, b"assistant\n")
_BETWEEN = _marked(b"\n")
_CLOSE = _marked(TURN_END, b"\n")
_CLOSE_AND_OPEN = np.concatenate([_CLOSE, _OPEN])  # (tokens,) int32
_STOP = _marked(TURN_END)


@lru_cache(maxsize=64)  # few roles, one header each
def _header(role: str) -> Array:
    return _marked(TURN_START, role.encode() + b"\n")


class Bytes:
    """Byte-level tokens in ChatML: ids 0 to 255 are bytes, 256 ends a text, 257 opens a turn, 258
    closes one.

    Tools are offered in the system's turn, one line each, and called by
    `<tool_call>{"name":...,"arguments":{...}}</tool_call>` at the end of a turn; what is no
    well-formed call stays text. `encode` never makes a special token: markup inside a user's text
    stays text, so nobody can close a turn by writing about it. Ids of 259 and above, which a model
    with a padded vocabulary may sample, decode to U+FFFD.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Nothing to choose."""

    stop_ids: tuple[int, ...] = (TURN_END,)
    vocab_size: int = 259

    def __init__(self, config: Config, context: Context) -> None:
        pass

    def encode(self, text: str) -> Array:
        """(tokens,) int32: the bytes of UTF-8; a lone surrogate becomes `?`."""
        return _ids(text.encode("utf-8", "replace"))

    def decode(self, tokens: Array) -> str:
        """Text of ids, special tokens by name, invalid bytes as U+FFFD."""
        ids = tokens.tolist()
        try:
            return bytes(ids).decode("utf-8", "replace")
        except ValueError:  # an id that is no byte
            return b"".join([_BYTES.get(i, _UNKNOWN) for i in ids]).decode("utf-8", "replace")

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Array:
        """(tokens,) int32 of the conversation so far, the assistant's turn open; `tools` are told
        at the end of the system's turn, which is made when there is none. Raises `EpisodeError`."""
        return self._turns([], toolwords.with_tools(messages, tools))

    def extend(
        self,
        stored: Array,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
    ) -> Array:
        """(new tokens,) int32: the rest of the stored turn's closing mark (all of it when the turn
        was cut short), then `messages`, then the assistant's turn open. `tools` were told in the
        first prompt and are not told again. Raises `EpisodeError`."""
        closed = len(stored) > 0 and int(stored[-1]) == TURN_END
        return self._turns([_BETWEEN if closed else _CLOSE], messages)

    def parse(self, tokens: Array, *, tools: Sequence[Tool] = ()) -> Message:
        """The completion as an assistant message, its stop id removed: `content`, and `tool_calls`
        where a closed turn ends in well-formed ones, whatever `tools` were offered."""
        if not (len(tokens) and int(tokens[-1]) == TURN_END):
            return {"role": "assistant", "content": self.decode(tokens)}
        content, calls = toolwords.split(self.decode(tokens[:-1]))
        message: dict[str, Any] = {"role": "assistant", "content": content}
        return {**message, "tool_calls": calls} if calls else message

    def demonstrate(self, said: str | Message) -> Array:
        """(tokens,) int32 of the text, or the message with its tool calls, and the stop id."""
        text = said if isinstance(said, str) else _said(said, 0)
        return np.concatenate([self.encode(text), _STOP])

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`: a byte-level BPE without merges and
        the template.

        `transformers.AutoTokenizer` then gives the same ids; markup inside a text becomes special
        tokens there unless it is called with `split_special_tokens=True`.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        bpe = models.BPE(vocab=dict(zip(_byte_names(), range(256), strict=True)), merges=[])
        tokenizer = Tokenizer(bpe)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in _SPECIAL.values()])
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _SPECIAL[TURN_END],
            "pad_token": _SPECIAL[END_OF_TEXT],
            "clean_up_tokenization_spaces": False,
            "chat_template": toolwords.TEMPLATE,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        ends = {"eos_token_id": TURN_END, "pad_token_id": END_OF_TEXT}  # where `generate` stops
        (directory / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")

    def _turns(self, parts: list[Array], messages: Sequence[Message]) -> Array:
        for index, message in enumerate(messages):
            parts.append(_header(_text_of(message, "role", index)))
            parts.append(self.encode(_said(message, index)))
            parts.append(_CLOSE)
        if messages:
            parts[-1] = _CLOSE_AND_OPEN
        else:
            parts.append(_OPEN)
        return np.concatenate(parts)


def _text_of(message: Message, field: str, index: int) -> str:
    text = message.get(field)
    if not isinstance(text, str):
        raise EpisodeError(
            f"tito bytes: {field} of message {index} is {type(text).__name__}, not text; "
            "this markup has roles and text only"
        )
    return text


def _said(message: Message, index: int) -> str:
    """A message's text and its tool calls as they are written."""
    nothing = message.get("role") == "assistant" and message.get("content") is None
    text = "" if nothing else _text_of(message, "content", index)
    return text + "".join(
        toolwords.call_text(call, index) for call in message.get("tool_calls") or ()
    )


def _byte_names() -> list[str]:
    """The character by which a byte-level BPE file names each byte: itself where it can be printed,
    otherwise the next unused character from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]
