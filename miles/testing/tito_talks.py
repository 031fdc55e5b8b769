"""The conversations of the grid that tito handlers are held against, as data.

Nothing is played here; that is `tito_grid`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles.protocols import Tool
from miles.types import Message

__all__ = ["GRID", "TOOLS", "Talk", "Turn"]

TOOLS: tuple[Tool, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": words,
            "parameters": {
                "type": "object",
                "properties": fields,
                "required": list(fields)[:1],
            },
        },
    }
    for name, words, fields in (
        ("look_up", "Look up the weather.", {"place": {"type": "string"}}),
        ("add", "Add numbers.", {"a": {"type": "number"}, "b": {"type": "number"}}),
    )
)
"""Functions offered in the talks that call some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What is told to the model, and what it then says."""

    told: tuple[Message, ...]
    """Messages to append; a tool's result says with `answers` which call of the turn before."""
    said: Message
    """The assistant's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """One conversation of the grid."""

    name: str
    """What it is about."""
    turns: tuple[Turn, ...]
    """In order."""
    tools: tuple[Tool, ...] = ()
    """Functions offered in all of it."""

    @property
    def reasons(self) -> bool:
        """Somebody thinks in it."""
        return any(turn.said.get("reasoning_content") for turn in self.turns)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _says(text: str, *calls: tuple[str, Mapping[str, Any]], first: int = 0, **more: Any) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": text, **more}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"functions.{name}:{first + number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
    return message


def _result(text: str, answers: int = 0) -> Message:
    return {"role": "tool", "content": text, "answers": answers}


def _turn(said: Message, *told: Message) -> Turn:
    return Turn(told=told, said=said)


_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_ZURICH = ("look_up", {"place": "Zürich"})
_LONG = "word and " * 3000

GRID: tuple[Talk, ...] = (
    Talk(name="plain", turns=(_turn(_says("4"), _user("2+2=")),)),
    Talk(name="system", turns=(_turn(_says("4"), _SYSTEM, _user("2+2=")),)),
    Talk(
        name="multi_turn",
        turns=(
            _turn(_says("4"), _SYSTEM, _user("2+2=")),
            _turn(_says("6, of course."), _user("and 3+3=")),
            _turn(_says("Bye."), _user("Thanks!")),
        ),
    ),
    Talk(
        name="one_call",
        tools=TOOLS,
        turns=(
            _turn(_says("", _ZURICH), _SYSTEM, _user("How is Zürich?")),
            _turn(_says("Sunny."), _result('{"sky": "clear"}')),
            _turn(_says("You are welcome."), _user("Thanks!")),
        ),
    ),
    Talk(
        name="parallel_calls",
        tools=TOOLS,
        turns=(
            _turn(
                _says("Both.", _ZURICH, ("add", {"a": 1, "b": 2.5})), _user("Zürich, and 1+2.5?")
            ),
            _turn(_says("Sunny, and 3.5."), _result("clear"), _result("3.5", 1)),
        ),
    ),
    Talk(
        name="reasoning_kept",
        tools=TOOLS,
        turns=(
            _turn(_says("", _ZURICH, reasoning_content="I should look."), _user("How is Zürich?")),
            _turn(
                _says("", ("add", {"a": 1, "b": 1}), first=1, reasoning_content="Now add."),
                _result("clear"),
            ),
            _turn(_says("Sunny, 2.", reasoning_content="Done."), _result("2")),
        ),
    ),
    Talk(
        name="reasoning_dropped",
        turns=(
            _turn(_says("4", reasoning_content="Two and two."), _user("2+2=")),
            _turn(_says("6", reasoning_content="Three and three."), _user("and 3+3=")),
            _turn(_says("8", reasoning_content="Four and four."), _user("and 4+4=")),
        ),
    ),
    Talk(
        name="empty_content",
        tools=TOOLS,
        turns=(
            _turn(_says(""), _user("")),
            _turn(_says("", ("add", {})), _user("Call it.")),
            _turn(_says("ok"), _result("")),
        ),
    ),
    Talk(
        name="unicode",
        turns=(
            _turn(_says("naïve — ßtraße 🦊"), _user("日本語 العربية 👩‍👩‍👧")),
            _turn(_says("𝔘𝔫𝔦𝔠𝔬𝔡𝔢"), _user("e\u0301 and é, \u200bhidden")),
        ),
    ),
    Talk(
        name="very_long",
        turns=(
            _turn(_says(_LONG + "."), _user(_LONG)),
            _turn(_says("x" * 5000), _user("y" * 5000)),
        ),
    ),
    Talk(
        name="tool_error",
        tools=TOOLS,
        turns=(
            _turn(_says("", ("add", {"a": "one"})), _user("1+1?")),
            _turn(
                _says("I cannot."), _result('Traceback (most recent call last):\n  File "x"\nError')
            ),
        ),
    ),
    Talk(
        name="retry",
        tools=TOOLS,
        turns=(
            _turn(_says("", _ZURICH), _user("How is Zürich?")),
            _turn(_says("Again.", _ZURICH, first=1), _result("timeout")),
            _turn(_says("", _ZURICH, first=2), _result("timeout")),
            _turn(_says("It does not answer."), _result("timeout")),
        ),
    ),
)
"""Every talk. None of them holds markup in a text: that is another check."""
