"""The append-only invariant against a live engine or session server, with a scripted agent.

Speaks the native `/generate` of SGLang, or the session server's own API where the address has one;
starts nothing. Believes the other side, not the handler, about what was sent and sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np

from miles.errors import EngineError, EpisodeError, MilesError
from miles.protocols import Tito
from miles.testing.tito_grid import Line
from miles.testing.tito_talks import GRID, Talk
from miles.types import Array, Message

__all__ = ["LIVE", "verify_live"]

LIVE = ("plain", "system", "multi_turn", "one_call", "reasoning_dropped", "tool_error", "unicode")
"""Talks whose told messages the agent follows; what is said to them, the engine samples."""

_TOKENS = 32  # a turn; most end by length, so that closing cut turns is tried as well
_TIMEOUT_S = 120.0


def verify_live(handler: Tito, url: str, *, key: str = "") -> tuple[Line, ...]:
    """One line for each talk of `LIVE`. Raises `EngineError` when nothing answers at `url`."""
    return asyncio.run(_all(handler, url.rstrip("/"), key))


async def _all(handler: Tito, url: str, key: str) -> tuple[Line, ...]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=limit) as client:
        wire = _Wire(client, url)
        play = _by_session if await wire.serves_sessions() else _by_engine
        return tuple([await _line(play, handler, wire, t) for t in GRID if t.name in LIVE])


async def _line(play: Any, handler: Tito, wire: _Wire, talk: Talk) -> Line:
    seen = _Seen()
    try:
        await play(handler, wire, talk, seen)
    except EpisodeError as error:
        if not seen.turns:
            return Line(talk=talk.name, skipped=str(error))
        seen.faults.append(f"turn {seen.turns}: {error}")
    except EngineError:
        raise
    except MilesError as error:
        seen.faults.append(f"turn {seen.turns}: {error.detail}")
    return Line(
        talk=talk.name,
        faults=tuple(seen.faults),
        turns=seen.turns,
        tokens=seen.tokens,
        kept=seen.kept,
    )


class _Seen:
    """What was seen of one talk."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.turns = self.tokens = self.kept = 0


class _Wire:
    """Requests whose failures are `EngineError`."""

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self.client, self.url = client, url

    async def serves_sessions(self) -> bool:
        """Whether there is a session server; an engine has no such path."""
        status, body = await self.ask("POST", "/sessions", {})
        if status == 200 or status == 201:
            await self.ask("DELETE", f"/sessions/{body['session_id']}", token=body["token"])
            return True
        if status in (404, 405):
            return False
        raise EngineError(f"{self.url}/sessions: HTTP {status}: {str(body)[:200]}")

    async def ask(
        self, method: str, path: str, body: Any = None, *, token: str = ""
    ) -> tuple[int, Any]:
        """Status and JSON. Raises `EngineError` when nobody answers."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with self.client.request(
                method, self.url + path, json=body, headers=headers
            ) as reply:
                if "json" in reply.content_type:
                    return reply.status, await reply.json()
                return reply.status, await reply.text()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineError(f"{self.url}{path}: {type(error).__name__}: {error}") from error

    async def good(self, method: str, path: str, body: Any = None, *, token: str = "") -> Any:
        """JSON of a good answer."""
        status, said = await self.ask(method, path, body, token=token)
        if status >= 300 or not isinstance(said, Mapping):
            raise EngineError(f"{self.url}{path}: HTTP {status}: {str(said)[:200]}")
        return said


# ---------------------------------------------------------------- an engine


async def _by_engine(handler: Tito, wire: _Wire, talk: Talk, seen: _Seen) -> None:
    history: list[Message] = []
    stored = np.zeros(0, np.int32)  # (tokens,) int32: as the engine says, prompt and completion
    for told in _script(talk):
        new = _answers(history, told)
        if history:
            seen.kept += _rewrites(handler, history, new, talk)
            added = handler.extend(stored, history, new, tools=talk.tools)
        else:
            added = handler.render(new, tools=talk.tools)
        sent = np.concatenate([stored, added])
        reply = await wire.good("POST", "/generate", _body(handler, sent))
        heard, said = _tokens(reply)
        seen.turns += 1
        head = f"turn {seen.turns - 1}: "
        seen.faults += [head + f for f in _differences(handler, reply, sent, heard, stored, said)]
        stored = np.concatenate([sent if heard is None else heard, said])
        seen.tokens = len(stored)
        history += [*new, handler.parse(said, tools=talk.tools)]


def _body(handler: Tito, sent: Array) -> dict[str, Any]:
    return {
        "input_ids": sent.tolist(),
        "sampling_params": {
            "max_new_tokens": _TOKENS,
            "temperature": 1.0,
            "stop_token_ids": [int(i) for i in handler.stop_ids],
            "skip_special_tokens": False,
            "no_stop_trim": True,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
        "stream": False,
    }


def _tokens(reply: Mapping[str, Any]) -> tuple[Array | None, Array]:
    """Prompt ids, if the engine tells them, and sampled ids, as its log-probs stand beside them."""
    info = reply.get("meta_info") or {}
    found = info.get("output_token_logprobs")
    if not isinstance(found, list):
        raise EngineError(f"/generate: the reply has no output_token_logprobs: {str(reply)[:200]}")
    said = np.array([triple[1] for triple in found], np.int32)  # (tokens,) int32
    prompt = info.get("input_token_logprobs")
    if not prompt:
        return None, said
    return np.array([triple[1] for triple in prompt], np.int32), said  # (tokens,) int32


def _differences(
    handler: Tito,
    reply: Mapping[str, Any],
    sent: Array,
    heard: Array | None,
    stored: Array,
    said: Array,
) -> Iterator[str]:
    info = reply["meta_info"]
    size = info.get("prompt_tokens")
    if size != len(sent):
        yield f"the engine counts {size} prompt tokens, {len(sent)} were sent"
    if heard is not None:
        yield from _prefix(handler, stored, heard, "the prompt that the engine saw")
        if not np.array_equal(heard, sent):
            yield "the prompt that the engine saw is not what was sent"
    finish = (info.get("finish_reason") or {}).get("type")
    ended = len(said) > 0 and int(said[-1]) in handler.stop_ids
    if finish == "stop" and not ended:
        yield f"it stopped at {handler.decode(said[-1:])!r}, which is no stop id of the handler"
    early = [i for i in said[:-1].tolist() if i in handler.stop_ids]
    if early:
        yield f"it went on after the stop ids {early}"
    text = reply.get("text")
    shown = handler.decode(said)
    if isinstance(text, str) and "\ufffd" not in text + shown and text != shown:
        yield f"the engine decodes {text[:80]!r}, the handler {shown[:80]!r}"


# ---------------------------------------------------------------- a session server


async def _by_session(handler: Tito, wire: _Wire, talk: Talk, seen: _Seen) -> None:
    opened = await wire.good("POST", "/sessions", {})
    below, token = f"/sessions/{opened['session_id']}", opened["token"]
    messages: list[Message] = []
    stored = np.zeros(0, np.int32)  # (tokens,) int32
    try:
        for told in _script(talk):
            messages += _answers(messages, told)
            body: dict[str, Any] = {
                "model": opened.get("model", "model"),
                "messages": messages,
                "max_tokens": _TOKENS,
            }
            if talk.tools:
                body["tools"] = list(talk.tools)
            reply = await wire.good("POST", f"{below}/v1/chat/completions", body, token=token)
            messages.append(reply["choices"][0]["message"])
            seen.turns += 1
            taken = await wire.good("POST", f"{below}/samples", {}, token=token)
            longest = max(taken["samples"], key=lambda s: len(s["tokens"]))
            tokens = np.array(longest["tokens"], np.int32)  # (tokens,) int32
            head = f"turn {seen.turns - 1}: "
            first = handler.render(messages[: len(talk.turns[0].told)], tools=talk.tools)
            for before, what in ((stored, "the sample"), (first, "the sample's first prompt")):
                seen.faults += [head + f for f in _prefix(handler, before, tokens, what)]
            stored = tokens
            seen.tokens = len(stored)
            if reply["choices"][0].get("finish_reason") == "length":
                break  # a turn that ended by length may not be extended in every session
    finally:
        await wire.ask("DELETE", below, token=token)


# ---------------------------------------------------------------- the agent


def _script(talk: Talk) -> Iterator[tuple[Message, ...]]:
    for turn in talk.turns:
        yield turn.told


def _answers(history: Sequence[Message], told: Sequence[Message]) -> list[Message]:
    """What the agent sends: an answer to each call that was made; the script's results as a user's
    words where none was."""
    calls = (history[-1].get("tool_calls") or ()) if history else ()
    texts = [str(m["content"]) for m in told if "answers" in m]
    new: list[Message] = [
        {"role": "tool", "content": (texts or ["ok"])[0], "tool_call_id": call["id"]}
        for call in calls
    ]
    for message in told:
        if "answers" not in message:
            new.append(message)
        elif not calls:
            new.append({"role": "user", "content": message["content"]})
    return new


def _rewrites(
    handler: Tito, history: Sequence[Message], new: Sequence[Message], talk: Talk
) -> bool:
    ask = getattr(handler, "rewrites", None)
    return bool(ask(history, new, tools=talk.tools)) if ask else False


def _prefix(handler: Tito, before: Array, after: Array, what: str) -> Iterator[str]:
    size = min(len(before), len(after))
    wrong = np.flatnonzero(before[:size] != after[:size])
    if len(wrong) or len(before) > len(after):
        at = int(wrong[0]) if len(wrong) else size
        heard, kept = (handler.decode(ids[at : at + 12]) for ids in (after, before))
        yield (
            f"{what} does not begin with what was stored: token {at} is {heard!r}, stored {kept!r}"
        )
