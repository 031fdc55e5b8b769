"""OpenAI's Responses: a request as messages, a turn as a reply and as stream events.

Pure functions of plain JSON; recording and sampling are elsewhere.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from miles.errors import UnsupportedRequest
from miles.protocols import Tool
from miles.session.server.asked import Asked, Only, judge, read_sampling, tool
from miles.session.server.content import flat, image_of_url, items, refuse_part, text_field
from miles.session.server.events import Delta, Said, sse
from miles.types import Message

__all__ = ["Events", "read", "reply"]

API = "responses"
READ = (
    "input", "instructions", "tools", "max_output_tokens", "temperature", "top_p", "stream",
    "stream_options", "include",
)  # fmt: skip
IGNORED = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip
"""Cannot change a token: who asks and why, and hints about speed."""
_PLAIN = "sampled tokens are trained on, so nothing may bend their distribution"
ONLY = {
    "tool_choice": Only(("auto",), "the model decides; offer no tools to have none called"),
    "parallel_tool_calls": Only((True,), "the model decides how many tools it calls"),
    "text": Only(({}, {"format": {"type": "text"}}), _PLAIN),
    "truncation": Only(("disabled",), "a session never forgets what was sampled"),
    "previous_response_id": Only((), "send the whole history as `input`"),
    "conversation": Only((), "send the whole history as `input`"),
    "background": Only((False,), "wait for the reply"),
    "reasoning": Only(({},), "reasoning is decided by the tito handler's template arguments"),
    "top_logprobs": Only((0,), "log-probs are recorded: read them with POST /sessions/ID/samples"),
    "prompt": Only((), "send the text itself"),
    "max_tool_calls": Only((), "the model decides how many tools it calls"),
}
_ENCRYPTED = "reasoning.encrypted_content"
_SEAL = "miles:"


def read(body: Mapping[str, Any], *, images: bool) -> Asked:
    """What a request asks for. Raises `UnsupportedRequest` naming what cannot be honoured."""
    judge(body, api=API, read=READ, ignored=IGNORED, only=ONLY)
    stream, include = body.get("stream") or False, body.get("include") or []
    if not isinstance(stream, bool) or not isinstance(body.get("stream_options") or {}, dict):
        raise UnsupportedRequest(f"{API}: stream is a boolean, stream_options an object")
    if not isinstance(include, list) or any(what != _ENCRYPTED for what in include):
        raise UnsupportedRequest(f"{API}: include may hold {_ENCRYPTED!r} alone, not {include!r}")
    made: list[Message] = []
    if (instructions := body.get("instructions")) is not None:
        if not isinstance(instructions, str):
            raise UnsupportedRequest(f"{API}: instructions is not text")
        if instructions:
            made.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        made.append({"role": "user", "content": given})
    else:
        made += _history(items(given, where=f"{API}: input"), images)
    if not made:
        raise UnsupportedRequest(f"{API}: input is empty")
    return Asked(
        messages=tuple(made),
        tools=tuple(_tools(body.get("tools"))),
        sampling=read_sampling(body, api=API, limits=("max_output_tokens",)),
        stream=stream,
        echo={
            "instructions": instructions,
            "tools": body.get("tools") or [],
            "metadata": body.get("metadata") or {},
            "max_output_tokens": body.get("max_output_tokens"),
            "sealed": _ENCRYPTED in include,
        },
    )


def _tools(given: Any) -> Iterator[Tool]:
    for index, item in enumerate(items(given or [], where=f"{API}: tools")):
        where = f"tools[{index}]"
        if item.get("type") != "function":
            raise refuse_part(item.get("type"), ["function"], where=where)
        if item.get("strict"):
            raise UnsupportedRequest(f"{where}.strict cannot be honoured; {_PLAIN}")
        yield tool(item.get("name"), item.get("description"), item.get("parameters"), where=where)


def _history(given: list[dict[str, Any]], images: bool) -> list[Message]:
    """Items as messages: reasoning, text and calls that follow one another are one turn."""
    made: list[Message] = []
    turn: dict[str, Any] | None = None
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") != "assistant":
            turn = None
            made.append(_message(item, images, where))
            continue
        if kind == "function_call_output":
            turn = None
            made.append(_output(item, images, where))
            continue
        if turn is None or _opens(turn, kind):
            turn = {"role": "assistant", "content": ""}
            made.append(turn)
        if kind == "message":
            turn["content"] += _said(item.get("content"), f"{where}.content")
        elif kind == "reasoning":
            turn["reasoning_content"] = _reasoning(item, where)
        elif kind == "function_call":
            turn.setdefault("tool_calls", []).append(_call(item, where))
        else:
            valid = ["message", "reasoning", "function_call", "function_call_output"]
            raise refuse_part(kind, valid, where=where)
    return made


def _opens(turn: Mapping[str, Any], kind: str) -> bool:
    """Whether an item begins another turn of the assistant right after one."""
    if kind == "reasoning":
        return "reasoning_content" in turn or bool(turn["content"]) or "tool_calls" in turn
    return kind == "message" and (bool(turn["content"]) or "tool_calls" in turn)


def _message(item: Mapping[str, Any], images: bool, where: str) -> Message:
    role = item.get("role")
    if role not in ("system", "developer", "user"):
        raise UnsupportedRequest(
            f"{where}.role is {role!r}; valid: system, developer, user, assistant"
        )
    content = _content(item.get("content"), images, f"{where}.content")
    return {"role": "user" if role == "user" else "system", "content": content}


def _content(given: Any, images: bool, where: str) -> Any:
    if isinstance(given, str):
        return given
    parts: list[Any] = []
    for index, part in enumerate(items(given, where=where)):
        here = f"{where}[{index}]"
        if part.get("type") in ("input_text", "output_text", "text"):
            parts.append(text_field(part, "text", where=here))
        elif part.get("type") == "input_image":
            parts.append(image_of_url(part.get("image_url"), images=images, where=here))
        else:
            raise refuse_part(part.get("type"), ["input_text", "input_image"], where=here)
    return flat(parts, join="\n")


def _said(given: Any, where: str) -> str:
    if isinstance(given, str):
        return given
    parts = []
    for index, part in enumerate(items(given, where=where)):
        here = f"{where}[{index}]"
        if part.get("type") not in ("output_text", "input_text", "text"):
            raise refuse_part(part.get("type"), ["output_text"], where=here)
        parts.append(text_field(part, "text", where=here))
    return "".join(parts)


def _output(item: Mapping[str, Any], images: bool, where: str) -> Message:
    content = _content(item.get("output"), images, f"{where}.output")
    name = text_field(item, "call_id", where=where)
    return {"role": "tool", "content": content, "tool_call_id": name}


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    names = ("name", "arguments")
    return {
        "id": text_field(item, "call_id", where=where),
        "type": "function",
        "function": {name: text_field(item, name, where=where) for name in names},
    }


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The text itself, or what `encrypted_content` carries of it, or the summary."""
    for name in ("content", "summary"):
        if parts := item.get(name):
            given = enumerate(items(parts, where=f"{where}.{name}"))
            return "".join(text_field(p, "text", where=f"{where}.{name}[{i}]") for i, p in given)
        sealed = item.get("encrypted_content")
        if name == "content" and isinstance(sealed, str) and sealed.startswith(_SEAL):
            try:
                return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
            except (binascii.Error, ValueError):
                raise UnsupportedRequest(
                    f"{where}.encrypted_content is not what this server gave out"
                ) from None
    return ""


# ---------------------------------------------------------------- a turn, as this API says it


def _reasoning_item(said: Said, sealed: bool) -> dict[str, Any]:
    item: dict[str, Any] = {
        "id": f"rs_{said.id}",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": said.reasoning}],
        "status": "completed",
    }
    if sealed:
        data = base64.b64encode(said.reasoning.encode("utf-8", "replace")).decode()
        item["encrypted_content"] = f"{_SEAL}{data}"
    return item


def _text_item(said: Said) -> dict[str, Any]:
    part = {"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}
    status = "incomplete" if said.finish == "length" else "completed"
    return {
        "id": f"msg_{said.id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def _items(said: Said, *, sealed: bool) -> Iterator[dict[str, Any]]:
    if said.reasoning:
        yield _reasoning_item(said, sealed)
    if said.content or not said.calls:
        yield _text_item(said)
    for index, call in enumerate(said.calls):
        yield {
            "id": f"fc_{said.id}_{index}",
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }


def _envelope(asked: Asked, *, id: str, model: str, created: int) -> dict[str, Any]:
    echo = {name: value for name, value in asked.echo.items() if name != "sealed"}
    return {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": created,
        "model": model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "temperature": asked.sampling.get("temperature"),
        "top_p": asked.sampling.get("top_p"),
        "usage": None,
        **echo,
    }


def reply(said: Said, asked: Asked) -> dict[str, Any]:
    """The `response` object of a turn."""
    whole = _envelope(asked, id=said.id, model=said.model, created=said.created)
    cut = said.finish == "length"
    return {
        **whole,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_items(said, sealed=bool(asked.echo.get("sealed")))),
        "usage": {
            "input_tokens": said.prompt_tokens,
            "input_tokens_details": {"cached_tokens": said.cached_tokens},
            "output_tokens": said.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": said.prompt_tokens + said.tokens,
        },
    }


class Events:
    """The events of one streamed reply: items one after another, each added and done."""

    def __init__(self, asked: Asked, *, id: str, model: str, created: int) -> None:
        self._asked, self._id = asked, id
        self._head = _envelope(asked, id=id, model=model, created=created)
        self._number = 0
        self._index = -1  # of the item that is open
        self._kind = ""  # its kind; empty when none is open
        self._text = ""  # of the open item

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse({"type": kind, "sequence_number": number, **fields}, kind)

    def begin(self) -> bytes:
        """Before any text."""
        made = self._event("response.created", response=self._head)
        return made + self._event("response.in_progress", response=self._head)

    def delta(self, delta: Delta) -> bytes:
        """Some text of the answer or its reasoning, in an item of its kind."""
        out = b""
        if self._kind != delta.kind:
            out = self._close() + self._open(delta.kind)
        self._text += delta.text
        if delta.kind == "reasoning":
            return out + self._inner("response.reasoning_text.delta", delta=delta.text)
        return out + self._inner("response.output_text.delta", delta=delta.text, logprobs=[])

    def _inner(self, kind: str, **fields: Any) -> bytes:
        """An event about the one part of the open item."""
        name = f"rs_{self._id}" if self._kind == "reasoning" else f"msg_{self._id}"
        place = {"item_id": name, "output_index": self._index, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _open(self, kind: str) -> bytes:
        self._index, self._kind, self._text = self._index + 1, kind, ""
        if kind == "reasoning":
            item: dict[str, Any] = {"id": f"rs_{self._id}", "type": "reasoning", "summary": []}
            item |= {"content": [], "status": "in_progress"}
        else:
            item = {"id": f"msg_{self._id}", "type": "message", "role": "assistant"}
            item |= {"content": [], "status": "in_progress"}
        out = self._event("response.output_item.added", output_index=self._index, item=item)
        return out + self._inner("response.content_part.added", part=self._part(""))

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _close(self, item: Mapping[str, Any] | None = None) -> bytes:
        if not self._kind:
            return b""
        if self._kind == "reasoning":
            out = self._inner("response.reasoning_text.done", text=self._text)
        else:
            out = self._inner("response.output_text.done", text=self._text, logprobs=[])
        out += self._inner("response.content_part.done", part=self._part(self._text))
        if item is None:  # reasoning, or text before it; whatever comes next does not change it
            item = self._done()
        self._kind = ""
        return out + self._event("response.output_item.done", output_index=self._index, item=item)

    def _done(self) -> dict[str, Any]:
        reasoning = self._kind == "reasoning"
        said = Said(
            id=self._id,
            model="",
            created=0,
            message={},
            content="" if reasoning else self._text,
            reasoning=self._text if reasoning else "",
            calls=(),
            finish="stop",
        )
        if reasoning:
            return _reasoning_item(said, bool(self._asked.echo.get("sealed")))
        return _text_item(said)

    def end(self, said: Said) -> bytes:
        """Tool calls, and last the whole response."""
        whole = reply(said, self._asked)
        text = next((item for item in whole["output"] if item["type"] == "message"), None)
        out = b""
        if text is not None and self._kind != "content":  # an empty answer is an item, too
            out += self._close() + self._open("content")
        out += self._close(text if self._kind == "content" else None)
        for item in whole["output"]:
            if item["type"] == "function_call":
                out += self._call(item)
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return out + self._event(kind, response=whole)

    def _call(self, item: Mapping[str, Any]) -> bytes:
        self._index += 1
        place = {"output_index": self._index, "item_id": item["id"]}
        begun = {**item, "arguments": "", "status": "in_progress"}
        spelled = item["arguments"]
        kind = "response.function_call_arguments"
        out = self._event("response.output_item.added", output_index=self._index, item=begun)
        out += self._event(f"{kind}.delta", **place, delta=spelled)
        out += self._event(f"{kind}.done", **place, arguments=spelled, name=item["name"])
        return out + self._event("response.output_item.done", output_index=self._index, item=item)

    def fail(self, body: Mapping[str, Any]) -> bytes:
        """An error after the stream had begun."""
        error = body["error"]
        return self._event("error", code=error["code"], message=error["message"], param=None)
