"""OpenAI's chat completions: a request as messages, a turn as a reply and as stream events.

Pure functions of plain JSON; recording and sampling are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles.errors import UnsupportedRequest
from miles.protocols import Tool
from miles.session.server.asked import Asked, Only, judge, read_sampling, tool
from miles.session.server.content import flat, image_of_url, items, refuse_part, text_field
from miles.session.server.events import Delta, Said, sse
from miles.types import Message

__all__ = ["ROLES", "Events", "read", "reply"]

API = "chat.completions"
ROLES = ("system", "developer", "user", "assistant", "tool")
READ = (
    "messages", "tools", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
    "stream", "stream_options",
)  # fmt: skip
IGNORED = (
    "model", "user", "metadata", "store", "seed", "service_tier", "safety_identifier", "prediction",
    "prompt_cache_key", "prompt_cache_retention", "input_ids",
)  # fmt: skip
"""Cannot change a token: who asks and why, hints about speed, a seed (every completion is already a
function of the session and the turn), and ids, which the session owns."""
_PLAIN = "sampled tokens are trained on, so nothing may bend their distribution"
_READ_SAMPLES = "log-probs are recorded: read them with POST /sessions/ID/samples"
ONLY = {
    "n": Only((1,), "ask again for another completion"),
    "tool_choice": Only(("auto",), "the model decides; offer no tools to have none called"),
    "parallel_tool_calls": Only((True,), "the model decides how many tools it calls"),
    "response_format": Only(({"type": "text"},), _PLAIN),
    "logit_bias": Only(({},), _PLAIN),
    "frequency_penalty": Only((0, 0.0), _PLAIN),
    "presence_penalty": Only((0, 0.0), _PLAIN),
    "logprobs": Only((False,), _READ_SAMPLES),
    "top_logprobs": Only((0,), _READ_SAMPLES),
    "stop": Only(([], ""), "a turn ends at the model's own stop tokens"),
    "modalities": Only((["text"],), "the model answers in text"),
    "reasoning_effort": Only((), "reasoning is decided by the tito handler's template arguments"),
    "verbosity": Only((), "say in a message how long the answer should be"),
    "audio": Only((), "the model answers in text"),
    "functions": Only(([],), "give `tools`"),
    "function_call": Only((), "give `tools`"),
    "web_search_options": Only((), "the model has only the tools that you give it"),
    "chat_template_kwargs": Only(({},), "template arguments are fixed by the tito handler"),
}


def read(body: Mapping[str, Any], *, images: bool) -> Asked:
    """What a request asks for. Raises `UnsupportedRequest` naming what cannot be honoured."""
    judge(body, api=API, read=READ, ignored=IGNORED, only=ONLY)
    stream = body.get("stream") or False
    options = body.get("stream_options") or {}
    if not isinstance(stream, bool) or not isinstance(options, dict):
        raise UnsupportedRequest(f"{API}: stream is a boolean, stream_options an object")
    if not isinstance(options.get("include_usage") or False, bool):
        raise UnsupportedRequest(f"{API}: stream_options.include_usage is a boolean")
    if unknown := set(options) - {"include_usage", "include_obfuscation"}:
        raise UnsupportedRequest(f"{API}: stream_options.{min(unknown)} is not known")
    given = items(body.get("messages"), where=f"{API}: messages")
    if not given:
        raise UnsupportedRequest(f"{API}: messages is empty")
    return Asked(
        messages=tuple(_message(m, images, f"messages[{i}]") for i, m in enumerate(given)),
        tools=tuple(_tools(body.get("tools"))),
        sampling=read_sampling(body, api=API, limits=("max_tokens", "max_completion_tokens")),
        stream=stream,
        usage=bool(options.get("include_usage")),
    )


def _tools(given: Any) -> Iterator[Tool]:
    for index, item in enumerate(items(given or [], where=f"{API}: tools")):
        where = f"tools[{index}]"
        function = item.get("function")
        if item.get("type") != "function" or not isinstance(function, dict):
            raise refuse_part(item.get("type"), ["function"], where=where)
        if function.get("strict"):
            raise UnsupportedRequest(f"{where}.function.strict cannot be honoured; {_PLAIN}")
        given = (function.get(key) for key in ("name", "description", "parameters"))
        yield tool(*given, where=where)


def _message(given: Mapping[str, Any], images: bool, where: str) -> Message:
    role = given.get("role")
    if role not in ROLES:
        raise UnsupportedRequest(f"{where}.role is {role!r}; valid: {', '.join(ROLES)}")
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    made["content"] = _content(given.get("content"), role, images, f"{where}.content")
    if given.get("name") is not None:
        made["name"] = text_field(given, "name", where=where)
    if role == "tool":
        made["tool_call_id"] = text_field(given, "tool_call_id", where=where)
    if role == "assistant":
        for name in ("reasoning_content", "reasoning"):
            if given.get(name) is not None:
                made["reasoning_content"] = text_field(given, name, where=where)
                break
        if given.get("function_call") is not None:
            raise UnsupportedRequest(f"{where}.function_call is not supported; give tool_calls")
        if calls := given.get("tool_calls"):
            made["tool_calls"] = [
                _call(c, f"{where}.tool_calls[{i}]")
                for i, c in enumerate(items(calls, where=f"{where}.tool_calls"))
            ]
    return made


def _content(given: Any, role: str, images: bool, where: str) -> Any:
    if given is None and role == "assistant":
        return ""
    if isinstance(given, str):
        return given
    parts: list[Any] = []
    for index, part in enumerate(items(given, where=where)):
        here, kind = f"{where}[{index}]", part.get("type")
        if kind == "text":
            parts.append(text_field(part, "text", where=here))
        elif kind == "image_url" and role in ("user", "tool"):
            inner = part.get("image_url")
            url = inner.get("url") if isinstance(inner, dict) else inner
            parts.append(image_of_url(url, images=images, where=here))
        else:
            raise refuse_part(kind, ["text", "image_url"], where=here)
    return flat(parts, join="" if role == "assistant" else "\n")


def _call(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = given.get("function")
    if given.get("type", "function") != "function" or not isinstance(function, dict):
        raise refuse_part(given.get("type"), ["function"], where=where)
    return {
        "id": text_field(given, "id", where=where),
        "type": "function",
        "function": {
            "name": text_field(function, "name", where=f"{where}.function"),
            "arguments": text_field(function, "arguments", where=f"{where}.function"),
        },
    }


# ---------------------------------------------------------------- a turn, as this API says it


def _usage(said: Said) -> dict[str, Any]:
    return {
        "prompt_tokens": said.prompt_tokens,
        "completion_tokens": said.tokens,
        "total_tokens": said.prompt_tokens + said.tokens,
        "prompt_tokens_details": {"cached_tokens": said.cached_tokens},
    }


def _finish(said: Said) -> str:
    return "tool_calls" if said.calls and said.finish == "stop" else said.finish


def _calls(said: Said) -> list[dict[str, Any]]:
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            },
        }
        for call in said.calls
    ]


def reply(said: Said, asked: Asked) -> dict[str, Any]:
    """The `chat.completion` object of a turn."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["content"] = said.content or None
        message["tool_calls"] = _calls(said)
    return {
        "id": f"chatcmpl-{said.id}",
        "object": "chat.completion",
        "created": said.created,
        "model": said.model,
        "choices": [
            {"index": 0, "message": message, "finish_reason": _finish(said), "logprobs": None}
        ],
        "usage": _usage(said),
    }


class Events:
    """The chunks of one streamed reply, as server-sent events."""

    def __init__(self, asked: Asked, *, id: str, model: str, created: int) -> None:
        self._usage = asked.usage
        self._head = {
            "id": f"chatcmpl-{id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return sse({**self._head, "choices": [choice]})

    def begin(self) -> bytes:
        """Before any text."""
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        """Some text of the answer or its reasoning."""
        name = "content" if delta.kind == "content" else "reasoning_content"
        return self._chunk({name: delta.text})

    def end(self, said: Said) -> bytes:
        """Tool calls, why it ended, how many tokens there were."""
        out = b""
        for index, call in enumerate(_calls(said)):
            out += self._chunk({"tool_calls": [{"index": index, **call}]})
        out += self._chunk({}, _finish(said))
        if self._usage:
            out += sse({**self._head, "choices": [], "usage": _usage(said)})
        return out + b"data: [DONE]\n\n"

    def fail(self, body: Mapping[str, Any]) -> bytes:
        """An error after the stream had begun."""
        return sse(body)


def error_body(*, kind: str, message: str, code: str | None, param: str | None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
