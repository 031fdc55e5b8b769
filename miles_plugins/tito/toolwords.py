"""How the byte tokenizer writes tools and tool calls as text, and the same as a Jinja template.

Tokens are `bytes`' business; nothing here runs a tool.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from miles import EpisodeError, Message, Tool

__all__ = ["TEMPLATE", "call_text", "split", "with_tools"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HEAD = "Tools:"
_SPELLED = re.compile(r'\{"name":("(?:[^"\\]|\\.)*"),"arguments":(\{.*\})\}', re.DOTALL)

TEMPLATE = (
    "{%- macro listed(tools) -%}"
    "{{ 'Tools:' }}"
    "{%- for tool in tools -%}"
    "{%- set f = tool['function'] -%}"
    "{{ '\\n' + f['name'] + '(' }}"
    "{%- set p = f['parameters'] if f['parameters'] else {} -%}"
    "{%- for key, value in (p['properties'] if p['properties'] else {}).items() -%}"
    "{{ '' if loop.first else ', ' }}{{ key }}"
    "{{ '' if key in (p['required'] if p['required'] else []) else '?' }}"
    "{{ (': ' + value['type']) if value['type'] is string else '' }}"
    "{%- endfor -%}"
    "{{ ')' }}{{ (' ' + f['description']) if f['description'] else '' }}"
    "{%- endfor -%}"
    "{%- endmacro -%}"
    "{%- if tools and not (messages and messages[0]['role'] == 'system') -%}"
    "{{ '<|im_start|>system\\n' + listed(tools) + '<|im_end|>' + '\\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{- message['content'] if message['content'] else '' }}"
    "{%- if tools and loop.first and message['role'] == 'system' -%}"
    "{{ ('\\n\\n' if message['content'] else '') + listed(tools) }}"
    "{%- endif -%}"
    "{%- for call in (message['tool_calls'] if message['tool_calls'] else []) -%}"
    "{%- set a = call['function']['arguments'] -%}"
    "{{ '<tool_call>{\"name\":' + call['function']['name'] | tojson + ',\"arguments\":' }}"
    "{{- a if a is string else a | tojson(separators=(',', ':')) }}"
    "{{- '}</tool_call>' }}"
    "{%- endfor -%}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
"""What `with_tools` and `call_text` do, for whoever loads the saved tokenizer."""


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> Sequence[Message]:
    """The messages, with one line a tool at the end of the system's turn.

    A line is `name(parameter: type, optional?: type) description`: the top level of the schema and
    no more, because every byte of it is a token.
    """
    if not tools:
        return messages
    listed = "\n".join([_HEAD, *(_line(tool) for tool in tools)])
    if messages and messages[0].get("role") == "system":
        said = messages[0].get("content") or ""
        if not isinstance(said, str):
            return messages  # refused where it is encoded, with its place
        content = f"{said}\n\n{listed}" if said else listed
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": listed}, *messages]


def _line(tool: Tool) -> str:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise EpisodeError(
            f"tito bytes: {tool!r} is no tool; {{'type': 'function', 'function': {{'name': ...}}}} "
            "is wanted"
        )
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or []
    named = [
        name
        + ("" if name in required else "?")
        + (f": {value['type']}" if isinstance(value.get("type"), str) else "")
        for name, value in (parameters.get("properties") or {}).items()
    ]
    description = function.get("description")
    return f"{function['name']}({', '.join(named)})" + (f" {description}" if description else "")


def call_text(call: Mapping[str, Any], index: int) -> str:
    """One tool call as it is written; arguments that are a string are taken as they are. Raises
    `EpisodeError` naming the message `index`."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise EpisodeError(
            f"tito bytes: message {index} has the tool call {call!r}, which names no function"
        )
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{_OPEN}{{"name":{name},"arguments":{arguments}}}{_CLOSE}'


def split(text: str) -> tuple[str, list[Message]]:
    """A turn's text as content and tool calls.

    Calls stand one after another at the very end. Where that end is not well-formed (no JSON object
    of just a name and an object of arguments; a key twice; NaN; a mark left open), all of the text
    is content and there are no calls.
    """
    if text.endswith(_CLOSE):
        start = text.find(_OPEN)
        while start >= 0:
            if calls := _calls(text, start):
                return text[:start], calls
            start = text.find(_OPEN, start + 1)
    return text, []


def _calls(text: str, at: int) -> list[Message]:
    """Every call from `at` to the text's end; none when anything there is not a call."""
    calls: list[Message] = []
    while at < len(text):
        begin = at + len(_OPEN)
        try:
            value, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return []
        if not text.startswith(_OPEN, at) or not text.startswith(_CLOSE, end):
            return []
        body = text[begin:end]
        if not (isinstance(value, dict) and set(value) == {"name", "arguments"}):
            return []
        if not (isinstance(value["name"], str) and isinstance(value["arguments"], dict)):
            return []
        digest = hashlib.blake2b(f"{len(calls)} {body}".encode("utf-8", "replace"), digest_size=6)
        calls.append(
            {
                "id": f"call_{digest.hexdigest()}",
                "type": "function",
                "function": {"name": value["name"], "arguments": _spelling(body, value)},
            }
        )
        at = end + len(_CLOSE)
    return calls


def _spelling(body: str, value: Mapping[str, Any]) -> str:
    """The arguments as they were said, where the call is spelled the usual way."""
    spelled = _SPELLED.fullmatch(body)
    if spelled is not None and spelled[1] == json.dumps(value["name"], ensure_ascii=False):
        return spelled[2]
    return json.dumps(value["arguments"], ensure_ascii=False, separators=(",", ":"))


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_distinct)
