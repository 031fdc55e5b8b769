"""Sort the letters of a word: tasks, episodes of one or several tries, and what they are worth.

Deals in text alone: tokens, engines and weights are the loop's business. Imports nothing heavy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from miles import ConfigError, Context, Message, Reply, Split, Step, Task, derive_seed


class SortLetters:
    """A word of random letters, such as `dbca>`; the answer is its letters in order, `abcd`.

    The reward is the share of letters in their place, times `discount` for every further try. With
    one try the prompt is text to continue; with more it is a user's message, and a wrong answer is
    answered with the word again.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which words, and how often the model may try."""

        length: int = 4
        """Letters of a word: the difficulty."""
        letters: str = ascii_lowercase[:8]
        """Letters that words are made of."""
        tries: int = 1
        """Answers that one episode may take; more than one makes the prompts chat messages."""
        discount: float = 0.5
        """What a right answer loses with every further try: the second is worth this much."""
        train: int = 1024
        """Training words."""
        heldout: int = 128
        """Held-out words, none of them among the training words."""

    def __init__(self, config: Config, context: Context) -> None:
        _check(config)
        self.config = config
        count = config.train + config.heldout
        self._words = _words(config, count, derive_seed(context.seed, "sort_letters"))

    def tasks(self, split: Split) -> Sequence[Task]:
        """The same words in the same order every time."""
        train = self.config.train
        words = self._words[:train] if split == "train" else self._words[train:]
        return [self._task(word) for word in words]

    def _task(self, word: str) -> Task:
        answer = "".join(sorted(word))
        chat = ({"role": "user", "content": f"{word}>"},)
        return Task(
            id=f"sort:{word}",
            prompt=f"{word}>" if self.config.tries == 1 else chat,
            answer=answer,
            solution=answer,
        )

    def episode(self, task: Task, seed: int) -> Sorting:
        """One attempt; nothing about it is random, so the seed is not needed."""
        return Sorting(task, tries=self.config.tries, discount=self.config.discount)


class Sorting:
    """One attempt at one word, single-use: the loop calls reset, step after every answer,
    reward."""

    def __init__(self, task: Task, *, tries: int, discount: float) -> None:
        self._task, self._tries, self._discount = task, tries, discount
        self._said: list[str] = []

    async def reset(self) -> str | Sequence[Message]:
        """The word."""
        return self._task.prompt

    async def step(self, reply: Reply) -> Step:
        """Done when the answer is right or no try is left; otherwise the word again."""
        self._said.append(reply.text)
        right = score(self._task.answer, reply.text) == 1
        if right or len(self._said) >= self._tries:
            return Step()
        return Step(messages=tuple(self._task.prompt), done=False)  # type: ignore[arg-type]

    async def reward(self) -> tuple[float, Mapping[str, float]]:
        """The last answer's score, discounted, and two numbers to log under `env/`."""
        last = score(self._task.answer, self._said[-1]) if self._said else 0.0
        worth = last * self._discount ** max(0, len(self._said) - 1)
        return worth, {"tries": float(len(self._said)), "exact": float(last == 1)}


def score(answer: str, text: str) -> float:
    """Share of letters in their place; letters too many count as wrong."""
    right = sum(a == b for a, b in zip(answer, text, strict=False))
    return right / max(len(answer), len(text))


def _check(config: SortLetters.Config) -> None:
    where = "environment sort_letters"
    if config.length < 1 or config.tries < 1 or min(config.train, config.heldout) < 0:
        raise ConfigError(f"{where}: length and tries begin at 1, train and heldout at 0")
    if not 0 <= config.discount <= 1:
        raise ConfigError(f"{where}: discount is {config.discount}; 0 to 1 is wanted")
    distinct = len(set(config.letters))
    there, wanted = distinct**config.length, config.train + config.heldout
    if not distinct or there < 2 * wanted:
        raise ConfigError(
            f"{where}: {distinct} letters make {there} words of length {config.length}, too few to "
            f"draw {wanted} from; raise environment.length or lower environment.train"
        )


def _words(config: SortLetters.Config, count: int, seed: int) -> list[str]:
    """Distinct words of random letters; there are at least twice as many, so drawing ends soon."""
    draw = random.Random(seed)
    letters = sorted(set(config.letters))
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(draw.choices(letters, k=config.length))] = None
    return list(found)
