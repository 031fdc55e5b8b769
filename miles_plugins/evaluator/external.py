"""The `external` evaluator: hands a checkpoint directory to a command and reads scores back.

What the command does with it (other machines, other engines, another harness) is its own affair;
which tasks, how many attempts and how they are counted stays as with the other evaluators.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from miles import Attempt, ConfigError, Context, Score, Skipped
from miles_plugins.evaluator.sets import Keys, Plan, Playing, summary

__all__ = ["External"]

_log = logging.getLogger(__name__)
_PLACES = ("checkpoint", "version", "sets", "scores")
_EXAMPLE = """\
import json, sys
sets, scores = sys.argv[1:]
asked = json.load(open(sets))
each = {s["name"]: {"rewards": [[0.25] * s["samples"] for _ in s["tasks"]]} for s in asked["sets"]}
json.dump({"version": asked["version"], "sets": each}, open(scores, "w"))
"""


class External(Playing):
    """A command of yours scores a checkpoint directory, anywhere; training goes on meanwhile.

    In `command`, `{checkpoint}` stands for the directory (`model/` is a Hugging Face directory),
    `{version}` for its number, `{sets}` for a JSON file that says what to play (sets with tasks,
    seeds, samples, sampling), and `{scores}` for the JSON file to write:
    `{"version": N, "sets": {NAME: {"rewards": [[...], ...]}}}`, for each task in order the rewards
    of its attempts, null for one that failed; `"metrics": {...}` adds numbers. `score`, `samples`
    and `metrics` stand for rewards that the command has counted itself, as `miles eval {checkpoint}
    --scores {scores}` writes them, and `{NAME: {"skipped": "why"}}` for a set that it could not
    play. It runs without a shell;
    what it prints is in `logs/evaluator.log`; it and its children are ended with the run.
    """

    place: ClassVar[Literal["rollout", "apart", "directory"]] = "directory"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(Keys):
        """The command, and which sets it plays."""

        command: str
        """What to run, with `{checkpoint}`, `{version}`, `{sets}` and `{scores}` in it."""
        snapshots: int = 2
        """Snapshots that may exist at once: one being scored, the others waiting. Each is deleted
        when its score is in."""
        overflow: Literal["wait", "skip"] = "skip"
        """When a version is due and all snapshots are taken: training waits, or that version is
        skipped."""

    @staticmethod
    def example_config(directory: Path) -> Mapping[str, Any]:
        """A command that gives every attempt 0.25."""
        script = directory / "evaluate.py"
        script.write_text(_EXAMPLE, encoding="utf-8")
        python, file = shlex.quote(sys.executable), shlex.quote(str(script))
        return {"command": f"{python} {file} {{sets}} {{scores}}"}

    def __init__(self, config: Config, context: Context) -> None:
        super().__init__(config, context)
        if config.snapshots < 1:
            raise ConfigError(f"evaluator external: snapshots: {config.snapshots} is below 1")
        self._words = _split(config.command)
        self.snapshots = config.snapshots
        self.overflow = config.overflow
        self._directory = context.directory

    async def evaluate(self, version: int, attempt: Attempt) -> Sequence[Score | Skipped]:
        """One result a set, as the command says; a `Skipped` each when it fails, takes longer than
        `timeout_s`, or answers for another version."""
        clock = asyncio.get_running_loop().time
        began = clock()
        checkpoint = getattr(attempt, "directory", None) or self._directory
        try:
            answer = await self._ask(Path(checkpoint), version)
        except TimeoutError:
            return self._skip_all(f"timeout: the command was not done after {self.timeout_s:g} s")
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            _log.warning("evaluator external, version %d: %s", version, error)
            return self._skip_all(str(error))
        if answer.get("version") != version:
            said = answer.get("version")
            return self._skip_all(f"the command answers for version {said!r}, not {version}")
        sets = answer.get("sets")
        if not isinstance(sets, Mapping):
            return self._skip_all(f"the command's answer has no `sets`, only {sorted(answer)}")
        seconds = clock() - began
        return [self._read(plan, version, sets.get(plan.name), seconds) for plan in self.plans]

    def _skip_all(self, why: str) -> list[Score | Skipped]:
        return [Skipped(set=plan.name, reason=why) for plan in self.plans]

    async def _ask(self, checkpoint: Path, version: int) -> Mapping[str, Any]:
        """What the command wrote. Raises `TimeoutError`, and `RuntimeError` or `ValueError` with
        what went wrong."""
        with tempfile.TemporaryDirectory(prefix="miles-evaluate-") as folder:
            sets, scores = Path(folder) / "sets.json", Path(folder) / "scores.json"
            asked = await asyncio.to_thread(self._asked, checkpoint, version)
            sets.write_bytes(asked)
            values = dict(zip(_PLACES, map(str, (checkpoint, version, sets, scores)), strict=True))
            code = await self._run([word.format(**values) for word in self._words])
            log = self._directory / "logs" / "evaluator.log"
            if code:
                raise RuntimeError(f"the command ended with exit code {code}; see {log}")
            if not scores.is_file():
                raise RuntimeError(f"the command wrote no {{scores}} file; see {log}")
            try:
                answer = json.loads(scores.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"the command's {{scores}} file is not JSON: {error}") from None
        if not isinstance(answer, dict):
            raise ValueError(f"the command's answer is a {type(answer).__name__}, not an object")
        return answer

    def _asked(self, checkpoint: Path, version: int) -> bytes:
        sets = []
        for plan in self.plans:
            tasks = self.tasks(plan)
            sets.append(
                {
                    "name": plan.name,
                    "environment": dict(plan.environment) or None,
                    "split": plan.split,
                    "samples": plan.samples,
                    "sampling": plan.sampling,
                    "tasks": tasks,
                    "seeds": [self.task_seed(plan, i) for i in range(len(tasks))],
                }
            )
        asked = {"checkpoint": str(checkpoint), "version": version, "sets": sets}
        return msgspec.json.encode(asked, enc_hook=str)

    async def _run(self, words: Sequence[str]) -> int:
        """The command's exit code; it is killed with its children when this is left early, and when
        this process is gone."""
        logs = self._directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        says, told = os.pipe()
        leash = [sys.executable, "-P", "-m", "miles_plugins.evaluator.leash", str(told), *words]
        try:
            with (logs / "evaluator.log").open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *leash,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(told,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(says)
            raise
        finally:
            os.close(told)
        try:
            async with asyncio.timeout(self.timeout_s):
                await process.wait()
            return int(os.read(says, 32) or b"-9")
        finally:
            os.close(says)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _taken(
        self, plan: Plan, version: int, said: Mapping[str, Any], seconds: float
    ) -> Score | Skipped:
        """A score that the command has counted itself."""
        attempts = said.get("samples")
        if not isinstance(attempts, int) or attempts < 1:
            why = f"the command's `samples` is {attempts!r}, not a number of attempts"
            return Skipped(set=plan.name, reason=why)
        return Score(
            set=plan.name,
            version=version,
            score=float(said["score"]),
            samples=attempts,
            metrics={**_numbers(said.get("metrics")), "seconds": seconds},
        )

    def _read(self, plan: Plan, version: int, said: Any, seconds: float) -> Score | Skipped:
        def skip(why: str) -> Skipped:
            return Skipped(set=plan.name, reason=why)

        if not isinstance(said, Mapping):
            return skip("the command's answer says nothing of this set")
        if "skipped" in said:
            return skip(f"the command: {said['skipped']}")
        if _finite(said.get("score")) and "rewards" not in said:
            return self._taken(plan, version, said, seconds)
        tasks, rewards = len(self.tasks(plan)), said.get("rewards")
        if not isinstance(rewards, list) or not all(isinstance(each, list) for each in rewards):
            return skip("the command's `rewards` is not a list of lists")
        if len(rewards) != tasks or any(len(each) != plan.samples for each in rewards):
            sizes = sorted({len(each) for each in rewards})
            return skip(
                f"the command's `rewards` are of {len(rewards)} tasks with {sizes} attempts; asked "
                f"were {tasks} with {plan.samples}"
            )
        if not tasks:
            return skip("the environment has no such tasks")
        good = [[float(r) for r in each if _finite(r)] for each in rewards]
        flat = [r for each in good for r in each]
        attempts = tasks * plan.samples
        failed = attempts - len(flat)
        if failed > self.config.max_failures * attempts or not flat:
            return skip(f"{failed} of {attempts} attempts failed")
        scored = [each for each in good if each]
        metrics = {
            **summary(scored, plan, passing=self.config.passing, seed=self.seed),
            **_numbers(said.get("metrics")),
            "failures": float(failed),
            "seconds": seconds,
        }
        return Score(
            set=plan.name,
            version=version,
            score=float(np.mean(flat)),
            samples=len(flat),
            metrics=metrics,
        )


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
        for word in words:
            word.format(**dict.fromkeys(_PLACES, ""))
    except (ValueError, KeyError, IndexError) as error:
        known = ", ".join(f"{{{name}}}" for name in _PLACES)
        raise ConfigError(
            f"evaluator external: command: {command!r} cannot be read ({error}); it may hold "
            f"{known}, and a brace is written twice"
        ) from None
    if not words:
        raise ConfigError(
            "evaluator external: command is empty; it is what scores a checkpoint, such as "
            "'miles eval {checkpoint} --scores {scores}'"
        )
    if not any("{scores}" in word for word in words):
        raise ConfigError(
            f"evaluator external: command: {command!r} has no {{scores}}, the file it writes"
        )
    return words


def _numbers(said: Any) -> dict[str, float]:
    found = said.items() if isinstance(said, Mapping) else ()
    return {str(name): float(value) for name, value in found if _finite(value)}


def _finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)
