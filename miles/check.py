"""Everything that can be refused before a GPU is taken, all of it at once.

Builds the components that are plain data in the driver, in a temporary folder; starts no process,
imports no torch, and loads no weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from miles.checking.gpus import same_gpus
from miles.checking.sessions import through_faults
from miles.checking.tasks import task_faults, vocabulary_faults
from miles.config import Plan, Stage, once
from miles.errors import MilesError, PluginError
from miles.folders import unwritable
from miles.plugins import Registry
from miles.protocols import KINDS, Context, Spec
from miles.registry import conformance, schema
from miles.registry.moments import placed
from miles.settings import Settings

__all__ = ["Planned", "Report", "check"]

BUILT = ("model", "precision", "tito", "environment", "selector", "algorithm", "evaluator")
"""Kinds whose components are built here, in dependency order. The others own processes or files."""

_FROM = {
    "tito": "model",
    "environment": "tito",
    "selector": "environment",
    "evaluator": "environment",
}
"""What a kind is built from: without it, building would only fail again for the same reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found."""

    faults: tuple[str, ...]
    """Any of these, and the run would fail or lie."""
    warnings: tuple[str, ...]
    """Probably not what was meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a component's `check` is shown of its stage."""

    stage: str
    """Name of the stage."""
    settings: Settings
    """The loop's keys."""
    specs: Mapping[str, Spec | tuple[Spec, ...] | None]
    """Every chosen component by kind; None as well where the chosen one is at fault."""
    built: Mapping[str, Any] = field(default_factory=dict)
    """Components of the kinds in `BUILT` that could be built."""
    samples: bool = True
    """Whether the stage's engine samples; one that replays demonstrations does not."""
    fresh: bool = False
    """Whether it begins with the model as it was built: no stage before it takes a step, and no run
    is resumed."""


def check(plan: Plan) -> Report:
    """Faults of a plan: those of composing it, of plugins, of every component, and of every
    combination that cannot work. Components may add theirs with
    `@classmethod check(cls, config, planned: Planned) -> Sequence[str]` and, of what is allowed but
    probably not meant, `warnings` of the same form; plugins with `miles_check`."""
    registry = plan.registry
    faults = [*(error.detail for error in registry.broken.values()), *plan.faults]
    offered, found = _offered(registry)
    faults += found
    warnings: list[str] = []
    fresh = True
    for stage in plan.stages:
        head = f"stage {stage.name}: " if len(plan.stages) > 1 else ""
        wrong, doubtful = _stage(stage, registry, offered, fresh=fresh)
        fresh = fresh and not stage.settings.steps
        faults += [head + fault for fault in wrong]
        warnings += [head + warning for warning in doubtful]
    faults += _between(plan.stages)
    warnings += _evaluations(plan.stages, registry)
    for stage in plan.stages[:1]:  # a run has the trackers of its first stage
        warnings += _told(partial(_records, stage, registry))
    names = [stage.name for stage in plan.stages]
    return Report(faults=once(faults, names), warnings=once(warnings, names))


def _told(look: Callable[[], Sequence[str]]) -> list[str]:
    """What a look found; what it raises is a finding as well, and does not hide the others."""
    try:
        return list(look())
    except MilesError as error:
        return [error.detail]
    except Exception as error:  # noqa: BLE001 - a plugin's own code, or its tasks
        inside = error.__traceback__.tb_next if error.__traceback__ else None
        return [placed(PluginError(f"{type(error).__name__}: {error}"), inside).detail]


def _stage(
    stage: Stage, registry: Registry, offered: Mapping[str, Any], *, fresh: bool
) -> tuple[list[str], list[str]]:
    """Faults and warnings of one stage; `fresh` unless one before it trains."""
    faults = list(setting_faults(stage.settings))
    resume = stage.settings.resume
    if resume and not Path(resume).expanduser().exists():
        faults.append(f"resume: {resume} does not exist")
    if not resume and (why := unwritable(Path(stage.settings.run.dir).expanduser())):
        faults.append(f"run.dir: {why}")
    with tempfile.TemporaryDirectory(prefix="miles-check-") as folder:
        context = Context(
            directory=Path(folder),
            seed=stage.settings.seed,
            settings=stage.settings,
            **offered,
        )
        built, found = _build(stage, registry, context)
        faults += found
        planned = Planned(
            stage=stage.name,
            settings=stage.settings,
            specs=stage.specs,
            built=built,
            samples=_samples(registry, stage),
            fresh=fresh and not resume,
        )
        faults += _own_checks(planned, registry)
        warnings = _own_warnings(planned, registry)
        for look in (task_faults, vocabulary_faults, through_faults):
            faults += _told(partial(look, planned))
        for compare in (_apart, conformance.carried, conformance.trained):
            faults += _told(partial(compare, planned, registry))
        try:
            wrong, doubtful = same_gpus(planned, registry)
            faults, warnings = faults + wrong, warnings + doubtful
        except MilesError as error:
            faults.append(error.detail)
    faults += _told(partial(registry.hook.check, stage.resolved))
    return faults, warnings


# ---------------------------------------------------------------- the loop's keys


_AT_LEAST: Mapping[str, float] = {
    "steps": 0, "groups_per_step": 1, "samples_per_group": 1, "max_lag": 0, "oversample": 0,
    "capacity_factor": 1, "publish_every": 1, "checkpoint_every": 0, "keep_checkpoints": 0,
    "eval_every": 0, "max_turns": 1, "top_k": 0, "max_new_tokens": 1, "rollout_workers": 0,
    "max_restarts": 0, "session.max_sessions": 1, "session.max_turns": 1, "session.max_tokens": 0,
    "session.upstream_timeout_s": 0, "session.port": 0,
}  # fmt: skip
_POSITIVE = (
    "starved_after_s", "silent_after_s", "step_timeout_s", "publish_timeout_s", "worker_timeout_s",
    "episode_timeout_s", "interrupt_grace_s", "temperature", "top_p", "session.idle_s",
)  # fmt: skip


def setting_faults(settings: Settings) -> Iterator[str]:
    """Values, and combinations of values, with which the loop cannot run."""
    for name, least in _AT_LEAST.items():
        if not (value := attrgetter(name)(settings)) >= least:
            yield f"{name}: {value} is less than {least:g}"
    for name in _POSITIVE:
        if not (value := attrgetter(name)(settings)) > 0:
            why = "; 0 is greedy, which has no log-probs to train on"
            yield f"{name}: {value} is not above 0{why if name == 'temperature' else ''}"
    if settings.top_p > 1:
        yield f"top_p: {settings.top_p} is above 1"
    port, workers = settings.session.port, settings.rollout_workers
    if port > 65535:
        yield f"session.port: {port} is above 65535"
    if port and workers > 1:
        yield f"session.port ({port}) and rollout_workers ({workers}): one port is for one of them"
    if settings.concurrency < settings.samples_per_group:
        yield (
            f"concurrency ({settings.concurrency}) is less than samples_per_group "
            f"({settings.samples_per_group}): no group could start"
        )
    if settings.publish_every > settings.max_lag + 1:
        yield (
            f"publish_every ({settings.publish_every}) is more than max_lag + 1 "
            f"({settings.max_lag + 1}): the trainer would wait for ever for fresh groups"
        )
    if settings.unused == "retry" and settings.max_retries < 1:
        yield f"unused=retry needs a limit: max_retries is {settings.max_retries}, not at least 1"
    if settings.pause == "abort" and not settings.partial and settings.max_lag:
        yield (
            "pause=abort ends conversations in the middle of a turn at every publish; take "
            "pause=retract or in_place, or partial=true, which goes on where they were cut"
        )
    if settings.partial and not settings.max_lag:
        yield (
            "partial=true gives groups tokens of older weights, and max_lag=0 trains on none; "
            "take max_lag=1 or more"
        )
    if settings.max_lag and settings.placement == "colocated":
        yield (
            f"max_lag ({settings.max_lag}) and placement=colocated: engines that sleep while the "
            "trainer works cannot sample ahead; use max_lag=0 or placement=split"
        )


# ---------------------------------------------------------------- components


def _offered(registry: Registry) -> tuple[dict[str, Any], list[str]]:
    """Rewards and filters of all plugins, as a context takes them."""
    offered: dict[str, Any] = {}
    faults = []
    for name in ("rewards", "filters", "tools", "agents"):
        try:
            offered[name] = getattr(registry, name)()
        except MilesError as error:
            faults.append(error.detail)
    return offered, faults


def _build(stage: Stage, registry: Registry, context: Context) -> tuple[dict[str, Any], list[str]]:
    built: dict[str, Any] = {}
    faults: list[str] = []
    for kind in BUILT:
        spec = stage.specs[kind]
        if not isinstance(spec, Spec) or _FROM.get(kind, kind) not in {*built, kind}:
            continue
        try:
            if kind == "evaluator":
                named = registry.environments(spec).items()
                own = {name: registry.build(each, context) for name, each in named}
                context = replace(context, environments=own)
            built[kind] = registry.build(spec, context)
            if kind == "model":
                built[kind].hf_config()
        except MilesError as error:
            faults.append(error.detail)
            built.pop(kind, None)
            continue
        if kind in ("model", "precision", "tito", "environment"):
            context = replace(context, **{kind: built[kind]})
    return built, faults


def _specs(planned: Planned) -> Iterator[Spec]:
    for kind in KINDS:
        chosen = planned.specs[kind]
        yield from chosen if isinstance(chosen, tuple) else [chosen] if chosen else []


def _own_checks(planned: Planned, registry: Registry) -> list[str]:
    faults = []
    for spec in _specs(planned):
        component = registry.component(spec.kind, spec.name)
        if spec.kind == "engine" and spec.config.get("workers", 1) < 1:
            faults.append(f"engine.workers: {spec.config['workers']} is less than 1")
        in_rollouts = getattr(component, "process", "worker") == "rollout"
        if spec.kind == "engine" and planned.samples and in_rollouts:
            what = "samples in rollout workers, where no transport brings weights"
            faults.append(f"engine {spec.name!r} {what}")
        if spec.kind not in BUILT:
            lacks = conformance.component_faults(spec.kind, component)
            if lacks:
                faults.append(f"{registry.entry(spec.kind, spec.name)}: {'; '.join(lacks)}")
        look = getattr(component, "check", None)
        if look is not None:
            config = schema.build(component.Config, spec.config, owner=spec.name)
            found = _told(partial(look, config, planned))
            faults += [f"{spec.kind} {spec.name!r}: {fault}" for fault in found]
    return faults


def _apart(planned: Planned, registry: Registry) -> list[str]:
    """Whether an evaluator with engines of its own can have them."""
    spec, engine = planned.specs["evaluator"], planned.specs["engine"]
    if not isinstance(spec, Spec) or not isinstance(engine, Spec) or not planned.samples:
        return []
    place = getattr(registry.component("evaluator", spec.name), "place", "rollout")
    if place != "apart" or hasattr(registry.component("engine", engine.name), "load_directory"):
        return []
    return [
        f"evaluator {spec.name!r} loads engines of its own from snapshots, and engine "
        f"{engine.name!r} cannot (it has no load_directory)"
    ]


def _own_warnings(planned: Planned, registry: Registry) -> list[str]:
    found: list[str] = []
    for spec in _specs(planned):
        component = registry.component(spec.kind, spec.name)
        look = getattr(component, "warnings", None)
        if look is not None:
            config = schema.build(component.Config, spec.config, owner=spec.name)
            found += _told(partial(look, config, planned))
    return found


def _samples(registry: Registry, stage: Stage) -> bool:
    spec = stage.specs["engine"]
    if not isinstance(spec, Spec):
        return True
    return bool(getattr(registry.component("engine", spec.name), "samples", True))


def _between(stages: Sequence[Stage]) -> list[str]:
    faults = []
    for stage in stages[1:]:
        for kind in ("model", "runtime", "tracker"):
            if stage.specs[kind] != stages[0].specs[kind]:
                faults.append(
                    f"stage {stage.name}: {kind} differs from that of stage {stages[0].name}, but "
                    "one run has one for all its stages"
                )
    return faults


def _evaluations(stages: Sequence[Stage], registry: Registry) -> tuple[str, ...]:
    wanted = [s for s in stages if s.specs["evaluator"] is not None]
    if not wanted or any(_samples(registry, s) for s in stages):
        return ()
    return ("evaluator: no stage has an engine that samples, so every evaluation will be skipped",)


def _records(stage: Stage, registry: Registry) -> list[str]:
    """Whether a tracker writes what reports are made of."""
    trackers = stage.specs["tracker"]
    chosen = trackers if isinstance(trackers, tuple) else ()
    names = [spec.name for spec in chosen]
    instead = f"use tracker=[{''.join(f'{name},' for name in names)}jsonl]"
    for spec in chosen:
        component = registry.component("tracker", spec.name)
        if (told := getattr(component, "records", None)) is None:
            continue
        if told(schema.build(component.Config, spec.config, owner=spec.name)):
            return []
        instead = f"{spec.name} does, unless another file is named"
    return [
        f"tracker: none that is chosen ({', '.join(names) or 'there is none'}) writes "
        "metrics.jsonl, without which `miles report` and the report at the run's end are empty; "
        f"{instead}"
    ]
