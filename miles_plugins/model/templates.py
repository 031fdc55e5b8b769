"""Which tito handler a checkpoint's chat template asks for, by signs in its text.

A look at text only; whether the handler fits, it says itself when it is built. Without a template a
family's own handler is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles import ConfigError

__all__ = ["GENERIC", "Signs", "handler_for", "template_of"]

GENERIC = "generic"
"""The handler of templates that are no family's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Texts that tell a template."""

    tito: str
    """Name of the handler."""
    has: tuple[str, ...] = ()
    """All of these are in it."""
    lacks: tuple[str, ...] = ()
    """None of these is."""

    def fit(self, template: str) -> bool:
        """Whether a template shows them."""
        has = all(sign in template for sign in self.has)
        return has and not any(sign in template for sign in self.lacks)


def handler_for(signs: tuple[Signs, ...], path: str) -> str:
    """The first handler whose signs the template in a directory shows, `generic` where none does,
    and the first of all where there is no template."""
    template = template_of(Path(path).expanduser()) if path else ""
    if not template:
        return signs[0].tito
    return next((each.tito for each in signs if each.fit(template)), GENERIC)


def template_of(directory: Path) -> str:
    """The chat template among a directory's files; empty when there is none. Raises `ConfigError`
    for a file that is no JSON object."""
    own = directory / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"model: {path} is not a JSON object: {error}") from error
        if isinstance(found, list):  # several, each with its name
            found = {each.get("name"): each.get("template") for each in found}
        if isinstance(found, Mapping):
            found = found.get("default")
        if found:
            return str(found)
    return ""
