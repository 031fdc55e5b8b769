"""Messages, calls and tools in two spellings: that of the Responses API, in which NeMo Gym keeps
tasks and takes answers, and that of chat completions, which templates read.

Plain dictionaries in and out; nothing is sent or stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles import ConfigError, Message, Tool

_ROLES = {"developer": "system"}


def to_messages(items: str | Sequence[Mapping[str, Any]], where: str) -> list[Message]:
    """Chat messages of a task's input. Raises `ConfigError` for what has no such spelling."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    found: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            role = _ROLES.get(item["role"], item["role"])
            found.append({"role": role, "content": _text(item["content"], where)})
        elif kind == "function_call":
            call = to_call(item)
            if found and found[-1]["role"] == "assistant":
                found[-1].setdefault("tool_calls", []).append(call)
            else:
                found.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            answer = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            found.append(answer)
        else:
            raise ConfigError(f"{where}: an input item is {kind!r}; messages and calls are read")
    return found


def to_tools(tools: Sequence[Mapping[str, Any]] | None, where: str) -> tuple[Tool, ...]:
    """Function schemas as chat completions have them."""
    found = []
    for tool in tools or ():
        if tool.get("type") != "function":
            raise ConfigError(
                f"{where}: a tool is {tool.get('type')!r}; functions alone are offered"
            )
        function = {k: v for k, v in tool.items() if k != "type" and v is not None}
        found.append({"type": "function", "function": function})
    return tuple(found)


def to_call(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call as chat completions have it."""
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def to_items(message: Message, index: int, *, finished: bool) -> list[dict[str, Any]]:
    """An assistant message as output items: its reasoning, its text, its calls."""
    found: list[dict[str, Any]] = []
    status = "completed" if finished else "incomplete"
    if reasoning := message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": reasoning}]
        found.append({"type": "reasoning", "id": f"rs_{index}", "summary": summary})
    calls = message.get("tool_calls") or ()
    text = message.get("content") or ""
    if text or not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        found.append(
            {"type": "message", "id": f"msg_{index}", "role": "assistant", "status": status,
             "content": content}
        )  # fmt: skip
    for number, call in enumerate(calls):
        function = call["function"]
        found.append(
            {"type": "function_call", "id": f"fc_{index}_{number}", "status": status,
             "call_id": call.get("id") or f"call_{index}_{number}", "name": function["name"],
             "arguments": function.get("arguments") or "{}"}
        )  # fmt: skip
    return found


def to_response(
    output: Sequence[Mapping[str, Any]], params: Mapping[str, Any], *, truncated: bool
) -> dict[str, Any]:
    """What a resources server is asked to verify: all output of an attempt as one response."""
    return {
        "id": "resp_miles",
        "created_at": 0.0,
        "model": "policy",
        "object": "response",
        "output": list(output),
        "parallel_tool_calls": bool(params.get("parallel_tool_calls", True)),
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": list(params.get("tools") or ()),
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
    }


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        if part.get("type") not in ("input_text", "output_text", "text"):
            raise ConfigError(f"{where}: content holds {part.get('type')!r}; text alone is read")
        parts.append(part["text"])
    return "".join(parts)
