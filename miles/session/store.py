"""Many sessions: opened, found, closed, expired, and brought back after a restart.

It speaks no HTTP and asks no engine; what one session does is `miles.session.tree`'s business.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from miles.errors import SessionClosed, SessionConflict, SessionFull
from miles.protocols import Tito
from miles.session.journal import Journal
from miles.session.tree import Session
from miles.session.turns import Counters
from miles.settings import SessionKeys

__all__ = ["Sessions"]

_log = logging.getLogger(__name__)
_RULES = SessionKeys()
_GONE = 1024  # sessions that have ended, of which it is still known what stayed with them


class Sessions:
    """The open sessions of one process.

    Whoever serves them calls `expire` now and then. A session that expired fails: who still holds
    it gets `SessionClosed` from `trajectory`, a `RolloutError`.
    """

    def __init__(
        self,
        tito: Tito,
        *,
        rules: SessionKeys = _RULES,
        max_tokens: int | None = None,
        directory: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_tokens` is the model's context. With a directory (and `rules.journal`), sessions are
        written there, and those found there are open again. Raises `JournalError`."""
        self.rules = rules
        self._tito = tito
        self._max_tokens = max_tokens
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._used: dict[str, float] = {}
        self._gone: dict[str, Mapping[str, Any]] = {}
        self._past = Counters()  # of sessions no longer here
        self._expired = 0
        self._journal: Journal | None = None
        if directory is not None and rules.journal:
            self._journal = Journal(directory)
            for session in self._journal.replay(self._build):
                self._take(session)
            if self._open:
                _log.info("journal %s: %d sessions go on", directory, len(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def __contains__(self, id: str) -> bool:
        return id in self._open

    def open(self, *, id: str | None = None, data: Mapping[str, Any] | None = None) -> Session:
        """A new session; without an id it gets a random one. `data` are plain JSON values that stay
        with it over a restart.

        Raises `SessionConflict` for an id that is open, `SessionFull` (429) when there are
        `session.max_sessions` and none is idle for too long, `JournalError`.
        """
        id = uuid.uuid4().hex if id is None else id
        if id in self._open:
            raise SessionConflict(f"session {id}: it is open already; take another id")
        if len(self._open) >= self.rules.max_sessions:
            self.expire()
        if len(self._open) >= self.rules.max_sessions:
            raise SessionFull(
                f"sessions: {len(self._open)} are open; session.max_sessions is "
                f"{self.rules.max_sessions}: close some"
            )
        session = self._build(id, data or {})
        if self._journal is not None:
            self._journal.opened(session)
        self._take(session)
        return session

    def get(self, id: str) -> Session:
        """An open session, whose idle time begins again. Raises `SessionClosed` (404)."""
        session = self.peek(id)
        self._used[id] = self._clock()
        return session

    def peek(self, id: str) -> Session:
        """An open session, as idle as before. Raises `SessionClosed` (404)."""
        if (session := self._open.get(id)) is None:
            raise SessionClosed(
                f"session {id!r}: there is none: never opened, closed, or expired after "
                f"{self.rules.idle_s:g} s without a request"
            )
        return session

    def gone(self, id: str) -> Mapping[str, Any]:
        """The data of a session that was closed or expired here, one of the last 1,024; empty for
        any other id."""
        return self._gone.get(id, {})

    def close(self, id: str) -> Session:
        """End a session; who holds it can still ask for its trajectory. Raises `SessionClosed`."""
        session = self.get(id)
        self._drop(session)
        session.close("it was closed")
        return session

    def expire(self, now: float | None = None) -> list[str]:
        """End sessions without a request for `session.idle_s`; which ones. One that is being
        answered is not idle. `now` is by the clock the store was given."""
        now = self._clock() if now is None else now
        gone = []
        for id, session in list(self._open.items()):
            if session.pending:
                self._used[id] = now
            elif now - (used := self._used[id]) >= self.rules.idle_s:
                self._drop(session)
                why = f"it expired after {now - used:.0f} s without a request"
                gone.append(id)
                _log.warning("session %s: expired: %d turns are lost", id, session.turns)
                session.close(why, failure=SessionClosed(f"session {id}: {why}"))
        self._expired += len(gone)
        return gone

    def metrics(self) -> dict[str, float]:
        """Counts since the start under `session/<name>`, `session/token_mismatches` among them;
        how many are open, expired, and the bytes of their arrays."""
        total = Counters()
        total.add(self._past)
        for session in self._open.values():
            total.add(session.counters)
        return {
            **{f"session/{name}": float(count) for name, count in total.plain().items()},
            "session/open": float(len(self._open)),
            "session/expired": float(self._expired),
            "session/bytes": float(sum(s.nbytes for s in self._open.values())),
        }

    def stop(self) -> None:
        """Let go of the journal, from which another process may go on; safe to call twice."""
        if self._journal is not None:
            self._journal.close()

    def _build(self, id: str, data: Mapping[str, Any]) -> Session:
        return Session(id, self._tito, rules=self.rules, max_tokens=self._max_tokens, data=data)

    def _take(self, session: Session) -> None:
        session.recorder = self._journal
        self._open[session.id] = session
        self._used[session.id] = self._clock()

    def _drop(self, session: Session) -> None:
        del self._open[session.id], self._used[session.id]
        self._past.add(session.counters)
        self._gone.pop(session.id, None)
        self._gone[session.id] = session.data
        if len(self._gone) > _GONE:
            del self._gone[next(iter(self._gone))]
        session.recorder = None
        if self._journal is not None:
            self._journal.forget(session.id)
