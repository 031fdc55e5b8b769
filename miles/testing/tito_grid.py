"""A grid of conversations that every tito handler must carry from turn to turn without touching a
token.

Plays the talks of `tito_talks`; the independent oracle is in `tito_oracle`, a live engine in
`tito_live`. Starts nothing and reads no checkpoint.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles.errors import ContractError, EpisodeError, MilesError
from miles.protocols import Tito
from miles.testing.tito_oracle import Oracle
from miles.testing.tito_talks import GRID, Talk
from miles.types import Array, Message

__all__ = ["Line", "Played", "play", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One turn of a talk as a handler made it."""

    index: int
    """Number of the turn."""
    before: tuple[Message, ...]
    """History before `told`, as parsed."""
    told: tuple[Message, ...]
    """What was appended, calls answered by their ids."""
    stored: Array
    """(tokens,) int32 before it; empty for the first."""
    added: Array
    """(tokens,) int32 that `render` or `extend` gave."""
    said: Array
    """(tokens,) int32 of the demonstration."""
    rewrites: bool
    """The handler says that the template would take something back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What was found for one talk."""

    talk: str
    """Its name."""
    faults: tuple[str, ...] = ()
    """What is wrong; nothing is good."""
    turns: int = 0
    """Turns played."""
    tokens: int = 0
    """Tokens at the end."""
    kept: int = 0
    """Turns in which the template would have taken something back."""
    oracle: str = ""
    """How much of it a template was asked for: empty when there is none."""
    skipped: str = ""
    """Why the family cannot have this talk."""


def play(handler: Tito, talk: Talk) -> Iterator[Played]:
    """The talk turn by turn, the way a session does it. Raises what the handler raises."""
    history: list[Message] = []
    stored = np.zeros(0, np.int32)  # (tokens,) int32
    for index, turn in enumerate(talk.turns):
        told = [_answered(m, history) for m in turn.told]
        rewrites = False
        if index:
            ask = getattr(handler, "rewrites", None)
            rewrites = bool(ask(history, told, tools=talk.tools)) if ask else False
            added = handler.extend(stored, history, told, tools=talk.tools)
        else:
            added = handler.render(told, tools=talk.tools)
        said = handler.demonstrate(turn.said)
        yield Played(
            index=index,
            before=tuple(history),
            told=tuple(told),
            stored=stored,
            added=added,
            said=said,
            rewrites=rewrites,
        )
        stored = np.concatenate([stored, added, said])
        history += [*told, handler.parse(said, tools=talk.tools)]


def _answered(message: Message, history: Sequence[Message]) -> Message:
    if "answers" not in message:
        return message
    calls = (history[-1].get("tool_calls") or ()) if history else ()
    if message["answers"] >= len(calls):
        raise ContractError(f"call {message['answers']} of {history[-1:]} was not parsed")
    rest = {key: value for key, value in message.items() if key != "answers"}
    return {**rest, "tool_call_id": calls[message["answers"]]["id"]}


def verify(
    handler: Tito, oracle: Oracle | None = None, *, talks: Sequence[Talk] = GRID
) -> tuple[Line, ...]:
    """One line for each talk: append-only, parsed back as it was said, and as the oracle has it."""
    return tuple(_line(handler, oracle, talk) for talk in talks)


@dataclass(slots=True)
class _Count:
    faults: list[str] = field(default_factory=list)
    turns: int = 0
    tokens: int = 0
    kept: int = 0
    asked: int = 0


def _line(handler: Tito, oracle: Oracle | None, talk: Talk) -> Line:
    count = _Count()
    try:
        for played in play(handler, talk):
            count.turns += 1
            count.kept += played.rewrites
            count.tokens = sum(len(x) for x in (played.stored, played.added, played.said))
            count.faults += _turn_faults(handler, talk, played)
            if oracle is not None:
                asked, faults = _oracle_faults(handler, oracle, talk, played)
                count.asked += asked
                count.faults += faults
    except EpisodeError as error:
        if not count.turns:
            return Line(talk=talk.name, skipped=str(error))
        count.faults.append(f"turn {count.turns}: {error}")
    except MilesError as error:
        count.faults.append(f"turn {count.turns}: {error.detail}")
    return Line(
        talk=talk.name,
        faults=tuple(count.faults),
        turns=count.turns,
        tokens=count.tokens,
        kept=count.kept,
        oracle=f"{count.asked} of {count.turns} prompts" if oracle is not None else "",
    )


def _turn_faults(handler: Tito, talk: Talk, played: Played) -> Iterator[str]:
    head = f"turn {played.index}: "
    for what, ids in (("added", played.added), ("said", played.said)):
        if ids.dtype != np.int32 or ids.ndim != 1:
            yield f"{head}{what} is {ids.dtype} of shape {ids.shape}, not (tokens,) int32"
    stops = [i for i, token in enumerate(played.said) if int(token) in handler.stop_ids]
    if stops != [len(played.said) - 1]:
        yield f"{head}the demonstration has stop ids at {stops} of {len(played.said)}"
    shown = handler.decode(played.added)
    for message in played.told:
        text = _normal(message["content"]).strip()
        if text not in _normal(shown):
            yield f"{head}{text[:60]!r} is not in what was added: {shown[-200:]!r}"
    yield from (head + f for f in _parsed_faults(handler, talk, played))


def _parsed_faults(handler: Tito, talk: Talk, played: Played) -> Iterator[str]:
    meant = talk.turns[played.index].said
    message = handler.parse(played.said, tools=talk.tools)
    if message.get("role") != "assistant":
        yield f"the parsed role is {message.get('role')!r}"
    said = _normal(message.get("content")).strip()
    wanted = _normal(meant["content"]).strip()
    left_out = meant.get("tool_calls") and wanted not in _normal(handler.decode(played.said))
    if said != ("" if left_out else wanted):  # some templates write nothing beside a call
        yield f"said {meant['content'][:60]!r}, parsed {said[:60]!r}"
    thought = str(meant.get("reasoning_content") or "").strip()
    heard = str(message.get("reasoning_content") or "").strip()
    if heard != thought and heard + thought:
        shown = handler.decode(played.said)
        if thought in shown or heard:  # a family without reasoning does not write it
            yield f"thought {thought!r}, parsed {heard!r}"
    called, found = (_calls(m.get("tool_calls") or ()) for m in (meant, message))
    if called != found:
        yield f"called {called}, parsed {found}"
    own = [call["id"] for call in message.get("tool_calls") or ()]
    if len(set(own)) != len(own):
        yield f"ids of calls {own} are not unique"


def _normal(text: Any) -> str:
    """As tokenizers that compose characters give it back."""
    return unicodedata.normalize("NFC", str(text or ""))


def _calls(calls: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def _oracle_faults(
    handler: Tito, oracle: Oracle, talk: Talk, played: Played
) -> tuple[bool, list[str]]:
    """Whether the template could be asked, and in what it disagrees."""
    # where code beside the template writes the tools, the template says them otherwise
    tools = () if getattr(handler, "tools_by_code", False) else talk.tools
    head = f"turn {played.index}: "
    if not played.index:
        text = oracle.text(played.told, tools=tools, opened=True)
        if text is None:
            return False, []
        ours = handler.render(played.told, tools=tools)
        difference = _difference(handler, oracle.encode(text), ours)
        return True, [f"{head}{difference}"] if difference else []
    suffix = oracle.suffix(
        played.before, played.told, tools=tools, stops=_stop_texts(handler), text=_spoken(handler)
    )
    if suffix is None:
        return False, []
    # behind the stop token, because some tokenizers treat the beginning of a text differently
    theirs = oracle.encode(handler.decode(played.stored[-1:]) + suffix)[1:]
    difference = _difference(handler, theirs, played.added)
    return True, [f"{head}appended {difference}"] if difference else []


def _stop_texts(handler: Tito) -> list[str]:
    return [handler.decode(np.array([i], np.int32)) for i in handler.stop_ids]


def _spoken(handler: Tito) -> Any:
    """Messages in the spelling that tells empty and absent apart, where a family does."""
    return getattr(handler, "spell", None)


def _difference(handler: Tito, theirs: Sequence[int], ours: Array) -> str:
    pairs = list(zip(theirs, ours.tolist(), strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if at == len(theirs) == len(ours):
        return ""
    window = slice(max(0, at - 6), at + 12)
    return (
        f"prompts differ at token {at}: the template has "
        f"{handler.decode(np.array(theirs[window], np.int32))!r}, the handler "
        f"{handler.decode(ours[window])!r}"
    )
