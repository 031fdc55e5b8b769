"""From overrides to a plan: stages, each with the loop's settings and a validated component a kind.

Merges component defaults < files < experiment < stage < command line, and remembers where each
value came from. Every fault is collected; nothing is built, and nothing may change afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles.composing.compose import Assignment, Files, assignment, parse
from miles.composing.draft import COMMAND_LINE, Draft, Tree
from miles.errors import ConfigError, MilesError, choices
from miles.plugins import Registry
from miles.protocols import KINDS, Spec
from miles.registry import schema
from miles.settings import Settings

__all__ = ["Plan", "Stage", "compose", "once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pass of the loop."""

    name: str
    """Unique in the plan."""
    settings: Settings
    """The loop's keys."""
    specs: Mapping[str, Spec | tuple[Spec, ...] | None]
    """By kind: a component, None where an optional kind has none, a tuple where many may be."""
    resolved: Mapping[str, Any]
    """Every value by key, defaults included, as it would be written in YAML."""
    origins: Mapping[str, str]
    """Dotted key to where its value came from: `default`, a file, or `command line`."""

    @property
    def subject(self) -> str:
        """What it trains on, for the name of a run: the experiment that was asked for, otherwise
        the environment."""
        asked = self.origins.get("experiment") == COMMAND_LINE and self.settings.experiment
        environment = self.specs["environment"]
        return asked or (environment.name if isinstance(environment, Spec) else self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will do. With `faults`, what it would have done."""

    stages: tuple[Stage, ...]
    """In order; a stage whose settings are unusable is missing when there are faults."""
    faults: tuple[str, ...]
    """Everything that is wrong, as sentences."""
    overrides: tuple[str, ...]
    """The command line it was composed from, local plugins as absolute paths."""
    folders: tuple[str, ...]
    """Folders with more YAML that it named, as absolute paths."""
    registry: Registry
    """The registry with the plan's local files."""

    @property
    def resolved(self) -> Mapping[str, Any]:
        """Every stage's values, by the stage's name."""
        return schema.Frozen({stage.name: stage.resolved for stage in self.stages})

    def verify(self) -> Plan:
        """Itself, or a `ConfigError` with all faults."""
        if self.faults:
            raise ConfigError("\n".join(self.faults))
        return self


def compose(
    overrides: Sequence[str],
    *,
    registry: Registry | None = None,
    folders: Iterable[str | Path] = (),
) -> Plan:
    """The plan of these overrides.

    `registry` is what may be chosen from (everything installed unless given); `folders` hold more
    YAML. Faults are collected in the plan: nothing that a user can write raises.
    """
    registry = registry or Registry.load()
    folders = tuple(folders)
    faults: list[str] = []
    given = _parsed(overrides, faults)
    try:
        registry, drafts = _drafts(given, registry, folders, faults)
    except MilesError as error:
        faults.append(error.detail)
        drafts = {}
    stages = []
    for name, draft in drafts.items():
        stage, found = _stage(name, draft, registry)
        faults += [f"stage {name}: {f}" if len(drafts) > 1 else f for f in found]
        stages += [stage] if stage else []
    return Plan(
        stages=tuple(stages),
        faults=once(faults, [*drafts]),
        overrides=_recorded(overrides, registry),
        folders=tuple(str(Path(f).expanduser().resolve()) for f in folders),
        registry=registry,
    )


def _parsed(overrides: Sequence[str], faults: list[str]) -> list[Assignment]:
    given = []
    for text in overrides:
        try:
            given.append(parse(text))
        except ConfigError as error:
            faults.append(str(error))
    return given


def _recorded(overrides: Sequence[str], registry: Registry) -> tuple[str, ...]:
    """Overrides that mean the same in another working directory: local plugins are absolute."""
    whole = assignment("plugins", registry.files)
    return tuple(whole if o.lstrip("+").startswith("plugins=") else o for o in overrides)


def once(lines: Sequence[str], stages: Sequence[str]) -> tuple[str, ...]:
    """Lines without repeats; what is said of every one of several stages is said once, bare."""
    heads = [f"stage {name}: " for name in stages]
    bare = [next((f.removeprefix(h) for h in heads if f.startswith(h)), f) for f in lines]
    return tuple(
        dict.fromkeys(
            b if len(heads) > 1 and all(h + b in lines for h in heads) else f
            for f, b in zip(lines, bare, strict=True)
        )
    )


def _drafts(
    given: Sequence[Assignment],
    registry: Registry,
    folders: tuple[str | Path, ...],
    faults: list[str],
) -> tuple[Registry, dict[str, Draft]]:
    """One draft a stage, the command line applied."""
    last = {a.key: a.value for a in given if len(a.key) == 1}
    if last.get(("plugins",)):
        registry = registry.with_files(_as_list(last["plugins",]))
    files = Files(registry, folders)
    experiment = last.get(("experiment",), files.default_experiment())
    chosen, layers = files.layers(experiment)
    asked = [p for layer in layers for p in _as_list(layer.values.get("plugins"))]
    if asked and ("plugins",) not in last:
        registry = registry.with_files(asked)
        files = Files(registry, folders)

    base = Draft(files, registry)
    for kind, names in chosen.items():
        label = next((x.label for x in reversed(layers) if kind in x.chooses), "")
        base.assign((kind,), names, label)
    for layer in layers:
        tree = Tree()
        tree.put((), layer.values, layer.label)
        base.merge(tree)
    named = ",".join(_as_list(experiment))
    chooser = COMMAND_LINE if ("experiment",) in last else "conf/config.yaml"
    base.settings.put(("experiment",), named, chooser)
    if registry.files:
        origin = COMMAND_LINE if ("plugins",) in last else base.settings.origin(("plugins",))
        base.settings.put(("plugins",), list(registry.files), origin)

    rest = [a for a in given if a.key not in {("experiment",), ("plugins",)}]
    own = [a for a in rest if a.key[0] == "stages"]
    drafts = {}
    for name, body in _stage_bodies(base.stages, own, faults).items():
        drafts[name] = base.copy()
        drafts[name].merge(body)
    everywhere = drafts or {"": base}
    _command_line(everywhere, [a for a in rest if a.key[0] != "stages"], faults)
    for a in own:
        if len(a.key) > 2 and a.key[1] in drafts:
            _command_line({"": drafts[a.key[1]]}, [replace(a, key=a.key[2:])], faults)
    algorithm = base.parts["algorithm"]
    return registry, drafts or {algorithm[0].name if algorithm else "train": base}


def _as_list(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if value else []
    return [str(v) for v in value or ()]


def _stage_bodies(tree: Tree, own: Sequence[Assignment], faults: list[str]) -> dict[str, Tree]:
    """Stage names to what their bodies say, in order."""
    for a in own:
        if len(a.key) == 1:
            tree = Tree()
            tree.put((), a.value or {}, COMMAND_LINE)
    names = tree.heads()
    for a in own:
        if len(a.key) == 1:
            continue
        if a.key[1] not in names and not a.add:
            faults.append(
                f"{a.text}: there is no stage {a.key[1]!r}; {choices(a.key[1], names)}; "
                "a new one is added with +"
            )
        elif len(a.key) == 2:
            tree.put((a.key[1],), None if a.delete else a.value, COMMAND_LINE)
        names = [*names, *([a.key[1]] if a.add and a.key[1] not in names else [])]
    return {n: tree.below(n) for n in names if not tree.is_null((n,))}


def _command_line(
    drafts: Mapping[str, Draft], given: Sequence[Assignment], faults: list[str]
) -> None:
    """Apply each override to every stage; a component's key, to the stages whose component has it,
    of which there must be one."""
    for a in sorted(given, key=lambda a: not Draft.is_choice(a.key)):
        fitting = [d for d in drafts.values() if d.accepts(a.key)]
        if not fitting:
            why = "; ".join(dict.fromkeys(d.refusal(a.key) for d in drafts.values()))
            faults.append(f"{a.text}: {why}")
        for draft in fitting:
            draft.assign(a.key, a.value, COMMAND_LINE, delete=a.delete)


def _stage(name: str, draft: Draft, registry: Registry) -> tuple[Stage | None, list[str]]:
    """Validate and freeze one draft."""
    tree, faults = draft.resolved()

    def converted(target: type, at: tuple[str, ...], owner: str) -> Any:
        node = tree.nested()
        for key in at:
            node = node[key]
        ignored = ("name",) if at else tuple(KINDS)
        made, found = schema.convert(
            target,
            {k: v for k, v in node.items() if k not in ignored},
            owner=owner,
            origin=lambda key: tree.origin((*at, *key.split("."))),
        )
        faults.extend(found)
        return made

    settings = converted(Settings, (), "")
    resolved: dict[str, Any] = schema.plain(settings) if settings else {}
    resolved.pop("stages", None)
    specs: dict[str, Any] = {}
    for kind, row in KINDS.items():
        made = []
        for part in draft.parts[kind]:
            component = draft.component(part)
            if component is None:
                continue  # its fault is among those of the draft
            at = (kind, part.choice) if row.many else (kind,)
            config = converted(component.Config, at, f"{kind} {part.name!r}")
            if config is not None:  # otherwise its faults are told, and nothing is built from it
                frozen = schema.freeze(schema.plain(config))
                made.append(Spec(kind=kind, name=part.name, config=frozen))
        if not row.optional and not draft.parts[kind]:
            known = ", ".join(registry.names(kind)) or "(none)"
            faults.append(f"{kind}: none is chosen; choose one with {kind}=NAME; valid: {known}")
        if row.many:
            specs[kind] = tuple(made)
            resolved[kind] = {s.name: s.config for s in made}
        else:
            spec = specs[kind] = made[0] if made else None
            as_given = tree.nested().get(kind)
            resolved[kind] = {"name": spec.name, **spec.config} if spec else as_given
    if settings is None:
        return None, faults
    if fault := settings.run.name_fault:
        faults.append(fault)
    stage = Stage(
        name=name,
        settings=settings,
        specs=schema.Frozen(specs),
        resolved=schema.freeze(resolved),
        origins=schema.Frozen({".".join(p): leaf[1] for p, leaf in tree.leaves.items()}),
    )
    return stage, faults
