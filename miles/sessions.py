"""`miles sessions serve`: the session server alone, over an engine that somebody else runs.

Chooses components as a run does and starts none of a run's processes; what is served is
`miles.session.server`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles.compose import quoted
from miles.config import Stage, compose
from miles.errors import ConfigError
from miles.protocols import Context, Spec
from miles.seeds import derive_seed
from miles.session import Sessions
from miles.session.server import make_app, serve
from miles.settings import Settings
from miles.types import Sampling

__all__ = ["serve_command"]

_EXPERIMENT = "experiment=sessions"
_SHORT = ("host", "port")


def serve_command(overrides: Sequence[str], *, registry: Any, folders: Sequence[str] = ()) -> int:
    """Serve until SIGINT or SIGTERM. `port` and `host` stand for `session.port` and `session.host`;
    everything else is an override as a run takes it. Raises `ConfigError`, `EngineError`."""
    given = [quoted(_spelled(text)) for text in overrides]
    if (family := _family(overrides, registry)) is not None:
        given.insert(0, f"model={family}")
    plan = compose([_EXPERIMENT, *given], registry=registry, folders=folders).verify()
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(plan.stages[0], plan.registry))
    return 0


def _spelled(text: str) -> str:
    name = text.partition("=")[0]
    return f"session.{text}" if name in _SHORT else text


def _family(overrides: Sequence[str], registry: Any) -> str | None:
    """The registered model whose checkpoint `model.path` is, unless a model was chosen."""
    values = dict(text.partition("=")[::2] for text in overrides)
    if "model" in values or not (path := values.get("model.path")):
        return None
    try:
        config = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} is no checkpoint: {error}") from error
    known: dict[str, Any] = {
        name: registry.component("model", name) for name in registry.names("model")
    }
    last = [name for name, model in known.items() if getattr(model, "fallback", False)]
    first = [name for name in known if name not in last and known[name].matches(config)]
    return next(iter(first + last), None)


async def _serve(stage: Stage, registry: Any) -> None:
    settings = stage.settings
    directory = _directory(settings)
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
            admin_token=_admin_token(directory / "admin_token"),
            client_sampling=settings.session.client_sampling,
        )
        async with serve(app, settings.session.host, settings.session.port) as address:
            print(f"sessions are served at {address}", flush=True)
            print(f"open one with the token in {directory / 'admin_token'}:", flush=True)
            token = f'"Authorization: Bearer $(cat {directory / "admin_token"})"'
            print(f"  curl -X POST -H {token} {address}/sessions", flush=True)
            if len(sessions):
                print(f"{len(sessions)} sessions of before go on", flush=True)
            await _asked_to_stop()
    finally:
        if sessions is not None:
            sessions.stop()
        if (close := getattr(engine, "close", None)) is not None:
            await close()


def _directory(settings: Settings) -> Path:
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


def _admin_token(path: Path) -> str:
    """The secret in a file that only its owner reads; made at the first start, so that clients of
    before a restart still have the right one."""
    with suppress(FileExistsError):
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(made, "w") as file:
            file.write(secrets.token_urlsafe(32))
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise ConfigError(f"{path} is empty; remove it, and a new token is made")
    return token


async def _asked_to_stop() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
