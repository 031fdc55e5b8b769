"""What `miles check` says of GPUs that trainer and engines share: which these are, and whether both
fit.

It adds up what components claim (`miles.Claim`); whether one of them fits alone is its own affair.
"""

from __future__ import annotations

from typing import Any

from miles.machine import Claim, gpu_room, gpus_here
from miles.protocols import Spec
from miles.registry import schema

__all__ = ["same_gpus"]


def same_gpus(planned: Any, registry: Any) -> tuple[list[str], list[str]]:
    """Faults and warnings of a stage's trainer and engines on the same GPUs. Raises `MilesError`
    as building a component does."""
    ours, theirs = _claims("trainer", planned, registry), _claims("engine", planned, registry)
    colocated, runtime = planned.settings.placement == "colocated", planned.specs["runtime"]
    if not ours or not theirs or not planned.samples or not isinstance(runtime, Spec):
        return [], []
    trainer = ours[0]
    reserves = getattr(registry.component("runtime", runtime.name), "reserves", False)
    if reserves and not colocated:
        return [], []  # every worker sees GPUs of its own
    both = {gpu: there for gpu in trainer.gpus if (there := [c for c in theirs if gpu in c.gpus])}
    if not both:
        return [], []
    here = gpus_here()
    rooms = {gpu: gpu_room(here, None if reserves else [gpu]) for gpu in both}
    if colocated:
        return _fit(trainer, both, rooms, in_turns=True)
    faults, _ = _fit(trainer, both, rooms, in_turns=False)
    engines, lag = next(iter(both.values()))[0], planned.settings.max_lag
    turns = "placement=colocated" + (f" and max_lag=0 (it is {lag})" if lag else "")
    return faults, [
        f"placement=split, but {trainer.who} and {engines.who} are both on GPU "
        f"{', '.join(map(str, both))}, and hold each other up; use {turns}, or {engines.apart}"
    ]


def _claims(kind: str, planned: Any, registry: Any) -> list[Claim]:
    spec = planned.specs.get(kind)
    if not isinstance(spec, Spec):
        return []
    component = registry.component(kind, spec.name)
    if (told := getattr(component, "claims", None)) is None:
        return []
    return list(told(schema.build(component.Config, spec.config, owner=spec.name), planned))


def _fit(
    trainer: Claim, both: dict[int, list[Claim]], rooms: dict[int, int], *, in_turns: bool
) -> tuple[list[str], list[str]]:
    """Whether the shared GPU with the least to spare has room: for all at once, or when they take
    turns for whoever works and those who do not release theirs meanwhile."""
    gpu = max(both, key=lambda gpu: sum(c.bytes for c in both[gpu]) - rooms[gpu])
    room, theirs = rooms[gpu], both[gpu]
    engines = sum(claim.bytes for claim in theirs)
    whole = trainer.bytes + engines
    if max(trainer.bytes, engines) > room or whole <= room:  # alone, it is told by whose it is
        return [], []
    staying = sum(claim.bytes for claim in theirs if not claim.releases)
    need = whole
    if in_turns:
        need = max(trainer.bytes + staying, engines + (0 if trainer.releases else trainer.bytes))
    parts = [f"{c.who} ({c.what}: about {_gib(c.bytes)})" for c in (trainer, *theirs)]
    said = f"GPU {gpu} has {_gib(room)} for {' and '.join(parts)}"
    if need <= room:
        return [], [f"{said}, which take turns, but both are awake while weights are published"]
    if not in_turns:
        return [f"{said} at once; use placement=colocated, or {theirs[0].apart}"], []
    stays = [c.who for c in (trainer, *theirs) if not c.releases]
    return [f"{said}, and {' and '.join(stays)} release nothing while the others work"], []


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
