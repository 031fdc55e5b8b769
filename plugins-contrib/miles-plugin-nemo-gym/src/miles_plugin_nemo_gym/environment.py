"""NeMo Gym's tasks: rows of a JSON Lines file, each with what a server needs to verify it.

What is said in an attempt is `attempt`'s; a server of our own is `serve`'s.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from miles import ChildServer, ConfigError, Context, LazyTasks, Split, Task
from miles_plugin_nemo_gym.attempt import Attempt
from miles_plugin_nemo_gym.serve import server_of
from miles_plugin_nemo_gym.spelling import to_messages, to_tools

_WHERE = "environment nemo_gym"


class NemoGym:
    """A resources server of NeMo Gym: its tools, its state, its verification.

    The model's calls go to the server, one session an attempt; the reward is what its `verify`
    says. The server runs elsewhere (`url`) or is started from the package, which needs Python 3.12.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which server, and which rows."""

        server: str = "mcqa"
        """Folder of the package's `resources_servers` to start; not used with `url`."""
        options: Mapping[str, Any] = field(default_factory=dict)
        """Keys of the server's own configuration, over those of its YAML."""
        url: str = ""
        """A running resources server, such as `http://127.0.0.1:8000`."""
        data: str = ""
        """JSON Lines file of training tasks; empty takes the package's own `data/example.jsonl` of
        the server."""
        heldout_data: str = ""
        """Held-out tasks; empty takes the last `heldout` rows of `data`."""
        heldout: int = 1
        """Rows of `data` that are held out when there is no file of them."""
        timeout_s: float = 120.0
        """Seconds the server may take to answer."""

    def __init__(self, config: Config, context: Context) -> None:
        _check(config)
        self.config = config
        self._server: ChildServer | None = None
        if not config.url:
            log = context.directory / "logs" / f"nemo_gym-{os.getpid()}.log"
            self._server = server_of(config.server, json.dumps(dict(config.options)), log)
        self._rows = _splits(config)

    def tasks(self, split: Split) -> Sequence[Task]:
        """Rows of a split."""
        return LazyTasks(range(len(self._rows[split])), partial(self._task, split))

    def episode(self, task: Task, seed: int) -> Attempt:
        """One attempt."""
        row = self._rows[task.data["split"]][task.data["index"]]
        return Attempt(row, self._reach, where=task.id, timeout_s=self.config.timeout_s)

    def _task(self, split: Split, index: int) -> Task:
        row = self._rows[split][index]
        name = self.config.url or self.config.server
        digest = hashlib.blake2b(json.dumps(row, sort_keys=True).encode(), digest_size=4)
        return Task(
            id=f"{name}-{split}-{index}-{digest.hexdigest()}",
            prompt=tuple(to_messages(row["responses_create_params"]["input"], _WHERE)),
            data={"split": split, "index": index},
        )

    def _reach(self) -> tuple[str, Mapping[str, str]]:
        if self._server is None:
            return self.config.url.rstrip("/"), {}
        return self._server.url(), self._server.headers


def _check(config: NemoGym.Config) -> None:
    if config.heldout < 0 or config.timeout_s <= 0:
        raise ConfigError(
            f"{_WHERE}: heldout is {config.heldout} and timeout_s {config.timeout_s:g}; "
            "at least 0 and above 0 are wanted"
        )
    if config.url:
        if not config.url.startswith(("http://", "https://")):
            raise ConfigError(f"{_WHERE}: url {config.url!r} begins with neither http:// nor https")
        if not config.data:
            raise ConfigError(f"{_WHERE}: url {config.url} comes without tasks; give them in data")
        return
    if find_spec("nemo_gym") is None:
        raise ConfigError(
            f"{_WHERE}: the package nemo-gym is not installed, which needs Python 3.12 or later "
            "(pip install nemo-gym); a server that runs elsewhere is reached by environment.url"
        )
    if not config.server.isidentifier() or find_spec(f"resources_servers.{config.server}") is None:
        raise ConfigError(
            f"{_WHERE}: the package nemo-gym has no resources server {config.server!r}"
        )


def _splits(config: NemoGym.Config) -> dict[Split, list[dict[str, Any]]]:
    train = _read(Path(config.data).expanduser() if config.data else _examples(config.server))
    if config.heldout_data:
        return {"train": train, "heldout": _read(Path(config.heldout_data).expanduser())}
    size = len(train) - config.heldout
    if size < 1:
        raise ConfigError(
            f"{_WHERE}: {len(train)} rows, of which environment.heldout ({config.heldout}) leaves "
            "none to train on"
        )
    return {"train": train[:size], "heldout": train[size:]}


def _examples(server: str) -> Path:
    spec = find_spec(f"resources_servers.{server}")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(folder) / "data" / "example.jsonl").is_file():
            return path
    raise ConfigError(f"{_WHERE}: {server} comes without data/example.jsonl; give environment.data")


def _read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file, every one of which could be put as messages and tools."""
    if not path.is_file():
        raise ConfigError(f"{_WHERE}: there is no file {path}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{_WHERE}: {path} line {number}"
        try:
            row = json.loads(line)
            params = row["responses_create_params"]
            to_messages(params["input"], where)
            to_tools(params.get("tools"), where)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{where} is no task: {type(error).__name__}: {error}; an object with "
                "responses_create_params is wanted"
            ) from error
        rows.append(row)
    return rows
