"""Where one piece of a conversation ends and the next begins: turns cut anywhere, and any text
beside the markup.

Uses hypothesis for the texts, which is imported when asked; cuts are tried one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from miles.errors import ContractError
from miles.protocols import Tito
from miles.testing.tito_grid import Played, play, verify
from miles.testing.tito_oracle import Oracle
from miles.testing.tito_talks import GRID, TOOLS, Talk, Turn

__all__ = ["CUT", "cut_faults", "search"]

CUT = ("multi_turn", "reasoning_dropped", "unicode")
"""Talks whose turns are cut: those without calls, since half a call is none."""


def cut_faults(handler: Tito, *, talks: Sequence[str] = CUT, every: int = 1) -> Iterator[str]:
    """Cut each turn of the talks after every token (or every so many): what `extend` adds is the
    close of the turn, and then exactly what it adds to the whole turn."""
    for talk in GRID:
        if talk.name not in talks:
            continue
        turns = list(play(handler, talk))
        for before, after in pairwise(turns):
            for size in range(0, len(before.said), every):
                fault = _cut(handler, talk, before, after, size)
                if fault:
                    yield f"{talk.name}, turn {before.index} cut after {size} tokens: {fault}"


def _cut(handler: Tito, talk: Talk, before: Played, after: Played, size: int) -> str:
    said = before.said[:size]
    stored = np.concatenate([before.stored, before.added, said])
    kept = stored.copy()
    history = [*before.before, *before.told, handler.parse(said, tools=talk.tools)]
    added = handler.extend(stored, history, after.told, tools=talk.tools)
    if not np.array_equal(stored, kept):
        return "extend wrote into the stored tokens"
    at = len(added) - len(after.added)
    if at < 0 or not np.array_equal(added[at:], after.added):
        meant = handler.decode(after.added)
        return f"added {handler.decode(added)!r}, which does not end in {meant!r}"
    head = added[:at]
    stops = sum(int(token) in handler.stop_ids for token in head)
    text = handler.decode(head)
    for token in head:
        if int(token) in handler.stop_ids:
            text = text.replace(handler.decode(np.array([token], np.int32)), "", 1)
    marks = ("</think>", "<|end_message|>", *(() if size else ("<think>",)))  # an empty thought
    for mark in marks:
        text = text.replace(mark, "")
    if stops != 1 or text.strip():
        return f"the turn is closed by {handler.decode(head)!r}"
    return ""


def search(handler: Tito, oracle: Oracle | None, *, examples: int = 15) -> str:
    """Try texts of all kinds at every boundary of a talk with a call; the first fault, made as
    small as it gets, or nothing. Raises `ImportError` without hypothesis."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    # no text holds markup: what becomes of that is another question
    letters = st.characters(exclude_categories=("Cs", "Cn", "Co"), exclude_characters="<>|｜[]\x00")
    texts = st.text(letters, max_size=12)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(texts, texts, texts, texts)
    def holds(system: str, user: str, said: str, result: str) -> None:
        (line,) = verify(handler, oracle, talks=[_talk(system, user, said, result)])
        if line.faults:
            raise ContractError(line.faults[0])

    try:
        holds()
    except ContractError as error:
        return str(error)
    return ""


def _talk(system: str, user: str, said: str, result: str) -> Talk:
    call: Any = {
        "id": "functions.add:0",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
    }
    told = ({"role": "system", "content": system}, {"role": "user", "content": user})
    asked = Turn(told=told, said={"role": "assistant", "content": said, "tool_calls": [call]})
    answer = {"role": "tool", "content": result, "answers": 0}
    more = Turn(told=(answer,), said={"role": "assistant", "content": said})
    last = Turn(
        told=({"role": "user", "content": result},), said={"role": "assistant", "content": user}
    )
    return Talk(name="any text", tools=TOOLS, turns=(asked, more, last))
