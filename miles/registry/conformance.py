"""Whether a component does what its kind's protocol says: methods, parameters, coroutines.

Looks only; no method is called. Behaviour is `miles.testing.contract`'s business.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from miles.errors import ContractError
from miles.protocols import KINDS, Spec
from miles.registry import schema
from miles.types import IMAGE_PARTS, Task

__all__ = ["RESERVED", "carried", "check_class", "component_faults", "trained"]

RESERVED = "name"
"""The key by which a node names its component; no `Config` may have a field of that name."""

_PROMPTS = 32  # looked at for images
_DEPTHS = {
    "episode": (("task", "seed"), False),
    "play": (("task", "seed", "tools"), True),
    "rollout": (("task", "tools"), True),
}
"""The ways an environment may take over: arguments, and whether a coroutine."""


def check_class(kind: str, name: str, component: Any) -> None:
    """Raise `ContractError` unless it is a class with a frozen `Config` and our constructor."""
    where = f"{kind} {name!r}"
    if not isinstance(component, type):
        raise ContractError(f"{where}: the entry point names {component!r}, which is not a class")
    config = getattr(component, "Config", None)
    if config is None:
        raise ContractError(
            f"{where}: class {component.__qualname__} has no nested Config dataclass"
        )
    if not schema.frozen_dataclass(config):
        raise ContractError(f"{where}: {component.__qualname__}.Config is not a frozen dataclass")
    if any(f.name == RESERVED for f in dataclasses.fields(config)):
        raise ContractError(
            f"{where}: {component.__qualname__}.Config has "
            f"a field {RESERVED!r}, the word that names the component"
        )
    schema.hints(config)
    if not _accepts(component, 2, ()):
        raise ContractError(
            f"{where}: {component.__qualname__} cannot be built as Class(config, context)"
        )


def carried(planned: Any, registry: Any) -> list[str]:
    """Whether a stage's transport brings weights in a way in which its engine takes them.

    The ways are `tensors` (`Engine.load`), `directory` (`load_directory`) and `native`
    (`updating`); a transport may name those it `brings`, by default the first, and an engine those
    it `takes`, by default those it has methods for.
    """
    specs = [planned.specs.get(kind) for kind in ("transport", "engine")]
    if not planned.samples or not all(isinstance(spec, Spec) for spec in specs):
        return []
    transport, engine = (registry.component(spec.kind, spec.name) for spec in specs)
    brings = getattr(transport, "brings", ("tensors",))
    has = {"tensors": "load", "directory": "load_directory", "native": "updating"}
    takes = getattr(
        engine, "takes", [way for way, method in has.items() if hasattr(engine, method)]
    )
    if set(brings) & set(takes):
        return []
    return [
        f"transport {specs[0].name!r} brings weights as {' or '.join(brings)}, and engine "
        f"{specs[1].name!r} takes them as {' or '.join(takes) or 'nothing'}"
    ]


def trained(planned: Any, registry: Any) -> list[str]:
    """Whether a stage's trainer takes what its samples will carry beside tokens: experts, which one
    takes that `replays_experts`, and images, which none takes."""
    trainer, faults = planned.specs.get("trainer"), []
    if not planned.settings.steps or not isinstance(trainer, Spec):
        return []
    if planned.settings.session.experts and planned.samples:
        component = registry.component("trainer", trainer.name)
        if not getattr(component, "replays_experts", False):
            faults.append(
                f"session.experts=true and trainer {trainer.name!r}: it does not replay the "
                "experts that an engine chose (no replays_experts) and would refuse the first "
                "batch; use session.experts=false, or a trainer that replays"
            )
    environment, spec = planned.built.get("environment"), planned.specs.get("environment")
    if environment is None or not isinstance(spec, Spec):
        return faults
    tasks = environment.tasks("train")
    some = (tasks[i] for i in range(min(len(tasks), _PROMPTS)))
    if (shown := next((task.id for task in some if _has_images(task)), None)) is not None:
        faults.append(
            f"environment {spec.name!r}: task {shown!r} has images, which no trainer takes yet; "
            "train on tasks without (an evaluator may play those with images)"
        )
    return faults


def _has_images(task: Task) -> bool:
    messages = () if isinstance(task.prompt, str) else task.prompt
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in parts)


def component_faults(kind: str, component: Any) -> list[str]:
    """What an instance (or a class, by its methods) lacks or declares wrongly."""
    spec = KINDS[kind]
    faults = []
    for member, declared in vars(spec.protocol).items():
        if member.startswith("_"):
            continue
        if not callable(declared) and not isinstance(declared, classmethod):
            if not _has(component, member):
                faults.append(f"has no attribute {member}")
            continue
        function = declared.__func__ if isinstance(declared, classmethod) else declared
        positional, keywords = _parameters(function)
        faults += _method(
            component, member, positional, keywords, coroutine=member in spec.async_methods
        )
    if not isinstance(component, type):
        annotated = inspect.get_annotations(spec.protocol)
        faults += [f"has no attribute {a}" for a in annotated if not _has(component, a)]
    if kind == "environment":
        faults += _depth(component)
    return faults


def _depth(component: Any) -> list[str]:
    present = [d for d in _DEPTHS if _has(component, d)]
    if not present:
        return ["must define at least one of episode, play, rollout; it has none of them"]
    return [
        fault
        for depth in present
        for fault in _method(component, depth, _DEPTHS[depth][0], (), coroutine=_DEPTHS[depth][1])
    ]


def _parameters(function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found = list(inspect.signature(function).parameters.values())[1:]
    return (
        tuple(p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty),
        tuple(p.name for p in found if p.kind is p.KEYWORD_ONLY),
    )


def _method(
    component: Any,
    name: str,
    positional: tuple[str, ...],
    keywords: tuple[str, ...],
    *,
    coroutine: bool,
) -> list[str]:
    call = f"{name}({', '.join([*positional, *(f'{k}=' for k in keywords)])})"
    if not _has(component, name):
        return [f"has no method {call}"]
    method = getattr(component, name)
    if not callable(method):
        return [f"{name} is {type(method).__name__}, not a method {call}"]
    if coroutine and not inspect.iscoroutinefunction(method):
        return [f"{name} must be a coroutine: async def {call}"]
    if not coroutine and inspect.iscoroutinefunction(method):
        return [f"{name} must not be a coroutine: def {call}"]
    unbound = isinstance(component, type) and inspect.isfunction(method)
    if not _accepts(method, len(positional) + unbound, keywords):
        return [f"{name}{inspect.signature(method)} cannot be called as {call}"]
    return []


def _accepts(function: Any, positional: int, keywords: tuple[str, ...]) -> bool:
    try:
        inspect.signature(function).bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    except ValueError:
        return True  # a built-in without a signature: nothing can be said
    return True


def _has(component: Any, name: str) -> bool:
    # a property is looked up on the class, so that asking does not run it
    owner = component if isinstance(component, type) else type(component)
    return hasattr(owner, name) or (owner is not component and hasattr(component, name))
