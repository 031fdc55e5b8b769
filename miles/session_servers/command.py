"""`miles sessions serve`: the session server alone, over an engine that somebody else runs.

Chooses components as a run does and starts none of a run's processes; what is served is
`miles.session.server`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles.composing.compose import quoted
from miles.config import Plan, Stage, compose
from miles.errors import ConfigError
from miles.protocols import Context, Spec
from miles.seeds import derive_seed
from miles.serving.daemon import asked_to_stop, secret_in
from miles.session import Sessions
from miles.session.server import make_app, serve
from miles.settings import Settings
from miles.types import Sampling

__all__ = [
    "directory_of",
    "planned",
    "refuse_another_number",
    "serve_alone",
    "serve_command",
]

_EXPERIMENT = "experiment=sessions"
_SHORT = ("host", "port")
_MOST = 64


def serve_command(overrides: Sequence[str], *, registry: Any, folders: Sequence[str] = ()) -> int:
    """Serve until SIGINT or SIGTERM. `port` and `host` stand for `session.port` and `session.host`;
    `workers=N`
    serves from N processes, each with the sessions that their ids give it; everything else is an
    override as a run takes it. Raises `ConfigError`, `EngineError`."""
    overrides, workers = _workers(overrides)
    if workers > 1:
        from miles.session_servers.fleet import serve_fleet

        plan = planned(overrides, registry=registry, folders=folders)
        settings = plan.stages[0].settings
        directory = directory_of(settings)
        return asyncio.run(
            serve_fleet(
                overrides,
                workers=workers,
                directory=directory,
                token=secret_in(directory / "admin_token"),
                settings=settings,
                registry=registry,
                folders=folders,
            )
        )
    plan = planned(overrides, registry=registry, folders=folders)
    refuse_another_number(directory_of(plan.stages[0].settings), 1)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve_alone(plan.stages[0], plan.registry))
    return 0


def _workers(overrides: Sequence[str]) -> tuple[list[str], int]:
    """Overrides without `workers`, and its value."""
    found = [text for text in overrides if text.startswith("workers=")]
    count = found[-1].partition("=")[2] if found else "1"
    if not count.isdecimal() or not 1 <= int(count) <= _MOST:
        raise ConfigError(f"workers: {count!r} is not a number of processes from 1 to {_MOST}")
    return [text for text in overrides if text not in found], int(count)


def planned(overrides: Sequence[str], *, registry: Any, folders: Sequence[str] = ()) -> Plan:
    """What these words of `miles sessions serve` choose. Raises `ConfigError`."""
    given = [quoted(_spelled(text)) for text in overrides]
    values = dict(text.partition("=")[::2] for text in overrides)
    if not values.keys() & {"model.path", "tito", "tito.path"}:
        raise ConfigError(
            "model.path: the directory of the checkpoint that the engine serves is wanted; its "
            "tokenizer makes the tokens of every session"
        )
    given[:0] = registry.filled_in(overrides)
    return compose([_EXPERIMENT, *given], registry=registry, folders=folders).verify()


def _spelled(text: str) -> str:
    name = text.partition("=")[0]
    return f"session.{text}" if name in _SHORT else text


async def serve_alone(
    stage: Stage, registry: Any, *, until: Callable[[], Awaitable[None]] | None = None
) -> None:
    """One server in this process, until it is asked to stop (or `until` returns)."""
    settings = stage.settings
    directory = directory_of(settings)
    built = _build(stage, registry, directory)
    engine, tito = built["engine"], built["tito"]
    sessions: Sessions | None = None
    try:
        await engine.version()  # it is there, and answers
        max_len = (await engine.health()).get("max_len")
        sessions = Sessions(
            tito,
            rules=settings.session,
            max_tokens=None if max_len is None else int(max_len),
            directory=directory / "sessions",
        )
        app = make_app(
            sessions,
            engine=engine,
            tito=tito,
            sampling=Sampling(
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
            ),
            seed_of=lambda id: derive_seed(settings.seed, "session", id),
            model=_name(built["model"]),
            admin_token=secret_in(directory / "admin_token"),
            client_sampling=settings.session.client_sampling,
        )
        async with serve(app, settings.session.host, settings.session.port) as address:
            print(f"sessions are served at {address}", flush=True)
            print(f"open one with the token in {directory / 'admin_token'}:", flush=True)
            token = f'"Authorization: Bearer $(cat {directory / "admin_token"})"'
            print(f"  curl -X POST -H {token} {address}/sessions", flush=True)
            if len(sessions):
                print(f"{len(sessions)} sessions of before go on", flush=True)
            await (asked_to_stop() if until is None else until())
    finally:
        if sessions is not None:
            sessions.stop()
        if (close := getattr(engine, "close", None)) is not None:
            await close()


def refuse_another_number(directory: Path, workers: int) -> None:
    """Sessions stay with the number of servers that they were opened under: their ids say which of
    them has them. Raises `ConfigError`."""
    several = len(list(directory.glob("server-*")))
    alone = any(path.name != "lock" for path in (directory / "sessions").glob("*"))
    others = {several if several else workers, 1 if alone else workers} - {workers}
    if others:
        before = others.pop()
        raise ConfigError(
            f"workers: {directory} holds sessions of {before} server{'s' * (before > 1)}, not "
            f"{workers}; go on with workers={before}, or choose another run.name"
        )


def directory_of(settings: Settings) -> Path:
    """Where tokens and journals live, made when it is not there."""
    directory = Path(settings.run.dir).expanduser() / (settings.run.name or "sessions")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _build(stage: Stage, registry: Any, directory: Path) -> Mapping[str, Any]:
    """Model, tito handler and engine, in the order in which they need each other."""
    spec = stage.specs["engine"]
    if isinstance(spec, Spec):
        engine = registry.component("engine", spec.name)
        if not getattr(engine, "attached", False):
            raise ConfigError(
                f"engine: {spec.name!r} lives inside a run; sessions alone are served over an "
                "engine that already runs: leave the choice out, and give engine.url"
            )
    built: dict[str, Any] = {}
    for kind in ("model", "tito", "engine"):
        context = Context(
            directory=directory, seed=stage.settings.seed, settings=stage.settings, **built
        )
        made = registry.build(stage.specs[kind], context)
        if kind == "engine":
            return {**built, kind: made}
        built[kind] = made
    return built


def _name(model: Any) -> str:
    folder = model.directory()
    return "policy" if folder is None else Path(folder).resolve().name
