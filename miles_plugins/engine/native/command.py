"""`miles serve`: an engine of this process behind SGLang's native routes.

Chooses components as a run does, and starts none of a run's processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles import ConfigError, Context, asked_to_stop, secret_in

__all__ = ["add"]

_HOST, _PORT = "127.0.0.1", 30000


def add(subparsers: Any) -> None:
    """The words of the command line."""
    words = "serve an engine over HTTP, with SGLang's native routes"
    command = subparsers.add_parser("serve", help=words, description=words + ".")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="model.path=DIR port=N host=ADDRESS, and KEY=VALUE as in a run",
    )
    command.add_argument("--config-dir", action="append", default=[], metavar="DIR")
    command.set_defaults(func=serve)


def serve(args: Any) -> int:
    """Serve until SIGINT or SIGTERM. A checkpoint in `model.path` is served as version 0; without
    one the engine waits for weights. Raises `ConfigError`, `EngineError`, `WeightSyncError`."""
    host, port, overrides = _place(args.overrides)
    one_stage = any(text.startswith("experiment=") for text in overrides)
    chosen = [] if one_stage else ["experiment=grpo"]
    args.overrides = [*chosen, *args.registry.filled_in(overrides), *overrides]
    stage = args.plan().verify().stages[0]
    settings = stage.settings
    directory = Path(settings.run.dir).expanduser() / (settings.run.name or "serve")
    directory.mkdir(parents=True, exist_ok=True)
    if host not in (_HOST, "::1", "localhost"):
        print(f"miles: warning: {host} can be reached from elsewhere; only the token guards it")
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(stage, args.registry, directory, host, port))
    return 0


def _place(overrides: Sequence[str]) -> tuple[str, int, list[str]]:
    """`host` and `port` of the overrides, and the rest."""
    values = dict(text.partition("=")[::2] for text in overrides)
    rest = [text for text in overrides if text.partition("=")[0] not in ("host", "port")]
    port = values.get("port", str(_PORT))
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"port: {port!r} is not a number from 0 to 65535")
    return values.get("host", _HOST), int(port), rest


async def _serve(stage: Any, registry: Any, directory: Path, host: str, port: int) -> None:
    from miles_plugins.engine.native.routes import Native, listening

    engine, model = _build(stage, registry, directory)
    if model.directory() is not None and not model.random:
        await engine.load_directory(0, Path(model.directory()))
    token_file = directory / "token"
    native = Native(engine, token=secret_in(token_file), pause=stage.settings.pause)
    async with AsyncExitStack() as held:
        try:
            address = await held.enter_async_context(listening(native, host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host} cannot be listened at: {error.strerror}"
            ) from error
        print(f"the engine is served at {address}", flush=True)
        print(f"clients send the token in {token_file}", flush=True)
        print(f"  engine=sglang engine.url={address} engine.api_key_file={token_file}")
        if await engine.version() < 0:
            print("it has no weights yet: POST /update_weights_from_disk", flush=True)
        await asked_to_stop()


def _build(stage: Any, registry: Any, directory: Path) -> tuple[Any, Any]:
    """The engine and its model. Raises `ConfigError` for an engine that cannot be served."""
    name = stage.specs["engine"].name
    kind = registry.component("engine", name)
    if not kind.samples or not hasattr(kind, "load_directory") or getattr(kind, "attached", False):
        raise ConfigError(
            f"engine: {name!r} is not one that can be served: it must sample in this process, and "
            "read weights from a directory, as engine=torch does"
        )
    context = Context(directory=directory, seed=stage.settings.seed, settings=stage.settings)
    for part in ("model", "precision"):
        context = replace(context, **{part: registry.build(stage.specs[part], context)})
    return registry.build(stage.specs["engine"], context), context.model
