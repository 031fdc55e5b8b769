"""Anthropic's messages: a request as messages, a turn as a reply and as stream events.

Pure functions of plain JSON; recording and sampling are elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from miles.errors import UnsupportedRequest
from miles.protocols import Tool
from miles.session.server.asked import Asked, Only, judge, read_sampling, tool
from miles.session.server.content import (
    flat,
    image_of_data,
    image_of_url,
    items,
    refuse_part,
    text_field,
)
from miles.session.server.events import Delta, Said, sse
from miles.types import Message

__all__ = ["Events", "error_body", "read", "reply"]

API = "messages"
READ = (
    "messages", "system", "tools", "max_tokens", "temperature", "top_p", "top_k", "stream",
)  # fmt: skip
IGNORED = ("model", "metadata", "service_tier", "cache_control", "inference_geo")
"""Cannot change a token: who asks, and hints about speed."""
_PLAIN = "sampled tokens are trained on, so nothing may bend their distribution"
ONLY = {
    "tool_choice": Only(
        ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
        "the model decides; offer no tools to have none called",
    ),
    "stop_sequences": Only(([],), "a turn ends at the model's own stop tokens"),
    "thinking": Only(
        ({"type": "adaptive"},),
        "reasoning is decided by the tito handler's template arguments; leave it out",
    ),
    "output_config": Only(({},), _PLAIN),
    "output_format": Only((), _PLAIN),
    "mcp_servers": Only(([],), "the model has only the tools that you give it"),
    "container": Only((), "the model has only the tools that you give it"),
    "context_management": Only(({},), "a session never forgets what was sampled"),
}


def read(body: Mapping[str, Any], *, images: bool, spelled: Mapping[str, str]) -> Asked:
    """What a request asks for. `spelled` has the arguments of recorded tool calls as they were
    sampled, by id: this API replays them as JSON values, which say nothing of their spelling.

    Raises `UnsupportedRequest` naming what cannot be honoured.
    """
    judge(body, api=API, read=READ, ignored=IGNORED, only=ONLY)
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise UnsupportedRequest(f"{API}: stream is a boolean")
    if body.get("max_tokens") is None:
        raise UnsupportedRequest(f"{API}: max_tokens is missing")
    given = items(body.get("messages"), where=f"{API}: messages")
    if not given:
        raise UnsupportedRequest(f"{API}: messages is empty")
    made: list[Message] = []
    if system := _system(body.get("system")):
        made.append({"role": "system", "content": system})
    for index, message in enumerate(given):
        where, role = f"messages[{index}]", message.get("role")
        if role == "assistant":
            made.append(_assistant(message.get("content"), spelled, f"{where}.content"))
        elif role == "user":
            made += _user(message.get("content"), images, f"{where}.content")
        else:
            raise UnsupportedRequest(f"{where}.role is {role!r}; valid: user, assistant")
    return Asked(
        messages=tuple(made),
        tools=tuple(_tools(body.get("tools"))),
        sampling=read_sampling(body, api=API, limits=("max_tokens",)),
        stream=stream,
    )


def _system(given: Any) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    parts = []
    for index, part in enumerate(items(given, where=f"{API}: system")):
        if part.get("type") != "text":
            raise refuse_part(part.get("type"), ["text"], where=f"system[{index}]")
        parts.append(text_field(part, "text", where=f"system[{index}]"))
    return "\n".join(parts)


def _tools(given: Any) -> Iterator[Tool]:
    for index, item in enumerate(items(given or [], where=f"{API}: tools")):
        where = f"tools[{index}]"
        if item.get("type") not in (None, "custom"):
            raise refuse_part(item.get("type"), ["custom"], where=where)
        if item.get("strict"):
            raise UnsupportedRequest(f"{where}.strict cannot be honoured; {_PLAIN}")
        yield tool(item.get("name"), item.get("description"), item.get("input_schema"), where=where)


def _user(given: Any, images: bool, where: str) -> list[Message]:
    """Tool results first, each a message of its own, then what the user says."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    results: list[Message] = []
    parts: list[Any] = []
    for index, part in enumerate(items(given, where=where)):
        here = f"{where}[{index}]"
        if part.get("type") == "tool_result":
            if parts:
                raise UnsupportedRequest(f"{here}: tool results come before anything else")
            name = text_field(part, "tool_use_id", where=here)
            said = _result(part.get("content"), images, f"{here}.content")
            results.append({"role": "tool", "content": said, "tool_call_id": name})
        else:
            parts.append(_part(part, images, here))
    if parts or not results:
        results.append({"role": "user", "content": flat(parts, join="\n")})
    return results


def _result(given: Any, images: bool, where: str) -> Any:
    if given is None or isinstance(given, str):
        return given or ""
    parts = [_part(p, images, f"{where}[{i}]") for i, p in enumerate(items(given, where=where))]
    return flat(parts, join="\n")


def _part(part: Mapping[str, Any], images: bool, where: str) -> Any:
    if part.get("type") == "text":
        return text_field(part, "text", where=where)
    if part.get("type") != "image":
        raise refuse_part(part.get("type"), ["text", "image", "tool_result"], where=where)
    source = part.get("source")
    if not isinstance(source, dict):
        raise UnsupportedRequest(f"{where}.source is {type(source).__name__}, not an object")
    if source.get("type") == "base64":
        kind, data = source.get("media_type"), source.get("data")
        return image_of_data(kind, data, images=images, where=where)
    return image_of_url(source.get("url"), images=images, where=where)


def _assistant(given: Any, spelled: Mapping[str, str], where: str) -> Message:
    if isinstance(given, str):
        return {"role": "assistant", "content": given}
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, part in enumerate(items(given, where=where)):
        here, kind = f"{where}[{index}]", part.get("type")
        if kind == "text":
            text.append(text_field(part, "text", where=here))
        elif kind == "thinking":
            thoughts.append(text_field(part, "thinking", where=here))
        elif kind == "tool_use":
            calls.append(_call(part, spelled, here))
        else:
            raise refuse_part(kind, ["text", "thinking", "tool_use"], where=here)
    made: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _call(part: Mapping[str, Any], spelled: Mapping[str, str], where: str) -> dict[str, Any]:
    name, value = text_field(part, "id", where=where), part.get("input")
    if not isinstance(value, dict):
        raise UnsupportedRequest(f"{where}.input is {type(value).__name__}, not an object")
    arguments = spelled.get(name)
    if arguments is None or _input(arguments) != value:
        arguments = json.dumps(value, ensure_ascii=False)
    function = {"name": text_field(part, "name", where=where), "arguments": arguments}
    return {"id": name, "type": "function", "function": function}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as this API has them: an object, whatever was sampled."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


# ---------------------------------------------------------------- a turn, as this API says it


def _stop_reason(said: Said) -> str:
    if not said.room:
        return "model_context_window_exceeded"
    if said.finish == "length":
        return "max_tokens"
    return "tool_use" if said.calls else "end_turn"


def _usage(said: Said) -> dict[str, int]:
    return {
        "input_tokens": said.prompt_tokens - said.cached_tokens,
        "cache_read_input_tokens": said.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": said.tokens,
    }


def _signature(thinking: str) -> str:
    """Clients hand it back unread; nothing is verified by it."""
    return hashlib.blake2b(thinking.encode("utf-8", "replace"), digest_size=12).hexdigest()


def _blocks(said: Said) -> Iterator[dict[str, Any]]:
    if said.reasoning:
        signature = _signature(said.reasoning)
        yield {"type": "thinking", "thinking": said.reasoning, "signature": signature}
    if said.content:
        yield {"type": "text", "text": said.content, "citations": None}
    for call in said.calls:
        function = call["function"]
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": _input(function["arguments"]),
        }


def reply(said: Said, asked: Asked) -> dict[str, Any]:
    """The `message` object of a turn."""
    return {
        "id": f"msg_{said.id}",
        "type": "message",
        "role": "assistant",
        "model": said.model,
        "content": list(_blocks(said)),
        "stop_reason": _stop_reason(said),
        "stop_sequence": None,
        "usage": _usage(said),
    }


class Events:
    """The events of one streamed reply: blocks one after another, each opened and closed."""

    def __init__(self, asked: Asked, *, id: str, model: str, created: int) -> None:
        self._id, self._model = id, model
        self._index = -1  # of the block that is open
        self._kind = ""  # its delta's kind; empty when none is open
        self._thinking = ""

    def begin(self) -> bytes:
        """Before any text. How long the prompt is, is only known at the end."""
        message: dict[str, Any] = {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return _event({"type": "message_start", "message": message})

    def delta(self, delta: Delta) -> bytes:
        """Some text of the answer or its reasoning, in a block of its kind."""
        out = b""
        if self._kind != delta.kind:
            out += self._close()
            empty: dict[str, Any] = {"type": "text", "text": "", "citations": None}
            if delta.kind == "reasoning":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
            out += self._open(delta.kind, empty)
        if delta.kind == "reasoning":
            self._thinking += delta.text
            return out + self._delta({"type": "thinking_delta", "thinking": delta.text})
        return out + self._delta({"type": "text_delta", "text": delta.text})

    def _open(self, kind: str, block: Mapping[str, Any]) -> bytes:
        self._index, self._kind = self._index + 1, kind
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return _event(start)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        out = b""
        if self._kind == "reasoning":
            signature = _signature(self._thinking)
            out = self._delta({"type": "signature_delta", "signature": signature})
        self._kind = ""
        return out + _event({"type": "content_block_stop", "index": self._index})

    def end(self, said: Said) -> bytes:
        """Tool calls, why it ended, how many tokens there were."""
        out = self._close()
        for block in _blocks(said):
            if block["type"] != "tool_use":
                continue
            spelled = json.dumps(block["input"], ensure_ascii=False)
            out += self._open("tool", {**block, "input": {}})
            out += self._delta({"type": "input_json_delta", "partial_json": spelled})
            out += self._close()
        ending = {"stop_reason": _stop_reason(said), "stop_sequence": None}
        out += _event({"type": "message_delta", "delta": ending, "usage": _usage(said)})
        return out + _event({"type": "message_stop"})

    def fail(self, body: Mapping[str, Any]) -> bytes:
        """An error after the stream had begun."""
        return _event(body)


def _event(data: Mapping[str, Any]) -> bytes:
    return sse(data, str(data["type"]))


def error_body(*, kind: str, message: str, code: str | None, param: str | None) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    return {"type": "error", "error": {"type": kind, "message": message}}
