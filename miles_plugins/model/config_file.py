"""A checkpoint's `config.json` as it is read: an object, whose shape has the types that everybody
counts on.

Which families there are, and what else a config says, is not its affair.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles import ConfigError

__all__ = ["read_config"]

_OBJECTS = ("text_config", "quantization_config", "rope_parameters", "rope_scaling")
_NUMBERS = ("num_hidden_layers", "vocab_size", "max_position_embeddings")
"""Of other sizes some families have one a layer."""
_LARGEST = 2**63 - 1


def read_config(path: Path, who: str, alone: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the file holds. Raises `ConfigError` in the name of `who` when it cannot be read, or a
    value has another type than is read everywhere; `alone` are more keys with one number each."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        held = sorted(p.name for p in path.parent.glob("*"))[:8]
        raise ConfigError(
            f"{who}: {path} does not exist; the directory holds {', '.join(held) or 'nothing'}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{who}: {path} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{who}: {path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{who}: {path} holds a {type(found).__name__}, not an object")
    faults = [*_faults(found, alone)]
    if isinstance(text := found.get("text_config"), dict):
        faults += [f"text_config.{fault}" for fault in _faults(text, alone)]
    if faults:
        raise ConfigError(f"{who}: {path}: {'; '.join(faults)}")
    return found


def _faults(config: Mapping[str, Any], alone: tuple[str, ...]) -> Iterator[str]:
    for name, value in config.items():
        if name == "model_type" and not isinstance(value, str):
            yield f"model_type is {value!r}, no name"
        elif name in _OBJECTS and not isinstance(value, dict | None):
            yield f"{name} is {value!r}, no object"
        elif name in (*_NUMBERS, *alone) and not _whole(value):
            yield f"{name} is {value!r}, no whole number"
        elif type(value) is int and abs(value) > _LARGEST:
            yield f"{name} is a number of more than 64 bits"


def _whole(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value <= _LARGEST)
