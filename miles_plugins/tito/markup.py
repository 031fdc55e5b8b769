"""What a completion says in the common markups of reasoning and tool calls, for templates without a
handler of their own.

Works on text. Which markup a template uses is read off the template itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles import Tool
from miles_plugins.tito.calls import Said

__all__ = ["Found", "Markup", "markup_of"]

_THINK, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A completion taken apart; nothing of its text is lost."""

    content: str
    """What is said, calls that could not be read included as they were written."""
    reasoning: str | None
    """What stands before `</think>`; None where there is none."""
    calls: tuple[Said, ...]
    """Ids where the markup has them, names, arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """One way to write tool calls."""

    signs: tuple[str, ...]
    """Texts of which a template that writes calls so has all."""
    block: re.Pattern[str]
    """One call, or the wrapper of several."""
    read: Any
    """(inside of a block, types of parameters by tool) to what is called, or None."""
    ends_thought: str = ""
    """A mark of calls with which a model may end its reasoning, without `</think>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    """How one template marks reasoning and calls."""

    thinks: bool
    """`<think>` and `</think>` are markup."""
    calls: _Calls | None
    """None when the template has none that is known here."""

    def read(self, text: str, *, opened: bool, tools: Sequence[Tool] = ()) -> Found:
        """Take a completion apart; `opened` when the prompt already opened the reasoning."""
        reasoning, content = self._thought(text, opened)
        found: list[Said] = []
        if self.calls is None:
            return Found(content=content, reasoning=reasoning, calls=())
        types, kept, at = _types(tools), [], 0
        for block in self.calls.block.finditer(content):
            call = self.calls.read(block[1], types)
            if call is not None:
                kept.append(content[at : block.start()])
                at = block.end()
                found.append(call)
        kept.append(content[at:])
        # white space between calls is markup; before the first and after the last it was said
        between = [piece for piece in kept[1:-1] if piece.strip()]
        last = kept[-1] if not found or kept[-1].strip() else ""
        content = kept[0] + "".join(between) + last if found else content
        return Found(content=_unwrapped(content), reasoning=reasoning, calls=tuple(found))

    def _thought(self, text: str, opened: bool) -> tuple[str | None, str]:
        if not self.thinks:
            return None, text
        begins = text.lstrip().startswith(_THINK)
        if not opened and text.startswith(_THOUGHT):
            return None, text[len(_THOUGHT) :]  # an empty thought that the prompt began
        if not opened and not begins:
            return None, text
        body = text.lstrip()[len(_THINK) :] if begins else text
        before, mark, after = body.partition(_THOUGHT)
        if not mark and self.calls is not None and self.calls.ends_thought:
            before, mark, after = body.partition(self.calls.ends_thought)
            after = mark + after
        return (before or None), after if mark else ""


def markup_of(template: str) -> Markup:
    """The markup that a chat template writes."""
    calls = next((c for c in _WAYS if all(sign in template for sign in c.signs)), None)
    return Markup(thinks=_THOUGHT in template, calls=calls)


# ---------------------------------------------------------------- the ways


def _json_call(inside: str, _: Mapping[str, Any]) -> Said | None:
    try:
        said = json.loads(inside)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    return _checked(said.get("name"), said.get("arguments", said.get("parameters", {})))


def _tagged(name: str, pairs: Iterator[tuple[str, str]], types: Mapping[str, Any]) -> Any:
    own = types.get(name.strip(), {})
    arguments = {key.strip(): _value(text, own.get(key.strip())) for key, text in pairs}
    return _checked(name.strip(), arguments)


def _function_call(inside: str, types: Mapping[str, Any]) -> Any:
    head = re.search(r"<function=([^>\n]+)>", inside)
    if head is None or "</function>" not in inside:
        return None
    found = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", inside, re.DOTALL)
    return _tagged(head[1], iter(found), types)


def _pair_call(inside: str, types: Mapping[str, Any]) -> Any:
    name, _, rest = inside.partition("<arg_key>")
    pattern = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
    return _tagged(name, iter(re.findall(pattern, "<arg_key>" + rest, re.DOTALL)), types)


def _deepseek_call(inside: str, _: Mapping[str, Any]) -> Any:
    name, mark, written = inside.partition("<｜tool▁sep｜>")
    if not mark:
        return None
    if name == "function":  # V3 and R1 write the type first, and fence the arguments
        name, _, written = written.partition("\n")
        written = written.removeprefix("```json\n").removesuffix("\n```")
    try:
        return _checked(name.strip(), json.loads(written))
    except (ValueError, RecursionError):
        return None


def _dsml_call(inside: str, _: Mapping[str, Any]) -> Any:
    head = re.match(r'\s*name="([^"]+)">', inside)
    pattern = r'<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>'
    if head is None:
        return None
    pairs = re.findall(pattern, inside, re.DOTALL)
    return _checked(head[1], {k: v if text == "true" else _value(v, None) for k, text, v in pairs})


def _kimi_call(inside: str, _: Mapping[str, Any]) -> Said | None:
    own, mark, written = inside.partition("<|tool_call_argument_begin|>")
    own = own.strip()  # functions.NAME:NUMBER
    name = own.partition(":")[0]
    try:
        arguments = json.loads(written) if mark else None
    except (ValueError, RecursionError):
        return None
    return _checked(name.partition(".")[2] or name, arguments, own=own)


def _checked(name: Any, arguments: Any, *, own: str | None = None) -> Said | None:
    good = isinstance(name, str) and name and isinstance(arguments, dict)
    return (own, name, arguments) if good else None


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _types(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    found = {}
    for tool in tools:
        function = tool.get("function", tool)
        fields = (function.get("parameters") or {}).get("properties") or {}
        found[str(function.get("name"))] = {
            key: value.get("type") for key, value in fields.items() if isinstance(value, Mapping)
        }
    return found


def _unwrapped(content: str) -> str:
    """Without the wrappers of several calls, once they are empty."""
    return _EMPTY.sub("", content)


_EMPTY = re.compile(
    r"\s*(<｜tool▁calls▁begin｜>\s*<｜tool▁calls▁end｜>"
    r"|<｜DSML｜(\w+)>\s*</｜DSML｜\2>"
    r"|<\|tool_calls_section_begin\|>\s*<\|tool_calls_section_end\|>)"
)
_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_WAYS = (
    _Calls(signs=("<tool_call>", "<function="), block=_BLOCK, read=_function_call),
    _Calls(signs=("<tool_call>", "<arg_key>"), block=_BLOCK, read=_pair_call),
    _Calls(signs=("<tool_call>",), block=_BLOCK, read=_json_call),
    _Calls(
        signs=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
        block=re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL),
        read=_deepseek_call,
    ),
    _Calls(
        signs=("｜DSML｜",),
        block=re.compile(r"<｜DSML｜invoke(.*?)</｜DSML｜invoke>", re.DOTALL),
        read=_dsml_call,
    ),
    _Calls(
        signs=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
        block=re.compile(r"<\|tool_call_begin\|>(.*?)<\|tool_call_end\|>", re.DOTALL),
        read=_kimi_call,
        ends_thought="<|tool_calls_section_begin|>",
    ),
)
"""The first whose signs a template has is the template's."""
