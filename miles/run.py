"""From a plan to an outcome: directory, processes, stages in order, signals, and a good checkpoint
at the end.

What happens inside a stage is `miles.loop`; how a stage is built is `miles.stage`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles import checkpoint, loop
from miles.assemble import build
from miles.errors import BufferStarved, ConfigError, MilesError, RunError
from miles.plugins import compare_provenance
from miles.protocols import Context
from miles.records.directory import Directory, differences, recorded
from miles.records.ledger import Ledger
from miles.records.tracking import Tracking
from miles.registry.schema import plain
from miles.settings import RunKeys
from miles.stacks import answer_with_stacks
from miles.stage import Shared, Stage
from miles.types import Group

__all__ = ["execute", "expand_resume", "log_to"]

log = logging.getLogger("miles.run")
_HANDLERS = ("miles-driver-log", "miles-people")


def expand_resume(
    overrides: Sequence[str], folders: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Overrides, and folders with more YAML, with those of the run that `resume=` names put first,
    so that a resume says only what changes; choosing a component anew leaves out what was said of
    the old one. Raises `ConfigError` when there is no such run, and `CheckpointError`."""
    resume = _path(overrides, "resume")
    if not resume:
        return list(overrides), list(folders)
    _, _, config = recorded(resume, runs=_path(overrides, "run.dir") or RunKeys().dir)
    keys = [o.partition("=")[0].lstrip("+~") for o in overrides]
    kept = [
        o
        for o in config["overrides"]
        if not any(f"{o.partition('=')[0].lstrip('+~')}.".startswith(f"{key}.") for key in keys)
    ]
    named = [str(Path(folder).expanduser().resolve()) for folder in folders]
    # a run from before folders were recorded has none
    return [*kept, *overrides], list(dict.fromkeys([*config.get("folders", ()), *named]))


def _path(overrides: Sequence[str], key: str) -> str:
    """The path that the last override of a key gives, empty when there is none."""
    found = (o.partition("=")[2] for o in reversed(overrides) if o.startswith(f"{key}="))
    return next(found, "").strip("'\"").replace("\\", "")


def execute(plan: Any, registry: Any) -> int:
    """Run every stage. 0 when finished, 130 when interrupted; raises `MilesError` when the run
    failed."""
    settings = plan.stages[0].settings
    config = {
        "overrides": [o for o in plan.overrides if not o.startswith("resume=")],
        "folders": list(plan.folders),
        "stages": {stage.name: plain(stage.resolved) for stage in plan.stages},
    }
    state: Mapping[str, Any] = {}
    chosen = None
    if settings.resume:
        root, chosen, old = recorded(settings.resume)
        if lines := differences(old, config):
            error = ConfigError(
                f"resume={settings.resume}: the configuration differs from the checkpoint's"
            )
            error.add_note("\n".join(lines))
            error.add_note(
                "to start a new run from those weights: model.init=load model.path="
                f"{chosen / 'model'}"
            )
            raise error
        state = checkpoint.read_state(chosen)
        directory = Directory.reopen(root)
    else:
        directory = Directory.create(settings, stem=plan.stages[-1].subject)
    try:
        directory.record(config, registry.provenance())
        log_to(directory.path / "logs" / "driver.log")
        return asyncio.run(_Run(plan, registry, directory.path, config).main(chosen, state))
    finally:
        directory.close()


def log_to(path: Path) -> None:
    """What the driver, its components and hooks log: from INFO to the file, warnings to people.
    Stacks that it is asked for go there too."""
    path.parent.mkdir(exist_ok=True)
    root = logging.getLogger()
    for old in [h for h in root.handlers if getattr(h, "name", None) in _HANDLERS]:
        root.removeHandler(old)  # an earlier run of this process
        old.close()
    file, people = logging.FileHandler(path), logging.StreamHandler()
    file.name, people.name = _HANDLERS
    answer_with_stacks(path.open("a"))  # not the handler's: libraries that set up logging close it
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    people.setLevel(logging.WARNING)
    people.setFormatter(logging.Formatter("%(message)s"))
    root.setLevel(logging.INFO)
    root.addHandler(file)
    root.addHandler(people)


class _Run:
    def __init__(
        self, plan: Any, registry: Any, directory: Path, config: Mapping[str, Any]
    ) -> None:
        self.plan = plan
        self.registry = registry
        self.directory = directory
        self.config = config
        self.stage: Stage | None = None
        self.interrupted = False
        self.grace: asyncio.TimerHandle | None = None  # runs from an interrupt
        self.main_task: asyncio.Task[int] | None = None

    async def main(self, chosen: Path | None, state: Mapping[str, Any]) -> int:
        """All stages; every process is stopped and every tracker closed whatever happens."""
        first = self.plan.stages[0]
        context = Context(
            directory=self.directory, seed=first.settings.seed, settings=first.settings
        )
        runtime = self.registry.build(first.specs["runtime"], context)
        trackers = {s.name: self.registry.build(s, context) for s in first.specs["tracker"] or ()}
        shared = Shared(
            directory=self.directory,
            registry=self.registry,
            runtime=runtime,
            ledger=Ledger(self.directory / "ledger.jsonl"),
            tracking=Tracking(trackers),
            config=self.config,
            version=state.get("version", 0),
            next_group=state.get("next_group", 0),
            evaluated=state.get("evaluated", -1),
        )
        self.main_task = asyncio.current_task()
        # what is imported by now stays, and attempts make many short-lived objects: a default
        # collector would walk all of it again and again (a fifth of the driver's time)
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        began, outcome, why = time.monotonic(), "failed", ""
        try:
            with self._signals():
                self._announce(shared, chosen, state)
                outcome = await self._stages(shared, chosen, state)
            return 130 if outcome == "interrupted" else 0
        except asyncio.CancelledError:
            outcome = "interrupted"
            return 130
        except BaseExceptionGroup as group:
            why = _words(error := _first(group))
            raise error from group
        except MilesError as error:
            why = _words(error)
            raise
        finally:
            await shared.end_rollouts()
            await runtime.stop()
            shared.ledger.close()
            end = {
                "outcome": outcome,
                "directory": str(self.directory),
                "seconds": time.monotonic() - began,
                **({"why": why} if why else {}),
            }
            shared.tracking.moment("run_finished", end)
            for name in shared.tracking.close():
                log.warning("tracker %s did not close in time", name)
            self._report()
            self.registry.hook.run_finished(directory=str(self.directory), outcome=outcome)

    def _announce(self, shared: Shared, chosen: Path | None, state: Mapping[str, Any]) -> None:
        if state:
            # first: a run that is killed in between must not go on from one that the ledger denies
            checkpoint.set_aside(self.directory / "checkpoints", after=state["version"])
            shared.ledger.roll_back(state["ledger_offset"])
        shared.tracking.moment(
            "run_started",
            {
                "directory": str(self.directory),
                "name": self.directory.name,
                "stages": [s.name for s in self.plan.stages],
                "steps": {s.name: s.settings.steps for s in self.plan.stages},
                "resumed": shared.version if state else None,
                "config": self.config,
            },
        )
        if row := state.get("row"):  # it may have been killed before it told of its last step
            shared.tracking.moment("step_restored", row)
        if chosen is not None:
            before = json.loads((chosen / "plugins.json").read_text())
            for line in compare_provenance(before, self.registry.provenance()):
                shared.tracking.moment("warned", {"text": f"resume: {line}"})
        self.registry.hook.run_started(directory=str(self.directory), config=self.config)

    async def _stages(self, shared: Shared, chosen: Path | None, state: Mapping[str, Any]) -> str:
        names = [s.name for s in self.plan.stages]
        start = names.index(state["stage"]) if state else 0
        middle = bool(state) and not _done(state, self.plan.stages[start:])
        if state and not middle:
            start += 1
        if start == len(names):
            log.warning("%s", _nothing_left(self.plan, state))
        for index in range(start, len(names)):
            first = state["stage_first"] if middle else shared.version
            stage = self.stage = await build(self.plan, index, shared, first)
            if chosen is not None:
                await stage.trainer.load(chosen, weights_only=not middle)
                if middle:
                    stage.restore(chosen, state)
            shared.tracking.moment(
                "stage_started",
                {
                    "stage": stage.name,
                    "version": shared.version,
                    "steps": stage.settings.steps,
                    "first": first,
                },
            )
            self.registry.hook.stage_started(stage=stage.name, version=shared.version)
            await self._one(stage)
            if self.interrupted:
                return "interrupted"
            chosen, middle = await stage.finish(), False
        return "finished"

    async def _one(self, stage: Stage) -> None:
        """The loop over one stage. A failure still leaves a checkpoint of the last good step where
        it can."""
        if self.interrupted:
            stage.interrupt()
        try:
            async with asyncio.TaskGroup() as beside:
                watches = [
                    beside.create_task(stage.weights.watch(), name="watch engines"),
                    beside.create_task(stage.watch_waiting(), name="watch the trainer wait"),
                ]
                await loop.train(stage)
                for watch in watches:
                    watch.cancel()
            if not self.interrupted and stage.shared.version < stage.last:
                await stage.end_early()
        except BaseExceptionGroup as group:
            await self._rescue(stage)
            raise _explained(_first(group), stage.failed) from group
        except MilesError:
            await self._rescue(stage)
            raise
        finally:
            await stage.evaluations.close()
            await stage.weights.close()
        if self.interrupted:
            await stage.finish()

    async def _rescue(self, stage: Stage) -> None:
        if stage.trainer.version == stage.first:
            return
        if not stage.trainer.certain:
            log.warning(
                "nothing newer is saved: a trainer step was lost, so its weights are unknown%s",
                self._kept(),
            )
            return
        if not await stage.trainer.free(stage.settings.silent_after_s):
            log.warning(
                "nothing newer is saved: the trainer does not answer within %g s "
                "(silent_after_s)%s",
                stage.settings.silent_after_s,
                self._kept(),
            )
            return
        try:
            stage.buffer.stop()
            stage.buffer.end()  # nobody brings back what is in flight, and a shared device waits
            await stage.finish()
        except MilesError as error:
            log.warning("nothing newer is saved: %s%s", error, self._kept())

    def _kept(self) -> str:
        """The newest checkpoint and how it is taken up, in words; that there is none."""
        found = checkpoint.find(self.directory / "checkpoints")
        if not found:
            return "; there is no checkpoint"
        return f"; the newest checkpoint is {found[-1]} (resume={self.directory})"

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run after the current step, within
        `interrupt_grace_s`; the second at once."""
        running = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            running.add_signal_handler(number, self._interrupt)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                running.remove_signal_handler(number)
            if self.grace is not None:
                self.grace.cancel()

    def _interrupt(self) -> None:
        if (self.interrupted or self.stage is None) and self.main_task is not None:
            self.main_task.cancel()
        elif self.stage is not None:
            self.stage.shared.tracking.moment(
                "warned", {"text": "interrupted: writing a checkpoint (again to stop at once)"}
            )
            self.stage.interrupt()
            seconds = self.stage.settings.interrupt_grace_s
            self.grace = asyncio.get_running_loop().call_later(seconds, self._give_up, seconds)
        self.interrupted = True

    def _give_up(self, seconds: float) -> None:
        log.warning(
            "interrupted: not ended after %g s (interrupt_grace_s), stopping at once%s",
            seconds,
            self._kept(),
        )
        if self.main_task is not None:
            self.main_task.cancel()

    def _report(self) -> None:
        from miles.report import write

        try:
            write(self.directory)
        except (OSError, ValueError) as error:
            log.warning("no report: %s", error)


def _done(state: Mapping[str, Any], left: Sequence[Any]) -> bool:
    """Whether the first of the stages `left` has nothing more to do. Its last version is scored by
    the stage that follows, if there is one, and by itself if there is none."""
    version, (stage, *later) = state["version"], left
    if later or stage.specs["evaluator"] is None or state["evaluated"] == version:
        return bool(version >= state["stage_first"] + stage.settings.steps)
    return False


def _nothing_left(plan: Any, state: Mapping[str, Any]) -> str:
    """Of a resumed run that has taken all its steps: how many, and how it goes on."""
    last = plan.stages[-1]
    steps, key = last.settings.steps, f"stages.{last.name}.steps"
    said = any(o.lstrip("+").startswith(f"{key}=") for o in plan.overrides)
    if len(plan.stages) == 1 and not said:
        key = "steps"
    return (
        f"resume={last.settings.resume}: this run is finished, at step "
        f"{state['version'] - state['stage_first']} of {steps} of stage {last.name}; "
        f"a larger {key} goes on from there"
    )


def _words(error: BaseException) -> str:
    return error.detail if isinstance(error, MilesError) else f"{type(error).__name__}: {error}"


def _explained(error: BaseException, failed: Group | None) -> BaseException:
    """With what the last group that failed said of it, where the trainer starved for want of
    others."""
    if isinstance(error, BufferStarved) and failed is not None and failed.failure is not None:
        task, failure = failed.task.id, failed.failure
        error.add_note(f"the last that failed, task {task!r}: {failure.reason}: {failure.detail}")
    return error


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: the first of miles' own, otherwise the first of all."""
    leaves: list[BaseException] = []
    todo: list[BaseException] = [group]
    while todo:
        error = todo.pop(0)
        if isinstance(error, BaseExceptionGroup):
            todo = [*error.exceptions, *todo]
        else:
            leaves.append(error)
    own = [e for e in leaves if isinstance(e, MilesError)]
    return next((e for e in own if isinstance(e, RunError)), own[0] if own else leaves[0])
