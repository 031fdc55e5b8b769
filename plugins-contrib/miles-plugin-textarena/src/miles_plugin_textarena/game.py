"""One game of TextArena, seen from one seat: what that seat is told, what it says, what it earned.

The other seats are played here too. It knows nothing of tasks, tokens or the configuration.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from miles import EpisodeError

Opponent = Literal["random", "first"]
FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What a game's own code may raise over a move that its author did not think of."""
_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")


class Game:
    """A game in progress. The same seed and the same moves give the same game.

    TextArena draws from Python's and numpy's global generators, so each game brings its own state
    of them along: games that are played in turns do not touch each other's luck.
    """

    def __init__(
        self,
        made: Any,
        *,
        players: int,
        seat: int,
        seed: int,
        opponent: Opponent,
        moves: Sequence[str],
    ) -> None:
        """`made` is a raw game, without TextArena's wrappers. Starts it, and plays on until it is
        our turn."""
        self._made, self._seat = made, seat
        self._opponent, self._moves = opponent, tuple(moves)
        self._luck = random.Random(seed)  # the opponents' own
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()
        self.done = False
        self.moved = 0
        with self._dice():
            made.reset(num_players=players, seed=seed % 2**32)
            self._others()

    @property
    def rewards(self) -> dict[int, float] | None:
        """What each seat earned; None while the game goes on."""
        return self._made.state.rewards if self.done else None

    @property
    def broke_rules(self) -> bool:
        """Our seat lost by a move that the game does not allow."""
        return bool(self._info(self._seat).get("invalid_move"))

    def heard(self) -> str:
        """What our seat was told since the last call, without its own moves."""
        from textarena import GAME_ID, ObservationType

        state = self._made.state
        told = state.observations[self._seat]
        state.observations[self._seat] = []
        lines = []
        for sender, text, kind in told:
            if sender == self._seat and kind is ObservationType.PLAYER_ACTION:
                continue
            name = state.role_mapping.get(sender, f"Player {sender}")
            lines.append(text if sender == GAME_ID else f"[{name}] {text}")
        return "\n".join(lines).strip()

    def say(self, action: str) -> None:
        """Make our move, then let the others move until it is our turn or the game is over.

        Raises `EpisodeError` when the game's code fails over it, or an opponent breaks the
        rules."""
        self.moved += 1
        with self._dice():
            self._step(action)
            self._others()

    def _others(self) -> None:
        while not self.done and self._made.state.current_player_id != self._seat:
            player, told = self._made.get_observation()
            action = self._choose([text for _, text, _ in told])
            self._step(action)
            if self.done and self._info(player).get("invalid_move"):
                raise EpisodeError(
                    f"environment textarena: the opponent in seat {player} lost by its move "
                    f"{action!r}, which the game does not allow; list what it may say in "
                    "environment.moves"
                )

    def _choose(self, told: Sequence[str]) -> str:
        """A listed move, or one that stands in brackets in the latest message that has any."""
        choices: Sequence[str] = self._moves
        for text in reversed(told if not choices else ()):
            if choices := list(dict.fromkeys(_BRACKETED.findall(text))):
                break
        if not choices:
            raise EpisodeError(
                "environment textarena: the opponent was offered no move in brackets; list what it "
                "may say in environment.moves"
            )
        return choices[0] if self._opponent == "first" else self._luck.choice(choices)

    def _step(self, action: str) -> None:
        try:
            self.done, _ = self._made.step(action=action)
        except FAULTS as error:
            raise EpisodeError(
                f"environment textarena: {self._made.env_id} failed over the move {action[:80]!r}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _info(self, player: int) -> dict[str, Any]:
        found: dict[str, Any] = self._made.state.game_info.get(player, {})
        return found

    @contextmanager
    def _dice(self) -> Iterator[None]:
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])
