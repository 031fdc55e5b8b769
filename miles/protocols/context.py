"""What a component is built from: its spec, and what it may know of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.settings import Settings

__all__ = ["Context", "Spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A component by name: everything another process needs to build it."""

    kind: str
    """One of `KINDS`."""
    name: str
    """Registered name."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Plain values for its `Config`."""
    part: str = ""
    """Name under which a worker holds it; empty is its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a component may know of the run. Fields are filled in dependency order; later ones are
    None."""

    directory: Path
    """The run's directory; a component may write below it."""
    seed: int = 0
    """The run's seed."""
    settings: Settings = field(default_factory=Settings)
    """The loop's keys of this stage."""
    rank: int = 0
    """This worker's rank among its kind."""
    world: int = 1
    """Workers of its kind."""
    master: str = ""
    """Where ranks meet when world > 1: `host:port` at which rank 0 listens (its own may end in
    `?listen_fd=N`, a descriptor that is bound there for it), or `file://PATH` of a file that they
    share and that is not there yet."""
    plugins: Mapping[str, Any] = field(default_factory=dict)
    """How another process loads the same plugins (`selection`), and their `provenance`."""
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Reward functions that plugins registered with `miles_rewards`, by name."""
    filters: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Admission filters that plugins registered with `miles_filters`, by name."""
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions for models to call that plugins registered with `miles_tools`, by name."""
    agents: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Black-box agents that plugins registered with `miles_agents`, by name."""
    model: Any = None
    """The `Model`."""
    precision: Any = None
    """The `Precision`."""
    tito: Any = None
    """The `Tito` handler."""
    sandbox: Any = None
    """The `Sandbox`, when one was chosen."""
    environment: Any = None
    """The `Environment`."""
    environments: Mapping[str, Any] = field(default_factory=dict)
    """By evaluation set, environments other than the run's in which an evaluator plays."""
