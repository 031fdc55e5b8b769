"""Typed calls of every hook: `registry.hook.step_finished(...)` instead of a string and keywords.

Adds one thing to pluggy: an error raised inside a hook says which plugin raised it, and where.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pluggy

from miles.batch import Batch, Receipt, Score, Skipped, Update
from miles.errors import MilesError, PluginError
from miles.types import Drop, Group, Task

__all__ = ["Moments", "placed"]


def placed(error: MilesError, trace: TracebackType | None) -> MilesError:
    """The error with a note of the lines of code from `trace` inwards, since it is said without its
    traceback."""
    if lines := "".join(traceback.format_tb(trace)).rstrip():
        error.add_note(lines)
    return error


class Moments:
    """One method a hook, in the order of `miles.hookspecs`.

    Any of them raises `PluginError` naming the plugin that raised, with the original error as its
    cause; a `MilesError` passes through with a note.
    """

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager

    def commands(self, subparsers: Any) -> None:
        """Let plugins add commands."""
        self.call("miles_commands", subparsers=subparsers)

    def check(self, config: Mapping[str, Any]) -> list[str]:
        """Every fault that plugins find in a resolved stage."""
        answers = self.call("miles_check", config=config) or ()
        return [f for a in answers for f in ([a] if isinstance(a, str) else a)]

    def run_started(self, directory: str, config: Mapping[str, Any]) -> None:
        """The run directory exists and nothing has started yet."""
        self.call("miles_run_started", directory=directory, config=config)

    def stage_started(self, stage: str, version: int) -> None:
        """Components of a stage are built."""
        self.call("miles_stage_started", stage=stage, version=version)

    def group_started(self, group: int, task: Task) -> None:
        """A task was leased."""
        self.call("miles_group_started", group=group, task=task)

    def group_finished(self, group: Group, drop: Drop | None) -> None:
        """All attempts are back."""
        self.call("miles_group_finished", group=group, drop=drop)

    def prepared(self, groups: Sequence[Group], batch: Batch) -> Batch:
        """The batch to train on: a plugin's replacement, or the one given."""
        replaced: Batch | None = self.call("miles_prepared", groups=groups, batch=batch)
        return batch if replaced is None else replaced

    def step_finished(
        self, step: int, groups: Sequence[Group], update: Update, metrics: Mapping[str, float]
    ) -> None:
        """A trainer step is done and accounted for."""
        self.call("miles_step_finished", step=step, groups=groups, update=update, metrics=metrics)

    def weights_published(self, receipt: Receipt) -> None:
        """Engines serve a new version."""
        self.call("miles_weights_published", receipt=receipt)

    def evaluated(self, step: int, result: Score | Skipped) -> None:
        """One evaluation set has a score, or a reason for having none."""
        self.call("miles_evaluated", step=step, result=result)

    def checkpoint_saved(self, step: int, directory: str) -> None:
        """A checkpoint is complete."""
        self.call("miles_checkpoint_saved", step=step, directory=directory)

    def run_finished(self, directory: str, outcome: str) -> None:
        """The run is over: `finished`, `interrupted` or `failed`."""
        self.call("miles_run_finished", directory=directory, outcome=outcome)

    def make(self, kind: str, name: str, config: Any, context: Any) -> Any:
        """Build a component through `miles_make_<kind>`."""
        return self.call(f"miles_make_{kind}", name=name, config=config, context=context)

    def answers(self, hook: str) -> Iterator[tuple[str, Any]]:
        """(plugin, answer) of a hook without arguments, those that are None left out.

        Wrappers are passed over: each answer must be one plugin's own.
        """
        for impl in getattr(self._manager.hook, hook).get_hookimpls():
            if impl.hookwrapper or impl.wrapper:
                continue
            with self._named(hook):
                answer = impl.function()
            if answer is not None:
                yield impl.plugin_name, answer

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call a hook by its full name; what nobody watches costs next to nothing."""
        caller = getattr(self._manager.hook, hook)
        if not caller.get_hookimpls():
            return None
        with self._named(hook):
            return caller(**arguments)

    @contextmanager
    def _named(self, hook: str) -> Iterator[None]:
        try:
            yield
        except MilesError as error:
            if plugin := self._culprit(hook, error)[0]:
                error.add_note(f"raised by plugin {plugin!r} in {hook}")
            raise
        except (
            Exception
        ) as error:  # a hook is other people's code: whatever it raises gets the plugin's name
            plugin, trace = self._culprit(hook, error)
            if plugin is None:
                raise
            named = PluginError(
                f"plugin {plugin!r} raised in {hook}: {type(error).__name__}: {error}"
            )
            raise placed(named, trace) from error

    def _culprit(self, hook: str, error: BaseException) -> tuple[str | None, TracebackType | None]:
        """The plugin whose function raised, and its part of the traceback."""
        owners = {}
        for impl in getattr(self._manager.hook, hook).get_hookimpls():
            code = getattr(inspect.unwrap(impl.function), "__code__", None)
            if code is not None and impl.plugin_name != "default":
                owners[code] = impl.plugin_name
        trace, found, begins = error.__traceback__, None, None
        while trace is not None:
            if trace.tb_frame.f_code in owners:
                found, begins = owners[trace.tb_frame.f_code], trace
            trace = trace.tb_next
        return found, begins
