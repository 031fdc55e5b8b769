"""Messages to the text of a Jinja chat template, and messages in the one spelling that templates
read.

It makes no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from miles import EpisodeError, Message, Tool

__all__ = ["Template", "plain"]


class Template:
    """One chat template with the variables that are fixed for it."""

    def __init__(
        self, text: str, *, who: str, variables: Mapping[str, Any], grows_lists: bool = False
    ) -> None:
        """`grows_lists`: it appends to lists of its own, which `transformers` forbids."""
        self.text = text
        self._growing = _growing(text) if grows_lists else None
        self._who = who
        self._variables = dict(variables)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), opened: bool
    ) -> str:
        """The template's text, with the assistant's turn `opened` or not. Raises `EpisodeError`
        when the template refuses the messages."""
        import jinja2

        refusals = (
            jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError
        )  # fmt: skip
        told = [dict(m) for m in messages]
        refused: Exception | None = None
        # engines hand arguments over as objects; templates that want text get it as text
        for objects in (True, False):
            try:
                conversation = told if objects else [_written(m) for m in told]
                return self._text(conversation, [dict(t) for t in tools] or None, opened)
            except refusals as error:
                refused = refused or error
            if objects and not any(m.get("tool_calls") for m in told):
                break
        raise EpisodeError(
            f"tito {self._who}: the chat template refuses {len(messages)} messages: {refused}"
        ) from refused

    def _text(self, conversation: list[Any], tools: list[Any] | None, opened: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        how = {"add_generation_prompt": opened, **self._variables}
        if self._growing is not None:
            return str(self._growing.render(messages=conversation, tools=tools, **how))
        texts, _ = render_jinja_template(
            conversations=[conversation], tools=tools, chat_template=self.text, **how
        )
        return str(texts[0])


def _growing(text: str) -> Any:
    """The template as `transformers` compiles it, in a sandbox where it may grow its own lists."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import SandboxedEnvironment

    world = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    world.filters["tojson"] = lambda value, **how: json.dumps(
        value, **{"ensure_ascii": False, **how}
    )
    return world.from_string(text)


def _written(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message


def plain(
    messages: Sequence[Message], *, who: str, image: str | None = None
) -> list[dict[str, Any]]:
    """Copies in the spelling that templates read: content is text, arguments are objects.

    An image becomes `image`; without one it raises `EpisodeError`, as does any other kind of part.
    """
    made = []
    for index, message in enumerate(messages):
        copy = {key: value for key, value in message.items() if value is not None}
        copy["content"] = _text(message.get("content"), index, who, image)
        if copy.pop("tool_calls", None):
            copy["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        made.append(copy)
    return made


def _text(content: Any, index: int, who: str, image: str | None) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        # the mark that stands for an image is ours alone
        return content.replace(image, "\ufffd") if image else content
    if not isinstance(content, Sequence):
        raise EpisodeError(
            f"tito {who}: content of message {index} is {type(content).__name__}, not text"
        )
    return "".join(_part(part, index, who, image) for part in content)


def _part(part: Any, index: int, who: str, image: str | None) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind in ("text", "input_text", "output_text"):
        return _text(part.get("text"), index, who, image)
    if kind in ("image", "image_url", "input_image"):
        if image is None:
            raise EpisodeError(
                f"tito {who}: message {index} carries an image, and this family reads text only"
            )
        return image
    raise EpisodeError(f"tito {who}: message {index} carries a part of type {kind!r}")


def _call(call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object, as inference engines hand it to templates."""
    made = dict(call)
    function = dict(made.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = arguments  # what cannot be read is shown as it was written
        function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    elif arguments is None:
        function["arguments"] = {}
    made["function"] = function
    return made
