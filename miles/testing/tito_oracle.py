"""A checkpoint's own chat template as an independent oracle for tito handlers.

It runs in an environment of its own with the tokenizer as `transformers` reads it, through no code
of a handler, and it never parses.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from miles.errors import ConfigError
from miles.types import Message

__all__ = ["Oracle"]

_TRACKED = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""Marks that say which text a model generates; they write nothing."""
_MARK = "miles-marks-this-answer"


class Oracle:
    """The template of a directory's tokenizer, or another one given as text."""

    def __init__(
        self,
        directory: Path,
        *,
        template: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
            str(directory), local_files_only=True
        )
        found = template or self._tokenizer.chat_template
        if isinstance(found, Mapping):  # several by name
            found = found.get("default")
        if not found:
            raise ConfigError(f"oracle: the tokenizer in {directory} has no chat template")
        # templates written for other programs grow lists, which the strictest sandbox forbids
        world = jinja2.sandbox.SandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        world.filters["tojson"] = _tojson
        world.globals["raise_exception"] = _refuse
        world.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._template = world.from_string(_TRACKED.sub("", str(found)))
        named = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {n: v for n in named if (v := getattr(self._tokenizer, n))}
        self._variables = {**special, **(arguments or {})}

    def encode(self, text: str) -> list[int]:
        """Ids of a text, special tokens in it recognised."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    def text(
        self, messages: Sequence[Message], *, tools: Sequence[Any] = (), opened: bool
    ) -> str | None:
        """What the template writes; None when it refuses the messages."""
        offered = [dict(t) for t in tools] or None
        # engines hand arguments over as objects; templates that want text get it as it is
        for written in ([_plain(m) for m in messages], [dict(m) for m in messages]):
            try:
                return str(
                    self._template.render(
                        messages=written,
                        tools=offered,
                        add_generation_prompt=opened,
                        **self._variables,
                    )
                )
            except (
                jinja2.TemplateError,
                TypeError,
                ValueError,
                LookupError,
                AttributeError,
            ):
                continue
        return None

    def suffix(
        self,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        stops: Sequence[str],
        text: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None,
    ) -> str | None:
        """What the template writes after the stop token of the last turn of `history`, whatever it
        does to earlier turns; None when it cannot be told."""
        last = history[-1]
        marks = [{**last, "content": _MARK}]
        if last.get("tool_calls"):  # templates may leave out what is said beside a call
            *others, call = last["tool_calls"]
            function = {**call["function"], "arguments": json.dumps({"mark": _MARK})}
            marks.append({**last, "tool_calls": [*others, {**call, "function": function}]})
        for mark in marks:
            written = [_plain(m) for m in (*history[:-1], mark, *messages)]
            whole = self.text(text(written) if text else written, tools=tools, opened=True)
            if whole is None:
                written = [dict(m) for m in (*history[:-1], mark, *messages)]
                whole = self.text(text(written) if text else written, tools=tools, opened=True)
            if whole is not None and _MARK in whole:
                return _after(whole, stops)
        return None


def _after(whole: str, stops: Sequence[str]) -> str | None:
    """What stands behind the first stop that follows the mark."""
    at = whole.rfind(_MARK)
    ends = [(i, len(stop)) for stop in stops if (i := whole.find(stop, at)) >= 0]
    if not ends:
        return None
    first, size = min(ends)
    return whole[first + size :]


def _plain(message: Message) -> dict[str, Any]:
    """Arguments as objects, as inference engines hand them to templates."""
    made = dict(message)
    calls = []
    for call in made.get("tool_calls") or ():
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    if calls:
        made["tool_calls"] = calls
    return made


def _tojson(value: Any, indent: Any = None, separators: Any = None, **more: Any) -> str:
    more.pop("ensure_ascii", None)
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, **more)
    return text


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
