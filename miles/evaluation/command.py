"""`miles eval CHECKPOINT`: the evaluators of a run, by hand, on a checkpoint.

Composes as the run did and trains nothing. How a directory is scored is
`miles.evaluation.evaluations`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from miles import checkpoint
from miles.assemble import make_context, make_eval_fleet
from miles.batch import Score, Skipped
from miles.composing.compose import assignment, quoted
from miles.config import Plan, compose
from miles.errors import CheckpointError, ConfigError
from miles.evaluation.evaluations import guarded, score_directory
from miles.records.directory import Directory
from miles.records.tracking import Tracking
from miles.registry.schema import plain
from miles.run import expand_resume, log_to

__all__ = ["eval_command"]


def eval_command(args: argparse.Namespace) -> int:
    """Score, print, and leave a directory like a run's; 1 when a set was skipped. Raises
    `ConfigError`, `CheckpointError`."""
    subject = _found(Path(args.checkpoint).expanduser())
    plan = _planned(subject, args).verify()
    with redirect_stdout(sys.stderr):  # trackers talk as well; standard output is for the results
        version, results = _evaluate(plan, subject)
    answer = _answer(version, results)
    if args.scores:
        Path(args.scores).write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(answer))
    else:
        print(*(_line(version, result) for result in results), sep="\n")
    return int(any(isinstance(result, Skipped) for result in results))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What is to be scored."""

    directory: Path
    version: int
    stage: str
    """That wrote it; empty for a bare model."""
    sealed: bool
    """Whether it has a manifest; a bare Hugging Face directory has none."""


def _found(path: Path) -> _Subject:
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory")
    if (path / "state.json").is_file() or (path / "checkpoints").is_dir():
        chosen = path if (path / "state.json").is_file() else checkpoint.newest(path)
        checkpoint.verify(chosen)
        state = checkpoint.read_state(chosen)
        return _Subject(
            directory=chosen.resolve(),
            version=int(state["version"]),
            stage=str(state["stage"]),
            sealed=True,
        )
    if any(path.glob("*.safetensors")):
        return _Subject(directory=path.resolve(), version=0, stage="", sealed=False)
    raise ConfigError(
        f"{path} holds no checkpoint: neither state.json (a checkpoint), checkpoints/ (a run), nor "
        "*.safetensors (a model)"
    )


def _planned(subject: _Subject, args: argparse.Namespace) -> Plan:
    overrides, folders = [quoted(text) for text in args.overrides], args.config_dir
    if subject.sealed:
        overrides, folders = _as_recorded(subject.directory, overrides, folders)
    else:
        path = assignment("model.path", str(subject.directory))
        overrides = ["model.init=load", path, *overrides]
    return compose(overrides, registry=args.registry, folders=folders)


def _as_recorded(
    directory: Path, overrides: Sequence[str], folders: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Those of the run that wrote it first; where that run lives is not this one's affair."""
    found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if "overrides" not in found:
        raise CheckpointError(f"{directory}: config.json does not say how its run was composed")
    resume = quoted(f"resume={directory}")
    merged, folders = expand_resume([*overrides, resume], folders)
    named = [o for o in overrides if o.startswith("run.name=")]
    kept = [o for o in merged if not o.startswith(("resume=", "run.name="))]
    return [*kept, *named], folders


def _evaluate(plan: Plan, subject: _Subject) -> tuple[int, Sequence[Score | Skipped]]:
    names = [stage.name for stage in plan.stages]
    index = names.index(subject.stage) if subject.stage in names else len(names) - 1
    planned = plan.stages[index]
    if planned.specs["evaluator"] is None:
        raise ConfigError(f"stage {planned.name} has no evaluator; choose one with evaluator=NAME")
    settings = planned.settings
    if not settings.run.name:
        stem = f"eval-{subject.directory.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        settings = replace(settings, run=replace(settings.run, name=stem))
    directory = Directory.create(settings, stem="eval")
    try:
        config = {
            "overrides": list(plan.overrides),
            "folders": list(plan.folders),
            "stages": {planned.name: plain(planned.resolved)},
            "checkpoint": str(subject.directory),
        }
        directory.record(config, plan.registry.provenance())
        log_to(directory.path / "logs" / "driver.log")
        others = [stage for stage in plan.stages if stage is not planned]
        scoring = _scored([planned, *others], plan.registry, subject, directory.path)
        return subject.version, asyncio.run(scoring)
    finally:
        directory.close()


async def _scored(
    stages: Sequence[Any], registry: Any, subject: _Subject, directory: Path
) -> Sequence[Score | Skipped]:
    """Every process started here is ended here."""
    context = make_context(stages[0], registry, directory)
    specs = stages[0].specs
    evaluator = registry.build(specs["evaluator"], context)
    runtime = registry.build(specs["runtime"], context)
    files = {s.name: registry.build(s, context) for s in specs["tracker"] or ()}
    tracking = Tracking(files)
    fleet = make_eval_fleet(stages, runtime, registry, context)
    scoring = partial(
        score_directory,
        evaluator,
        subject.version,
        subject.directory,
        fleet=fleet,
        sealed=subject.sealed,
    )
    began, outcome = time.monotonic(), "failed"
    try:
        start = {"directory": str(directory), "name": directory.name, "stages": [], "steps": {}}
        tracking.moment("run_started", {**start, "resumed": None, "config": {}})
        results = await guarded(subject.version, scoring)
        for result in results:
            tracking.moment("evaluated", _row(subject.version, result))
        outcome = "finished"
        return results
    finally:
        await runtime.stop()
        seconds = time.monotonic() - began
        end = {"outcome": outcome, "directory": str(directory), "seconds": seconds}
        tracking.moment("run_finished", end)
        tracking.close()


def _row(version: int, result: Score | Skipped) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(result)
    if isinstance(result, Skipped):
        data["skipped"] = data.pop("reason")
    return {"step": version, **data, **data.pop("metrics", {}), "lag_steps": 0}


def _answer(version: int, results: Sequence[Score | Skipped]) -> Mapping[str, Any]:
    sets: dict[str, Any] = {}
    for result in results:
        if isinstance(result, Skipped):
            sets[result.set] = {"skipped": result.reason}
        else:
            more = {"samples": result.samples, "metrics": dict(result.metrics)}
            sets[result.set] = {"score": result.score, **more}
    return {"version": version, "sets": sets}


def _line(version: int, result: Score | Skipped) -> str:
    head = f"{result.set}, version {version}:"
    if isinstance(result, Skipped):
        return f"{head} skipped: {result.reason}"
    metrics = result.metrics
    words = [f"{head} {result.score:.4f}"]
    if "low" in metrics and "high" in metrics:
        words.append(f"[{metrics['low']:.4f}, {metrics['high']:.4f}]")
    words.append(f"of {result.samples} attempts")
    for name, value in metrics.items():
        if name.startswith("pass_") and name.count("_") == 1:
            low, high = metrics[f"{name}_low"], metrics[f"{name}_high"]
            words.append(f"· pass@{name[5:]} {value:.4f} [{low:.4f}, {high:.4f}]")
    return " ".join(words)
