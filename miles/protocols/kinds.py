"""The one table of kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles.protocols.around import Evaluator, Runtime, Tracker
from miles.protocols.model import Model, Precision, Tito
from miles.protocols.rollout import Environment, Sandbox, Selector
from miles.protocols.train import Algorithm, Engine, Trainer, Transport

__all__ = ["KINDS", "Kind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One row of the table of kinds."""

    name: str
    """The word used in namespaces, Hydra groups, hooks and on the command line."""
    protocol: type
    """What a component must do."""
    decides: str
    """One clause for people."""
    many: bool = False
    """Several may be chosen at once: `tracker=[console,jsonl]`."""
    optional: bool = False
    """May be left out: `sandbox=null`."""
    async_methods: tuple[str, ...] = ()
    """Methods that must be coroutines."""


def _kind(name: str, protocol: type, decides: str, **more: Any) -> tuple[str, Kind]:
    return name, Kind(name=name, protocol=protocol, decides=decides, **more)


KINDS: Mapping[str, Kind] = dict(
    (
        _kind(
            "environment", Environment, "what a task is, how an episode unfolds, what it is worth"
        ),
        _kind(
            "sandbox",
            Sandbox,
            "where an agent's commands run",
            optional=True,
            async_methods=("open",),
        ),
        _kind("selector", Selector, "which task next, which groups are worth training on"),
        _kind("tito", Tito, "how one model family's messages become tokens, and back"),
        _kind("model", Model, "one registration for a model family"),
        _kind("precision", Precision, "one quantization contract for both sides"),
        _kind("trainer", Trainer, "who updates the weights"),
        _kind(
            "engine",
            Engine,
            "who samples tokens",
            async_methods=(
                "generate",
                "score",
                "abort",
                "pause",
                "resume",
                "load",
                "version",
                "health",
                "sleep",
                "wake",
            ),
        ),
        _kind("transport", Transport, "how weights move", async_methods=("publish",)),
        _kind("algorithm", Algorithm, "what to learn from groups"),
        _kind(
            "evaluator",
            Evaluator,
            "how a policy version is scored",
            optional=True,
            async_methods=("evaluate",),
        ),
        _kind(
            "runtime",
            Runtime,
            "where processes live",
            async_methods=("start", "rebuild", "end", "stop"),
        ),
        _kind("tracker", Tracker, "where metrics go", many=True, optional=True),
    )
)
"""Every kind. A new kind is a design change; a new name within one is a plugin."""
