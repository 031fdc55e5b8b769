"""Reasoning Gym's procedural tasks: made from a seed, scored by the library's own scorers.

Scoring with a deadline is `scoring`'s; nothing is read from a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from miles import (
    ConfigError,
    Context,
    LazyTasks,
    SingleTurn,
    Split,
    Task,
    choices,
    derive_seed,
)
from miles_plugin_reasoning_gym.scoring import Scorer

_WHERE = "environment reasoning_gym"
_REDRAWS = 100  # how often a training question that is held out may be drawn again


class ReasoningGym:
    """One of Reasoning Gym's task generators, one assistant turn a task.

    The reward is the generator's own score, between 0 and 1. Training questions that are also held
    out are drawn again, so the two splits share none.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which generator, and how its tasks are put."""

        dataset: str = "chain_sum"
        """Name of the generator."""
        options: Mapping[str, Any] = field(default_factory=dict)
        """The generator's own keys, such as its difficulty."""
        system: str = ""
        """A system message, or the name of one of the library's (`default`, `simple`, `direct`,
        ...)."""
        chat: bool = True
        """The question is a user's message; off, it is text to continue as it is."""
        tag: str = "answer"
        """The answer stands between `<tag>` and `</tag>`; empty takes the whole text."""
        train: int = 2000
        """Training tasks."""
        heldout: int = 100
        """Held-out tasks."""
        timeout_s: float = 10.0
        """Seconds one scoring may take."""

    def __init__(self, config: Config, context: Context) -> None:
        _check(config)
        from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

        self.config = config
        self._extract = extract_answer
        self._system = SYSTEM_PROMPTS.get(config.system, config.system)
        self._entries = {
            "heldout": lru_cache(config.heldout)(
                _open(config, derive_seed(context.seed, "heldout")).__getitem__
            )
        }
        heldout = frozenset(self._entries["heldout"](i)["question"] for i in range(config.heldout))
        source = _open(config, derive_seed(context.seed, "train"), size=config.train * _REDRAWS)
        self._entries["train"] = lru_cache(4096)(
            partial(_apart, source, heldout, config.train, config.dataset)
        )
        self._scorer = Scorer(config.dataset, config.options, timeout_s=config.timeout_s)

    def tasks(self, split: Split) -> Sequence[Task]:
        """Tasks of a split, made as they are asked for; a task's id holds a digest of its
        question."""
        size = self.config.heldout if split == "heldout" else self.config.train
        return LazyTasks(range(size), partial(self._task, split))

    def episode(self, task: Task, seed: int) -> SingleTurn:
        """One turn, scored by the generator."""
        score = partial(self._score, task.data["split"], task.data["index"])
        return SingleTurn(task.prompt, score, environment="reasoning_gym")

    def _task(self, split: Split, index: int) -> Task:
        config, entry = self.config, self._entries[split](index)
        question, answer = entry["question"], entry["answer"]
        digest = hashlib.blake2b(question.encode("utf-8", "replace"), digest_size=4).hexdigest()
        messages = ({"role": "user", "content": question},)
        if self._system:
            messages = ({"role": "system", "content": self._system}, *messages)
        solution = None if answer is None else str(answer)
        if solution is not None and config.tag:
            solution = f"<{config.tag}>{solution}</{config.tag}>"
        return Task(
            id=f"{config.dataset}-{split}-{index}-{digest}",
            prompt=messages if config.chat else question,
            answer=None if answer is None else str(answer),
            solution=solution,
            data={"split": split, "index": index},
        )

    async def _score(
        self, split: Split, index: int, text: str
    ) -> tuple[float, Mapping[str, float]]:
        tag = self.config.tag
        answer = self._extract(text, tag_name=tag) if tag else text.strip()
        return await self._scorer(answer, self._entries[split](index))


def _check(config: ReasoningGym.Config) -> None:
    from reasoning_gym.factory import DATASETS

    known = set(DATASETS) - {"composite"}  # which needs a list of others, not plain options
    if config.dataset not in known:
        raise ConfigError(
            f"{_WHERE}: no dataset {config.dataset!r}; {choices(config.dataset, known)}"
        )
    keys = set(DATASETS[config.dataset][1].__dataclass_fields__) - {"seed", "size"}
    for key in config.options:
        if key not in keys:
            raise ConfigError(
                f"{_WHERE}: {config.dataset} has no option {key!r}; {choices(key, keys)}"
            )
    if config.train < 1 or config.heldout < 0 or config.timeout_s <= 0:
        raise ConfigError(
            f"{_WHERE}: train is {config.train}, heldout {config.heldout} and timeout_s "
            f"{config.timeout_s}; "
            "at least 1, at least 0 and above 0 are wanted"
        )


def _open(config: ReasoningGym.Config, seed: int, *, size: int | None = None) -> Any:
    """The generator. Raises `ConfigError` for option values that it refuses."""
    import reasoning_gym

    options = dict(config.options)
    try:
        return reasoning_gym.create_dataset(
            config.dataset, seed=seed % 2**32, size=size or max(1, config.heldout), **options
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{_WHERE}: {config.dataset} refuses options {options}: {error}"
        ) from error


def _apart(
    source: Any, heldout: frozenset[str], size: int, dataset: str, index: int
) -> Mapping[str, Any]:
    """The entry at an index of the training split: the first of its draws that is not held out.

    Raises `ConfigError` when nearly every question is."""
    for draw in range(index, len(source), size):
        entry: Mapping[str, Any] = source[draw]
        if entry["question"] not in heldout:
            return entry
    raise ConfigError(
        f"{_WHERE}: {dataset} has too few questions to hold out {len(heldout)}; "
        "lower environment.heldout or choose harder options"
    )
