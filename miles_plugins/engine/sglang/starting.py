"""What a server of our own is started with: a folder that says its model, flags, environment.

It starts the process and waits for nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from miles import ConfigError, Context, derive_seed, gpus_shown
from miles_plugins.engine.sglang import command
from miles_plugins.engine.sglang.server import Server, free_port, installed, write_json

__all__ = ["key_of", "model_folder", "start"]

_ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1"}
"""What SGLang takes by environment alone."""


def key_of(config: Any) -> str:
    """The key of servers given by address. Raises `ConfigError`."""
    if not config.api_key_file:
        return ""
    try:
        return Path(config.api_key_file).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"engine sglang: api_key_file: {error}") from error


def model_folder(model: Any, folder: Path) -> Path:
    """The checkpoint; for a model without one, a folder with nothing but its `config.json`."""
    if (own := model.directory()) is not None:
        return Path(own)
    made = folder / "model"
    made.mkdir(parents=True, exist_ok=True)
    write_json(made / "config.json", model.hf_config())
    return made


def start(config: Any, context: Context, folder: Path, slot: int) -> Server:
    """Start server number `slot` of the run. Raises `ConfigError` when it cannot be."""
    if context.model is None or context.precision is None:
        raise ConfigError(
            "engine sglang: url is empty, and servers are started only in a run; give the address "
            "of a running one, such as engine.url=http://127.0.0.1:30000"
        )
    python = config.python or sys.executable
    environment = {**(_ON_CPU if config.device == "cpu" else {}), **config.environment}
    version = installed(python, environment)
    settings = context.settings
    port = config.port + slot if config.port else free_port()
    chosen = command.flags(
        config,
        model_path=str(model_folder(context.model, folder).resolve()),
        dtype=context.precision.engine,
        logits=context.precision.logits,
        port=port,
        slot=slot,
        # of its own: servers with one seed draw alike, and a group's attempts would be copies
        seed=derive_seed(context.seed, "sglang", slot) % 2**31,
        experts=settings.session.experts,
        memory_saver=settings.placement == "colocated" and config.device != "cpu",
        in_place=settings.pause == "in_place",
        shown=gpus_shown(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    return Server(
        command.arguments(python, chosen),
        environment=environment,
        port=port,
        log=Path(context.directory) / "logs" / f"sglang-{slot}.log",
        record=folder / f"sglang-{slot}.json",
        note={"sglang": version},
    )
