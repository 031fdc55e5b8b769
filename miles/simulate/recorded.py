"""Runs that were recorded, as `miles simulate --fit` reads them: settings and steps.

Runs of the same settings count as one, so that a setting can be measured several times. No model is
made here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from miles.errors import ConfigError
from miles.protocols import KINDS
from miles.records.record import read
from miles.registry import schema
from miles.settings import RunKeys, Settings
from miles.workers.probe import FEW

__all__ = ["WARM", "Recorded", "load", "together"]

WARM = 3
"""First steps of a run, which import and compile, are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One setting, as it was run once or several times."""

    name: str
    """Directories of its runs."""
    settings: Settings
    """The loop's keys of their last stage."""
    runs: Sequence[Sequence[Mapping[str, Any]]]
    """Steps of each run, the first ones left out."""

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """Of all its runs."""
        return [step for run in self.runs for step in run]

    @property
    def synchronous(self) -> bool:
        """Whether engines and trainer take turns."""
        return not self.settings.max_lag

    def get(self, name: str) -> float:
        """Median of a metric over all steps. Raises `ConfigError` when none has it."""
        values = [float(s[name]) for s in self.steps if isinstance(s.get(name), int | float)]
        if not values:
            raise ConfigError(f"--fit: the steps of {self.name} have no metric {name!r}")
        return median(values)

    def probed(self, step: Mapping[str, Any]) -> bool:
        """Whether engines scored a probe in it, as it had too few tokens of the newest weights."""
        return not self.synchronous and step.get("tokens/lag_0", 0) < FEW


def load(directory: Path) -> Recorded:
    """Read a run. Raises `ConfigError` when there are too few steps, or no configuration."""
    from omegaconf import OmegaConf

    record = read(directory)
    config: Any = OmegaConf.to_container(OmegaConf.create(record.config or "{}"))
    stages = config.get("stages") or {}
    stage = record.steps[-1].get("stage") if record.steps else None
    steps = record.of(str(stage))[WARM:] if stage else []
    if len(steps) < 3 or stage not in stages:
        raise ConfigError(
            f"--fit: {directory} has {len(steps)} steps after the first {WARM}, and "
            f"{'a' if stage in stages else 'no'} configuration; 3 steps and one are needed"
        )
    values = {k: v for k, v in stages[stage].items() if k not in KINDS}
    settings: Settings = schema.build(Settings, values, owner=str(directory))
    return Recorded(name=directory.name, settings=settings, runs=[steps])


def together(runs: Iterable[Recorded]) -> list[Recorded]:
    """Runs of the same settings as one, in the order of the first of each."""
    found: list[Recorded] = []
    for run in runs:
        for index, other in enumerate(found):
            if _what(other) == _what(run):
                found[index] = replace(
                    other, name=f"{other.name} {run.name}", runs=[*other.runs, *run.runs]
                )
                break
        else:
            found.append(run)
    return found


def _what(run: Recorded) -> Settings:
    """Its settings, but for what each run has of its own."""
    return replace(run.settings, seed=0, run=RunKeys())
