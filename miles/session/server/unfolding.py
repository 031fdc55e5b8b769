"""Text of a reply while it is still being sampled: only what the finished message will surely hold.

Half a character is held back, and so is everything that markup may yet turn into reasoning or a
tool call. What a handler's `parse` makes of the whole completion stays the truth: `finish` gives
the rest of it, and raises when what was given out before is not its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from miles.errors import MilesError, SampleError
from miles.protocols import Tito, Tool
from miles.session.server.events import Delta
from miles.types import Array, Message

__all__ = ["Text", "Unfolding"]

_BROKEN = "\ufffd"
_TAG = re.compile(r"<[^<>\s]{0,40}(?:think|tool|func|call|invoke|\||｜)[^<>]{0,60}>")
"""Markup written in several tokens. What is one token of its own and looks like markup (a special
token) is found by its id, whatever family it is of."""
_ONE_TOKEN = re.compile(
    r"\s*(?:<(?=[^<>]*(?:think|tool|func|call|invoke|[|｜_:]))[^<>]+>|\[/?[A-Z][A-Z_]+\])\s*"
)
_TAIL = 104  # characters that markup, half written, may take
_OPEN, _CLOSE = "<think>", "</think>"


class Text:
    """Ids to text piece by piece, never a part of a character.

    Each step decodes from the last boundary but one, because some tokenizers write a token
    differently at the beginning of a text.
    """

    def __init__(self, decode: Callable[[Array], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # ids whose text is out
        self._from = 0  # where decoding begins, so that `_shown` has something before it

    def add(self, ids: Sequence[int], *, flush: bool = False) -> str:
        """The text that is complete now; with `flush`, broken characters too."""
        self._ids += ids
        if len(self._ids) == self._shown:
            return ""
        before = self._decode(np.array(self._ids[self._from : self._shown], np.int32))
        now = self._decode(np.array(self._ids[self._from :], np.int32))
        if not now.startswith(before) or len(now) == len(before):
            return ""
        if now.endswith(_BROKEN) and not flush:
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        return now[len(before) :]


class Unfolding:
    """One completion, from its tokens as they are decoded to `Delta`s, in order: reasoning, then
    content."""

    def __init__(self, tito: Tito, *, tools: Sequence[Tool], stop_ids: Sequence[int]) -> None:
        self._tito, self._tools = tito, tools
        self._stop = {*stop_ids, *tito.stop_ids}
        self._text = Text(tito.decode)
        self._ids: list[int] = []
        self._raw = ""
        self._marks: list[tuple[int, int]] = []  # markup in `_raw`, [start, stop), in order
        self._passed = 0  # marks dealt with
        self._searched = 0  # where in `_raw` the next tag may begin
        self._phase = "opening"
        # opening: nothing was said yet; thought: reasoning was opened; answer: it was closed;
        # reasoning, content: text of that kind is coming; silent: reasoning that the handler only
        # knows by its end; held: nothing is certain before the end
        self._start = 0  # of the phase's text in `_raw`
        self._markup: dict[int, bool] = {}
        self.sent = {"reasoning": "", "content": ""}
        """What was given out, by kind."""

    def feed(self, ids: Array) -> list[Delta]:
        """Text that more tokens make certain."""
        self._take([int(token) for token in ids])
        out: list[Delta] = []
        while self._phase != "held" and self._step(out):
            pass
        return out

    def finish(self, message: Message) -> list[Delta]:
        """What is left of the message as it was stored.

        Raises `SampleError` when a client was given something else before."""
        out: list[Delta] = []
        for kind, name in (("reasoning", "reasoning_content"), ("content", "content")):
            sent, text = self.sent[kind], str(message.get(name) or "")
            if not text.startswith(sent):
                raise SampleError(
                    f"stream: {kind} was given out as {sent[-40:]!r}, and the finished message has "
                    f"{text[max(0, len(sent) - 40) : len(sent)]!r} there"
                )
            self._give(out, kind, text[len(sent) :])
        return out

    # ---- tokens to text and marks

    def _take(self, ids: Sequence[int]) -> None:
        self._ids += ids
        run: list[int] = []
        for token in ids:
            if token not in self._stop and not self._is_markup(token):
                run.append(token)
                continue
            self._raw += self._text.add(run, flush=True)
            self._find_tags()
            run, begin = [], len(self._raw)
            self._raw += self._text.add([token], flush=True)
            self._marks.append((begin, len(self._raw)))
            self._searched = len(self._raw)
        self._raw += self._text.add(run)
        self._find_tags()

    def _is_markup(self, token: int) -> bool:
        if token not in self._markup:
            text = self._tito.decode(np.array([token], np.int32))
            self._markup[token] = _ONE_TOKEN.fullmatch(text) is not None
        return self._markup[token]

    def _find_tags(self) -> None:
        for found in _TAG.finditer(self._raw, self._searched):
            self._marks.append(found.span())
            self._searched = found.end()
        self._searched = max(self._searched, len(self._raw) - _TAIL)

    def _limit(self) -> int:
        """Where text that is surely no markup ends."""
        if self._passed < len(self._marks):
            return self._marks[self._passed][0]
        at = max(self._marks[-1][1] if self._marks else 0, len(self._raw) - _TAIL)
        while (at := self._raw.find("<", at)) >= 0:
            if ">" not in self._raw[at:] and not self._raw[at + 1 : at + 2].isspace():
                return at
            at += 1
        return len(self._raw)

    # ---- text to deltas

    def _step(self, out: list[Delta]) -> bool:
        """Give out what the phase allows; True when the phase has changed."""
        limit = self._limit()
        mark = self._marks[self._passed] if self._passed < len(self._marks) else None
        if self._phase in ("opening", "thought", "answer"):
            if self._raw[self._start : limit].strip():
                self._open(limit)
                return True
            return mark is not None and self._cross(mark)
        if self._phase != "silent":
            text = self._raw[self._start : limit].rstrip()
            self._give(out, self._phase, text[len(self.sent[self._phase]) :])
        if mark is None:
            return False
        if self._phase == "content" or not self._closes(mark):
            self._phase = "held"
        else:
            self._close(out, mark)
        return True

    def _closes(self, mark: tuple[int, int]) -> bool:
        return _CLOSE in self._raw[mark[0] : mark[1]]

    def _cross(self, mark: tuple[int, int]) -> bool:
        """Markup before any text of a phase that waits for some."""
        opens = _OPEN in self._raw[mark[0] : mark[1]]
        if opens and self._phase == "opening":
            self._phase = "thought"
        elif self._closes(mark) and self._phase != "answer":
            self._phase = "answer"  # no reasoning at all
        else:
            self._phase = "held"
        self._passed += 1
        self._start = mark[1]
        return True

    def _open(self, limit: int) -> None:
        """The first letter of a phase that waited for it: what is it?"""
        message = self._parsed()
        reasoning, content = (str(message.get(k) or "") for k in ("reasoning_content", "content"))
        if self._phase == "thought" or (
            self._phase == "opening" and (reasoning.strip() or self._may_be_reasoning(limit))
        ):
            known = reasoning.strip() and not content.strip()
            self._place("reasoning", reasoning, limit) if known else self._wait()
        elif self._raw[self._start : limit].lstrip()[0] in "{[":
            self._phase = "held"  # some families call tools in bare JSON
        else:
            self._place("content", content, limit)

    def _wait(self) -> None:
        self._phase = "silent"

    def _may_be_reasoning(self, limit: int) -> bool:
        """Whether closing reasoning now would show that the prompt had opened it."""
        close = self._tito.encode(_CLOSE).tolist()
        content = str(self._parsed(close).get("content") or "")
        return not content.lstrip().startswith(self._raw[self._start : limit].strip())

    def _place(self, kind: str, parsed: str, limit: int) -> None:
        """Find where in the raw text the parsed text begins, so that white space agrees."""
        seen = self._raw[self._start : limit]
        lead = len(parsed) - len(parsed.lstrip())
        start = limit - len(seen.lstrip()) - lead
        good = start >= self._start and parsed.startswith(self._raw[start:limit].rstrip())
        self._phase, self._start = (kind, start) if good else ("held", self._start)

    def _close(self, out: list[Delta], mark: tuple[int, int]) -> None:
        """Reasoning has ended: give out the rest of it, and go on with the answer."""
        reasoning, sent = str(self._parsed().get("reasoning_content") or ""), self.sent["reasoning"]
        if not reasoning.startswith(sent) or not reasoning:
            self._phase = "held"
            return
        self._give(out, "reasoning", reasoning[len(sent) :])
        self._passed += 1
        self._phase, self._start = "answer", mark[1]

    def _give(self, out: list[Delta], kind: str, text: str) -> None:
        if text:
            self.sent[kind] += text
            out.append(Delta(kind, text))  # type: ignore[arg-type]

    def _parsed(self, more: Sequence[int] = ()) -> Message:
        ids = [token for token in self._ids if token not in self._stop]
        try:
            return self._tito.parse(np.array([*ids, *more], np.int32), tools=self._tools)
        except MilesError:  # half a completion that the handler cannot read: nothing is certain
            return {}
