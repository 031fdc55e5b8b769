"""Every task once an epoch, in an order given by the seed, and filters that say which groups teach
nothing.

It holds no tasks of its own and learns nothing from rewards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles import CheckpointError, ConfigError, Context, Drop, Group, Task, choices, derive_seed

Filter = Callable[[Group], Drop | None]
_PROBES = 64  # task ids that stand for the whole list in a fingerprint


class Shuffle:
    """Tasks in epochs, reshuffled by the seed, resumable at every task.

    A finished group goes through the filters of `admit` in order; the first `Drop` decides. Built
    in are `zero_variance` (all rewards of several attempts are equal, so there is nothing to
    prefer), `length` (an attempt sampled fewer than `min_length` or more than `max_length` tokens)
    and `none`; plugins add more with `miles_filters`.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How long to go on, and what to admit."""

        epochs: int = 0
        """Times through all tasks; 0 goes on for ever."""
        admit: tuple[str, ...] = ("zero_variance",)
        """Names of filters, applied in order."""
        min_length: int = 0
        """For `length`: fewest sampled tokens of an attempt."""
        max_length: int = 0
        """For `length`: most sampled tokens of an attempt; 0 is no limit."""

    def __init__(self, config: Config, context: Context) -> None:
        if config.epochs < 0:
            raise ConfigError(f"selector shuffle: epochs is {config.epochs}; 0 or more is wanted")
        if (
            config.min_length < 0
            or config.max_length < 0
            or 0 < config.max_length < config.min_length
        ):
            raise ConfigError(
                f"selector shuffle: min_length is {config.min_length} and max_length "
                f"{config.max_length}; "
                "0 <= min_length <= max_length is wanted, or max_length 0 for no limit"
            )
        self._filters = _filters(config, context.filters)
        self._tasks: Sequence[Task] = context.environment.tasks("train")
        if not len(self._tasks):
            name = type(context.environment).__name__
            raise ConfigError(
                f"selector shuffle: environment {name} has no tasks in its train split"
            )
        self._epochs = config.epochs
        self._seed = context.seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled(0)
        self._fingerprint = ""

    def next(self) -> Task | None:
        """The next task, None after the last epoch."""
        if self._position == len(self._order):
            if self._epoch + 1 == self._epochs:
                return None
            self._epoch += 1
            self._position = 0
            self._order = self._shuffled(self._epoch)
        task = self._tasks[int(self._order[self._position])]
        self._position += 1
        return task

    def admit(self, group: Group) -> Drop | None:
        """The first filter's reason to drop, None when there is none."""
        for check in self._filters:
            drop = check(group)
            if drop is not None:
                return drop
        return None

    def observe(self, group: Group) -> None:
        """Nothing: the order does not depend on results."""

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, with what tells this task list and seed from others."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "tasks": len(self._tasks),
            "fingerprint": self._mark(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there. Raises `CheckpointError` when the state was made with other tasks or
        another seed."""
        here = self.state_dict()
        for key in ("tasks", "seed", "fingerprint"):
            if state.get(key) != here[key]:
                raise CheckpointError(
                    f"selector shuffle: the checkpoint's {key} is {state.get(key)}, this run's is "
                    f"{here[key]}; "
                    "the environment's tasks or the seed have changed"
                )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> np.ndarray:
        """(tasks,) int64: a permutation. `RandomState` because numpy promises never to change its
        stream."""
        seed = derive_seed(self._seed, "shuffle", epoch)
        return np.random.RandomState(np.random.MT19937(seed)).permutation(len(self._tasks))

    def _mark(self) -> str:
        """Hex digest of evenly spaced task ids: tasks may be lazy and many, so not of all."""
        if not self._fingerprint:
            size = len(self._tasks)
            ids = (
                [self._tasks[i * size // _PROBES].id for i in range(_PROBES)]
                if size > _PROBES
                else None
            )
            text = "\x1f".join(ids if ids is not None else [task.id for task in self._tasks])
            self._fingerprint = hashlib.blake2b(
                text.encode("utf-8", "replace"), digest_size=16
            ).hexdigest()
        return self._fingerprint


def zero_variance(group: Group) -> Drop | None:
    """Drop several attempts that were all worth the same: a group-relative advantage would be 0
    everywhere."""
    attempts = group.trajectories
    if len(attempts) < 2:
        return None
    first = attempts[0].reward
    if any(attempt.reward != first for attempt in attempts):
        return None
    return Drop(reason="zero_variance", detail=f"all {len(attempts)} rewards are {first:g}")


def length_between(shortest: int, longest: int) -> Filter:
    """A filter on the sampled tokens of every attempt; `longest` 0 is no limit."""

    def length(group: Group) -> Drop | None:
        for attempt in group.trajectories:
            size = sum(int(np.count_nonzero(sample.sampled)) for sample in attempt.samples)
            if size < shortest or 0 < longest < size:
                limits = f"{shortest} to {longest}" if longest else f"at least {shortest}"
                return Drop(
                    reason="length",
                    detail=f"{attempt.id} sampled {size} tokens; {limits} are admitted",
                )
        return None

    return length


def _none(group: Group) -> Drop | None:
    return None


def _filters(config: Shuffle.Config, offered: Mapping[str, Filter]) -> tuple[Filter, ...]:
    known: dict[str, Filter] = {
        "zero_variance": zero_variance,
        "length": length_between(config.min_length, config.max_length),
        "none": _none,
    }
    taken = sorted(set(known) & set(offered))
    if taken:
        raise ConfigError(
            f"selector shuffle: a plugin claims the built-in filter {taken[0]!r}; rename it"
        )
    known.update(offered)
    for name in config.admit:
        if name not in known:
            raise ConfigError(f"selector.admit: no filter {name!r}; {choices(name, known)}")
    return tuple(known[name] for name in config.admit if name != "none")
