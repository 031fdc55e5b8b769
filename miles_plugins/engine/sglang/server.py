"""A server that is ours: started behind a guard, waited for, and ended whatever happens.

Nothing is asked of it here but whether it is there; flags come from `command`.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles import ConfigError, EngineError
from miles_plugins.engine.sglang import guard
from miles_plugins.engine.sglang.command import LAST_PORT
from miles_plugins.engine.sglang.http import Http

__all__ = ["Server", "Slot", "free_port", "installed", "location", "port_fault"]

_POLL_S = 0.25
_HEALTH_S = 30.0  # one answer while it starts: it may compute a token first
_SAID_S = 60.0  # for an interpreter to look for SGLang
_CLAIM_S = 15.0  # for one that is being replaced to let go


class Slot:
    """A number that one engine process of a run holds at a time: it says which URL, port or GPUs
    are its own. Another process gets it when this one is gone, however it went."""

    def __init__(self, directory: Path, limit: int | None) -> None:
        """Take the first that is free, of `limit` if that is a number. Raises `ConfigError`."""
        directory.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + _CLAIM_S
        while True:
            for number in range(4096 if limit is None else limit):
                handle = open(directory / f"slot-{number}.lock", "a")  # noqa: SIM115 - held
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    handle.close()
                    continue
                self.number, self._handle = number, handle
                return
            gc.collect()  # an engine of the stage before, in this process, may hold one
            if time.monotonic() > end:
                raise ConfigError(
                    f"engine sglang: all {limit} addresses of engine.url are taken by other engine "
                    "processes of this run (engine.workers, or an evaluation fleet); give more"
                )
            time.sleep(0.2)

    def release(self) -> None:
        """Let it go; safe to call twice."""
        self._handle.close()


def port_fault(host: str, port: int) -> str:
    """Why nothing can listen there; empty when something can."""
    if not 0 < port <= LAST_PORT:
        return f"port {port} is not from 1 to {LAST_PORT}"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            return f"port {port} of {host} is in use: {error.strerror}"
    return ""


def free_port() -> int:
    """One that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def installed(python: str, environment: Mapping[str, str] | None = None) -> str:
    """The SGLang version that an interpreter finds, or a script in its place that sets variables
    and becomes one, with `environment` added as a server is started with. Raises `ConfigError` when
    there is no such interpreter, or it finds no SGLang."""
    return _said(python, environment, "import importlib.metadata as m; print(m.version('sglang'))")


def location(python: str, environment: Mapping[str, str] | None = None) -> str:
    """The folder of the package that such an interpreter would import. Raises as `installed`."""
    look = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"
    return _said(python, environment, look)


def _said(python: str, environment: Mapping[str, str] | None, look: str) -> str:
    try:
        process = subprocess.Popen(
            [python, "-c", look],
            env=_around(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"engine sglang: python: {python} cannot be run: {error}") from error
    with process:
        try:
            output, _ = process.communicate(timeout=_SAID_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            os.killpg(process.pid, signal.SIGKILL)  # its children too, which may hold the pipe
            if isinstance(error, KeyboardInterrupt):
                raise
            raise ConfigError(
                f"engine sglang: python: {python} was not done within {_SAID_S:g} s, or left a "
                "process that holds its output; it must be an interpreter, or become one by exec"
            ) from None
    if process.returncode:
        raise ConfigError(
            f"engine sglang: {python} has no SGLang installed; it lives in an environment of its "
            "own: give that one's interpreter as engine.python=/path/to/bin/python, or the folder "
            "of its packages as 'engine.environment={PYTHONPATH: /path}'"
        )
    return output.strip()


def _around(environment: Mapping[str, str]) -> dict[str, str]:
    """What a server's interpreter is started with. PYTHONPATH counts; the folder that the run was
    started in does not: what lies there, such as a folder `datasets`, would pass for a package."""
    return {**os.environ, "PYTHONSAFEPATH": "1", **environment}


class Server:
    """One process tree. `close` ends it, and so does the end of this process."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        port: int,
        log: Path,
        record: Path,
        note: Mapping[str, Any],
    ) -> None:
        """Start it; the whole command and what was put into its environment go to `record`, except
        its key, with `note`. Raises `ConfigError` when the port stays in use."""
        end = time.monotonic() + _CLAIM_S
        while fault := port_fault("127.0.0.1", port):
            if time.monotonic() > end:
                raise ConfigError(f"engine sglang: {fault}; engine.port=0 takes a free one")
            time.sleep(_POLL_S)
        self.log = log
        self.key = secrets.token_hex(24)  # no "-" in front, which SGLang would take for a flag
        said = {**note, "command": list(command), "environment": dict(environment)}
        record.write_text(json.dumps(said, indent=1))
        secret = record.with_suffix(".key.yaml")
        secret.touch(mode=0o600)
        secret.write_text(f"api-key: {self.key}\n")  # a command line can be read by everybody
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch(mode=0o600)
        log.chmod(0o600)  # SGLang says all its arguments there, and the key is one
        with log.open("ab") as output:
            self._began = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, *command, "--config", str(secret)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=_around(environment),
            )
        self.url = f"http://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        """Of the guard, and of the whole process group."""
        return self._process.pid

    def lost(self) -> str:
        """How it ended, with the last lines of its log; empty while it runs."""
        status = self._process.poll()
        return "" if status is None else f"the server ended with {status}; {self.tail()}"

    def tail(self, lines: int = 12) -> str:
        """The last that it said, since it was started."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._began, size - 16384))
            text = file.read().decode(errors="replace").splitlines()
        return f"last lines of {self.log.name}:\n" + "\n".join(text[-lines:])

    async def ready(self, http: Http, limit: float) -> None:
        """Wait until it is well. Raises `EngineError` when it ends first, or takes longer than
        `limit` seconds."""
        end = time.monotonic() + limit
        while True:
            if said := self.lost():
                raise EngineError(f"engine sglang: it did not start: {said}")
            try:
                await http.ask("GET", "/health", limit=_HEALTH_S)
                return
            except EngineError:
                if self.lost():
                    continue
            if time.monotonic() > end:
                self.close()
                raise EngineError(
                    f"engine sglang: it did not start within {limit:g} s (engine.start_timeout_s); "
                    f"{self.tail()}"
                )
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """Order its end, and do not wait: the guard ends what does not end by itself."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def wait(self, limit: float) -> int | None:
        """Its exit status once it and its children are gone, None after `limit` seconds."""
        try:
            return self._process.wait(limit)
        except subprocess.TimeoutExpired:
            return None

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()
            self._process.poll()


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(value))
    part.replace(path)
