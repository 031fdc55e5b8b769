"""What has been seen of a run so far, as far as a person needs it on a screen.

Only bookkeeping, in constant memory; how it looks is `lines` and `panel`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

_SHARES = ("wait", "train", "publish", "overhead")
_MEMORY = 0.95  # weight of the past in running means: about the last 20 steps
_POINTS = 256  # of a course, before neighbours are merged
_END = 10  # steps at most that a stage's first and last reward are means of, as in report.html


class Course:
    """A series of any length in at most 256 points.

    When it is full, neighbours are averaged and the stride doubles.
    """

    def __init__(self) -> None:
        self.points: list[float] = []
        self._stride = 1
        self._sum = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Append one value."""
        self._sum += value
        self._count += 1
        if self._count < self._stride:
            return
        self.points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.points) == _POINTS:
            self.points = [
                (a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)
            ]
            self._stride *= 2

    def cut(self, width: int) -> list[float]:
        """At most `width` values: means of equal stretches."""
        size = len(self.points)
        if size <= width:
            return list(self.points)
        edges = [round(i * size / width) for i in range(width + 1)]
        return [sum(self.points[a:b]) / (b - a) for a, b in pairwise(edges)]


class Progress:
    """The state of a run, fed by moments."""

    def __init__(self) -> None:
        self.name = ""
        self.directory = ""
        self.stages: tuple[str, ...] = ()
        self.steps: dict[str, int] = {}
        self.stage = ""
        self.stage_steps = 0
        self.stage_step = 0
        self.step = 0
        self.metrics: dict[str, Any] = {}
        self.reward = Course()
        self._first_rewards: list[float] = []
        self._last_rewards: deque[float] = deque(maxlen=_END)
        self._rewards = 0
        self.recent: dict[str, float] = {}
        self.drops: Counter[str] = Counter()
        self.evaluations: dict[str, list[tuple[int, float | str]]] = {}
        self.warnings = 0
        self.last_warning = ""
        self.checkpoint: int | None = None
        self.outcome = ""
        self.seconds: float | None = None
        self._began = self._stage_began = self._last = time.monotonic()

    def take(self, name: str, data: Mapping[str, Any]) -> None:
        """Take one moment in; moments that change nothing on screen are ignored."""
        if (handler := getattr(self, f"_{name}", None)) is not None:
            handler(data)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run started."""
        return time.monotonic() - self._began if self.seconds is None else self.seconds

    @property
    def left_s(self) -> float | None:
        """Seconds the stage still needs at its recent pace; None before two steps."""
        pace = self.recent.get("pace")
        return None if pace is None else pace * max(0, self.stage_steps - self.stage_step)

    @property
    def reward_ends(self) -> tuple[float, float] | None:
        """Mean reward of the stage's first and of its last steps, a quarter of them but no more
        than ten; None before the first."""
        if not self._rewards:
            return None
        few = max(1, min(_END, self._rewards // 4))
        last = list(self._last_rewards)[-few:]
        return sum(self._first_rewards[:few]) / few, sum(last) / few

    @property
    def stage_done(self) -> bool:
        """Whether the last step was the stage's last."""
        return self.stage_step >= self.stage_steps > 0

    @property
    def shares(self) -> dict[str, float]:
        """Share of recent steps' time by what it went to, adding up to 1; empty when unknown."""
        known = {k: self.recent[k] for k in _SHARES if k in self.recent}
        total = sum(known.values())
        return {k: v / total for k, v in known.items()} if total > 0 else {}

    @property
    def tokens_per_s(self) -> float | None:
        """The engines' speed; where none sampled, the trainer's."""
        speed = self.recent.get("speed")
        return speed if speed else None

    def _run_started(self, data: Mapping[str, Any]) -> None:
        self.name = str(data.get("name", ""))
        self.directory = str(data.get("directory", ""))
        self.stages = tuple(data.get("stages", ()))
        self.steps = dict(data.get("steps", {}))
        self.step = int(data.get("resumed") or 0)  # no stage begins when nothing is left to do
        self._began = time.monotonic()

    def _stage_started(self, data: Mapping[str, Any]) -> None:
        self.stage = str(data["stage"])
        self.step = int(data["version"])
        self.stage_steps = int(data.get("steps", self.steps.get(self.stage, 0)))
        self.stage_step = self.step - int(data.get("first", self.step))  # a resume begins inside
        self.metrics, self.recent, self.drops = {}, {}, Counter()
        self.reward, self._rewards = Course(), 0
        self._first_rewards.clear()
        self._last_rewards.clear()
        self._stage_began = self._last = time.monotonic()

    def _step_finished(self, data: Mapping[str, Any]) -> None:
        now = time.monotonic()
        first = not self.metrics
        self.metrics = dict(data)
        self.step = int(data["step"])
        self.stage_step = int(data.get("stage_step", self.stage_step + 1))
        for key, value in data.items():
            if key.startswith("groups/dropped/") and value:
                self.drops[key.removeprefix("groups/dropped/")] += int(value)
        reward = data.get("reward/mean")
        if reward is not None and reward == reward:
            self.reward.add(reward)
            self._remember("reward", reward)
            self._rewards += 1
            self._first_rewards += [reward][: _END - len(self._first_rewards)]
            self._last_rewards.append(reward)
        for key in _SHARES:
            if (spent := data.get(f"time/{key}_s")) is not None:
                self._remember(key, spent)
        seconds = data.get("time/step_s")
        speed = data.get("engine/tokens_per_s") or 0.0
        if not speed and seconds:
            speed = data.get("tokens/trained", 0.0) / seconds
        self._remember("speed", speed)
        if not first:  # the first step pays for warming up
            self._remember("pace", now - self._last)
        self._last = now

    def _evaluated(self, data: Mapping[str, Any]) -> None:
        result = data["skipped"] if "skipped" in data else float(data["score"])
        self.evaluations.setdefault(str(data["set"]), []).append((int(data["step"]), result))

    def _checkpoint_saved(self, data: Mapping[str, Any]) -> None:
        self.checkpoint = int(data["step"])

    def _warned(self, data: Mapping[str, Any]) -> None:
        self.warnings += 1
        self.last_warning = str(data["text"])

    def _run_finished(self, data: Mapping[str, Any]) -> None:
        self.outcome = str(data["outcome"])
        self.directory = str(data.get("directory", self.directory))
        self.seconds = float(data.get("seconds", self.elapsed_s))

    def _remember(self, key: str, value: float) -> None:
        past = self.recent.get(key)
        self.recent[key] = value if past is None else _MEMORY * past + (1 - _MEMORY) * value
