"""TextArena's games as an environment: a game is a task, a move is an assistant turn.

How a game goes is `game`'s business; nothing is read from a file or the network by this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from miles import (
    ConfigError,
    Context,
    LazyTasks,
    Message,
    Reply,
    Split,
    Step,
    Task,
    choices,
    derive_seed,
)
from miles_plugin_textarena.game import FAULTS, Game, Opponent

_WHERE = "environment textarena"


class TextArena:
    """A text game of TextArena, one assistant turn a move; games of one player by default.

    The reward is what the game gives our seat at its end, between -1 and 1 in most games. In games
    of several players an opponent plays the other seats. All attempts at a task begin with the same
    game, and the same moves lead to the same end.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which game, and who plays it."""

        game: str = "GuessTheNumber-v0"
        """TextArena's id of the game."""
        options: Mapping[str, Any] = field(default_factory=dict)
        """The game's own keys, such as its size, in place of those that its id stands for."""
        players: int = 1
        """Seats."""
        seat: int = 0
        """The model's own, from 0."""
        opponent: Opponent = "random"
        """Who plays the other seats: any of the moves that are open to it, or always the first."""
        moves: tuple[str, ...] = ()
        """What an opponent may say; empty takes what stands in brackets in the latest message."""
        tag: str = ""
        """The move stands between `<tag>` and `</tag>`; empty takes the whole text."""
        brackets: bool = True
        """Put a move without brackets into brackets, which most games ask for."""
        unfinished: float = 0.0
        """What a game is worth that did not come to its end."""
        train: int = 1000
        """Training games."""
        heldout: int = 50
        """Held-out games, of other seeds."""

    def __init__(self, config: Config, context: Context) -> None:
        _check(config)
        self.config = config
        self._seed = context.seed
        self._prompt = lru_cache(4096)(lambda seed: self._game(seed).heard())
        try:
            told = self._prompt(self._seeds("train", 0))
        except (*FAULTS, ImportError, OSError, SyntaxError) as error:
            raise ConfigError(
                f"{_WHERE}: {config.game} cannot be played by {config.players} with options "
                f"{dict(config.options)}: {type(error).__name__}: {str(error).strip()[:300]}"
            ) from error
        if not told:
            raise ConfigError(f"{_WHERE}: {config.game} tells seat {config.seat} nothing")

    def tasks(self, split: Split) -> Sequence[Task]:
        """Games of a split, each of its own seed, made as they are asked for."""
        size = self.config.heldout if split == "heldout" else self.config.train
        return LazyTasks(range(size), partial(self._task, split))

    def _task(self, split: Split, index: int) -> Task:
        seed = self._seeds(split, index)
        return Task(
            id=f"{self.config.game}-{split}-{index}",
            prompt=({"role": "user", "content": self._prompt(seed)},),
            data={"seed": seed},
        )

    def episode(self, task: Task, seed: int) -> Playing:
        """One attempt; all chance is the task's, so the seed is not needed."""
        return Playing(self._game(task.data["seed"]), self.config)

    def _seeds(self, split: Split, index: int) -> int:
        return derive_seed(self._seed, "textarena", split, index) % 2**32

    def _game(self, seed: int) -> Game:
        import textarena

        config = self.config
        made = textarena.make(f"{config.game}-raw", **config.options)
        return Game(
            made,
            players=config.players,
            seat=config.seat,
            seed=seed,
            opponent=config.opponent,
            moves=config.moves,
        )


class Playing:
    """One attempt at one game, single-use."""

    def __init__(self, game: Game, config: TextArena.Config) -> None:
        self._game, self._config = game, config
        self._tag = re.compile(f"<{re.escape(config.tag)}>(.*?)</{re.escape(config.tag)}>", re.S)

    async def reset(self) -> Sequence[Message]:
        """The rules, and what happened before our first move."""
        return ({"role": "user", "content": self._game.heard()},)

    async def step(self, reply: Reply) -> Step:
        """Make the move; tell what followed from it."""
        if self._game.done:
            return Step()
        self._game.say(self._action(reply.text))
        if self._game.done:
            return Step()
        told = self._game.heard() or "It is your turn."
        return Step(messages=({"role": "user", "content": told},), done=False)

    async def reward(self) -> tuple[float, Mapping[str, float]]:
        """Our seat's reward, whether the game came to its end, and how."""
        game, config = self._game, self._config
        rewards = game.rewards
        worth = config.unfinished if rewards is None else float(rewards.get(config.seat, 0.0))
        metrics = {
            "moves": float(game.moved),
            "finished": float(rewards is not None),
            "broke_rules": float(game.broke_rules),
        }
        if config.players > 1 and rewards is not None:
            best = max(r for seat, r in rewards.items() if seat != config.seat)
            metrics |= {"won": float(worth > best), "drawn": float(worth == best)}
        return worth, metrics

    def _action(self, text: str) -> str:
        if self._config.tag:
            found = self._tag.findall(text)
            text = found[-1] if found else ""
        text = text.strip()
        bare = self._config.brackets and "[" not in text and "]" not in text
        return f"[{text}]" if bare else text


def _check(config: TextArena.Config) -> None:
    try:
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise ConfigError(
            f"{_WHERE}: the package textarena cannot be imported ({error}); "
            "pip install miles-plugin-textarena brings it"
        ) from error

    known = {name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw")}
    if config.game not in known:
        raise ConfigError(f"{_WHERE}: no game {config.game!r}; {choices(config.game, known)}")
    if not 0 <= config.seat < config.players:
        raise ConfigError(
            f"{_WHERE}: seat is {config.seat} of {config.players} players; "
            f"0 to {config.players - 1} are there"
        )
    if config.train < 1 or config.heldout < 0:
        raise ConfigError(
            f"{_WHERE}: train is {config.train} and heldout {config.heldout}; "
            "at least 1 and at least 0 are wanted"
        )
