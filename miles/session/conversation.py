"""The conversation that an environment is given: a session, an engine, and how to sample.

It adds nothing to what sessions do but demonstrations: what a task's solution says in each turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles.errors import EpisodeError
from miles.protocols import Engine, Reply, Tito, Tool
from miles.session.dialogue import turn, with_stop_ids
from miles.session.tree import Session
from miles.settings import SessionKeys
from miles.types import Array, Message, Sampling, Trajectory

__all__ = ["SessionConversation"]

_RULES = SessionKeys()


class SessionConversation:
    """One attempt's conversation: a first prompt, then assistant turns, each appended to the one
    before.

    A turn that raises leaves the conversation as it was: the caller may still ask for `trajectory`.
    """

    __slots__ = ("_engine", "_sampling", "_seed", "_solution", "_tito", "session")

    def __init__(
        self,
        *,
        key: str,
        tito: Tito,
        engine: Engine,
        sampling: Sampling,
        seed: int,
        solution: str | tuple[Message, ...] | None = None,
        max_len: int | None = None,
        rules: SessionKeys = _RULES,
    ) -> None:
        """`sampling` gets the handler's stop ids unless it brings its own; `solution` is what an
        engine that replays demonstrations says: a text in the first turn, or turn by turn the
        assistant messages of several; `max_len` is the model's context in tokens."""
        self.session = Session(key, tito, rules=rules, max_tokens=max_len)
        """The record."""
        self._tito = tito
        self._engine = engine
        self._sampling = with_stop_ids(sampling, tito)
        self._seed = seed
        self._solution = solution

    async def turn(self, messages: str | Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Append messages (or, first, raw text) and sample one assistant turn. Raises as
        `miles.session.dialogue.turn`, and `EpisodeError` when there is nothing to demonstrate."""
        done = await turn(
            self.session,
            messages,
            engine=self._engine,
            sampling=self._sampling,
            seed=self._seed,
            tools=tools,
            append=True,
            timeout_s=0,  # the group's own deadline is shorter, and costs nothing a turn
            demonstration=None if self._engine.samples else self._demonstration,
        )
        return Reply(
            text=done.text,
            message=done.message,
            finish=done.finish,
            tokens=done.tokens,
            demonstrated=not self._engine.samples,
        )

    def trajectory(
        self, *, reward: float, metrics: Mapping[str, float] | None = None
    ) -> Trajectory:
        """Everything so far, as the trajectory to train on. Raises as `Session.trajectory`."""
        return self.session.trajectory(reward=reward, metrics=metrics)

    def _demonstration(self, index: int) -> Array:
        """(tokens,) int32 of what the solution says in a turn."""
        solution = self._solution
        said: list[str | Message]
        if solution is None:
            said, what = [], "the task has no solution"
        elif isinstance(solution, str):
            said, what = [solution], "a solution of one text is one turn long"
        else:
            said = [m for m in solution if m.get("role") == "assistant"]
            what = f"the solution has {len(said)} assistant messages"
        if index >= len(said):
            raise EpisodeError(
                f"session {self.session.id}: nothing to demonstrate in turn {index}: {what}"
            )
        return self._tito.demonstrate(said[index])
