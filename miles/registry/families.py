"""Which registered model a checkpoint is, and what a command line that names one leaves out.

It reads `config.json` and asks registrations; it composes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.errors import ConfigError

if TYPE_CHECKING:
    from miles.plugins import Registry

__all__ = ["family", "filled_in", "hf_config"]


def hf_config(directory: str | Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint. Raises `ConfigError`."""
    path = Path(directory).expanduser() / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory} is no checkpoint: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{directory} is no checkpoint: {path.name} holds no object")
    return found


def family(config: Mapping[str, Any], registry: Registry) -> str | None:
    """The registered model that claims a checkpoint; those that take what nobody else does are
    asked last, since they may import much to answer."""
    known = {name: registry.component("model", name) for name in registry.names("model")}
    order = sorted(known, key=lambda name: bool(getattr(known[name], "fallback", False)))
    return next((name for name in order if known[name].matches(config)), None)


def filled_in(overrides: Sequence[str], registry: Registry) -> list[str]:
    """What overrides with `model.path` leave out: `model`, where a registration claims the
    checkpoint, and `model.init=load`. Raises `ConfigError` for a directory that is none."""
    values = dict(text.partition("=")[::2] for text in overrides)
    if not (path := values.get("model.path")):
        return []
    made = []
    if (name := values.get("model")) is None:
        try:
            name = family(hf_config(path), registry)
        except ConfigError as error:
            raise ConfigError(f"model.path: {error}") from error
        if name is None:
            return []
        made.append(f"model={name}")
    known = name in registry.names("model")
    fields = registry.component("model", name).Config.__dataclass_fields__ if known else ()
    if "init" in fields and "model.init" not in values:
        made.append("model.init=load")
    return made
