"""Requests that are asked in the same moment go to the server as one, and each is answered when it
ends.

A server spends more on a question over HTTP than on the request in it. It samples each by itself,
under its own id: what is said of them, and what becomes of one that is cut or given up, is
`asking`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from miles import EngineError
from miles_plugins.engine.sglang import wording
from miles_plugins.engine.sglang.http import Http
from miles_plugins.engine.sglang.streamed import Streamed

__all__ = ["Shared", "Together"]

_BUSY, _GATHER_S = 16, 0.002
"""While so many are under way, a question waits so long for others to go with it."""
_OWN = ("rid", "input_ids", "sampling_params")
"""What each has for itself; the rest must be the same for all that go together."""
_ONCE = 1 << 20  # tokens between two parts of its stream: the first says one token, the last all


class Shared(EngineError):
    """Requests that were asked together got an error as their answer, or none that names them:
    asked alone, each has its own."""


class _Asked:
    """One request under way."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.said = Streamed()
        self.reply: asyncio.Future[Mapping[str, Any] | None]
        """None: nobody else asks, and it goes alone."""
        self.reply = asyncio.get_running_loop().create_future()

    @wording.typed
    def heard(self, part: Mapping[str, Any]) -> None:
        """The next part of its reply. Raises `EngineError`."""
        self.said.add(part)
        if part["meta_info"].get("finish_reason") and not self.reply.done():
            self.reply.set_result(self.said.whole())


class Together:
    """Questions to one server."""

    def __init__(self, http: Http, *, most: int, limit: float) -> None:
        """At most so many go together; `limit` is how many seconds a reply may take."""
        self._http = http
        self._most = most
        self._limit = limit
        self._under_way = 0
        self._waiting: dict[Any, list[_Asked]] = {}  # by what is the same for all
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, body: Mapping[str, Any], *, alone: bool = False) -> Any:
        """The reply to a body of `/generate` that is no stream. Raises `EngineError`; `Shared` when
        it was asked with others and has to be asked again, with another id and `alone`."""
        if alone or self._most < 2:
            return await self._http.ask("POST", "/generate", body, limit=self._limit)
        same = tuple((name, body[name]) for name in sorted(body) if name not in _OWN)
        asked = _Asked(body)
        if not self._waiting:  # what is ready to run by now comes before that in any case
            wait = _GATHER_S if self._under_way >= _BUSY else 0.0
            asyncio.get_running_loop().call_later(wait, self._send)
        self._waiting.setdefault(same, []).append(asked)
        self._under_way += 1
        try:
            if (reply := await asked.reply) is None:
                return await self._http.ask("POST", "/generate", body, limit=self._limit)
            return reply
        finally:
            self._under_way -= 1

    def end_unsent(self, rids: Collection[str] | None = None) -> set[str]:
        """End requests of these ids (None: all) that have not gone to the server, where an abort
        would come before them; which they were."""
        ended = set()
        for one in (one for each in self._waiting.values() for one in each):
            rid = one.body["rid"]
            if not one.reply.done() and (rids is None or rid in rids):
                one.reply.set_result(wording.unbegun(rid))
                ended.add(rid)
        return ended

    async def ended(self, limit: float) -> None:
        """Wait until the server has closed every question whose requests all ended, at most `limit`
        seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            same = [one for one in each if not one.reply.done()]
            for start in range(0, len(same), self._most):
                some = same[start : start + self._most]
                if len(some) == 1:
                    some[0].reply.set_result(None)
                    continue
                task = asyncio.create_task(self._all(some))
                self._tasks.add(task)
                task.add_done_callback(partial(self._over, some))
                for one in some:
                    one.reply.add_done_callback(partial(_leave, some, task))

    def _over(self, some: list[_Asked], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        for one in some:
            if one.reply.done():
                continue
            if task.cancelled() or (fault := task.exception()) is None:
                one.reply.cancel()
            else:
                one.reply.set_exception(fault)  # no error of a server: whoever asked has to know

    async def _all(self, some: list[_Asked]) -> None:
        by_id = {one.body["rid"]: one for one in some}
        body = {**some[0].body, "stream": True}
        body |= {name: [one.body[name] for one in some] for name in _OWN}
        body["sampling_params"] = [{**p, "stream_interval": _ONCE} for p in body["sampling_params"]]
        try:
            parts = self._http.parts("/generate", body, limit=self._limit)
            async with aclosing(parts):
                async for part in parts:
                    one = _whose(by_id, part)
                    try:
                        one.heard(part)
                    except EngineError as error:  # the others are well
                        _fail(one, error)
            if not all(one.reply.done() for one in some):
                raise Shared("engine sglang: of requests asked together, some had no answer")
        except (wording.Answered, Shared) as error:
            for one in some:
                _fail(one, Shared(f"{error} (asked together with others)"))
        except EngineError as error:
            for one in some:
                _fail(one, type(error)(str(error)))


def _whose(by_id: Mapping[str, _Asked], part: Mapping[str, Any]) -> _Asked:
    info = part.get("meta_info")
    found = by_id.get(info.get("id", "")) if isinstance(info, Mapping) else None
    if found is None:
        raise Shared(f"engine sglang: a reply to none that was asked: {str(part)[:200]}")
    return found


def _fail(asked: _Asked, error: EngineError) -> None:
    if not asked.reply.done():
        asked.reply.set_exception(error)


def _leave(some: list[_Asked], task: asyncio.Task[None], _: asyncio.Future[Any]) -> None:
    """Stop listening when nobody waits for any of these."""
    if any(one.reply.cancelled() for one in some) and all(one.reply.done() for one in some):
        task.cancel()
