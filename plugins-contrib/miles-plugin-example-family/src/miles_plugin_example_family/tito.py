"""Lantern's markup: bytes as ids, one id for every role, and marks for reasoning and tool calls.

    <|lantern|><|user|>2+2=<|over|><|assistant|><|think|>easy<|/think|>4<|over|>

Text never becomes a mark: only this module writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles import Array, Context, EpisodeError, Message, Tool

MARKS = (
    "<|lantern|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|over|>",
    "<|think|>",
    "<|/think|>",
    "<|call|>",
    "<|/call|>",
)
"""From id 256 on."""
ID = {mark: 256 + index for index, mark in enumerate(MARKS)}
BEGIN, OVER = ID["<|lantern|>"], ID["<|over|>"]
ROLES = {role: ID[f"<|{role}|>"] for role in ("system", "user", "assistant", "tool")}
PARTS = {
    ID["<|think|>"]: (ID["<|/think|>"], "reasoning_content"),
    ID["<|call|>"]: (ID["<|/call|>"], "tool_calls"),
}
"""Opening mark to closing mark and the field of the message that lies between."""

TEMPLATE = (
    "{{ '<|lantern|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['reasoning_content'] %}"
    "{{ '<|think|>' + message['reasoning_content'] + '<|/think|>' }}{% endif %}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<|call|>' + call['function']['name'] + '\\n'"
    " + call['function']['arguments'] + '<|/call|>' }}{% endfor %}"
    "{{ '<|over|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class ExampleFamilyTito:
    """Byte-level tokens in Lantern's markup; reasoning and tool calls are parsed and written
    back."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Nothing to choose."""

    stop_ids: tuple[int, ...] = (OVER,)
    vocab_size: int = 256 + len(MARKS)

    def __init__(self, config: Config, context: Context) -> None:
        pass

    def encode(self, text: str) -> Array:
        """(tokens,) int32: the bytes of UTF-8."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)

    def decode(self, tokens: Array) -> str:
        """Text of ids, marks written out, invalid bytes and unknown ids as U+FFFD."""
        said = b"".join(_bytes(int(token)) for token in tokens)
        return said.decode("utf-8", "replace")

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Array:
        """(tokens,) int32 of a first prompt, the assistant's turn open. Raises `EpisodeError`."""
        if tools:
            raise EpisodeError("tito plain: this markup has no words for tools")
        return np.array([BEGIN, *self._turns(messages)], np.int32)

    def extend(
        self,
        stored: Array,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
    ) -> Array:
        """(new tokens,) int32: the end of the stored turn if it was cut, then the messages."""
        cut = not len(stored) or int(stored[-1]) != OVER
        return np.array([*([OVER] if cut else []), *self._turns(messages)], np.int32)

    def parse(self, tokens: Array, *, tools: Sequence[Tool] = ()) -> Message:
        """A completion as an assistant message, reasoning and tool calls apart from what was said.

        A part that was cut before its closing mark counts to the end.
        """
        said: list[int] = []
        parts: dict[str, list[str]] = {field: [] for _, field in PARTS.values()}
        ids = [int(token) for token in tokens if token != OVER]
        at = 0
        while at < len(ids):
            if ids[at] not in PARTS:
                said.append(ids[at])
                at += 1
                continue
            close, field = PARTS[ids[at]]
            end = ids.index(close, at) if close in ids[at:] else len(ids)
            parts[field].append(self.decode(np.array(ids[at + 1 : end], np.int32)))
            at = end + 1
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.decode(np.array(said, np.int32)),
        }
        if parts["reasoning_content"]:
            message["reasoning_content"] = "".join(parts["reasoning_content"])
        if parts["tool_calls"]:
            message["tool_calls"] = [_call(i, text) for i, text in enumerate(parts["tool_calls"])]
        return message

    def demonstrate(self, said: str | Message) -> Array:
        """(tokens,) int32 of the text and the stop id."""
        text = said if isinstance(said, str) else str(said["content"])
        return np.array([*self.encode(text), OVER], np.int32)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` for `transformers`: bytes by fallback,
        the marks as special tokens, the template."""
        from tokenizers import AddedToken, Tokenizer, decoders, models

        # nothing but bytes in the vocabulary: every character falls back to its own
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        tokenizer = Tokenizer(models.BPE(vocab=names, merges=[], byte_fallback=True))
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|lantern|>",
            "eos_token": "<|over|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _turns(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for index, message in enumerate(messages):
            role = message.get("role")
            if role not in ROLES:
                raise EpisodeError(
                    f"tito example_family: message {index} has role {role!r}; "
                    f"valid: {', '.join(ROLES)}"
                )
            ids += [ROLES[role], *self._body(message, index), OVER]
        return [*ids, ROLES["assistant"]]

    def _body(self, message: Message, index: int) -> list[int]:
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise EpisodeError(f"tito example_family: content of message {index} is not text")
        ids: list[int] = []
        if reasoning := message.get("reasoning_content"):
            ids += [ID["<|think|>"], *self.encode(reasoning), ID["<|/think|>"]]
        ids += [int(i) for i in self.encode(content)]
        for call in message.get("tool_calls") or ():
            text = f"{call['function']['name']}\n{call['function']['arguments']}"
            ids += [ID["<|call|>"], *self.encode(text), ID["<|/call|>"]]
        return ids


def _bytes(token: int) -> bytes:
    if token < 256:
        return bytes([token])
    return (MARKS[token - 256] if token - 256 < len(MARKS) else "\ufffd").encode()


def _call(index: int, text: str) -> Mapping[str, Any]:
    name, _, arguments = text.partition("\n")
    function = {"name": name, "arguments": arguments}
    return {"id": f"call-{index}", "type": "function", "function": function}
