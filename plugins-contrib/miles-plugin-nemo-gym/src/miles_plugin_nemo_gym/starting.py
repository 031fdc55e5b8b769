"""A process for a resources server: started with the first attempt, stopped with its owner.

What happens inside the process is `serve`'s business.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import IO

from miles import EpisodeError

START_S = 120.0
"""Seconds that importing the package and opening the port may take on a busy machine."""
STOP_S = 10.0
_CHILD = "miles_plugin_nemo_gym.serve"


_servers: weakref.WeakValueDictionary[str, LocalServer] = weakref.WeakValueDictionary()


def server_of(name: str, options: str, log: Path) -> LocalServer:
    """The server of that name and those options (JSON), one for all of this process; `log` is where
    a new one writes."""
    found = _servers.get(f"{name} {options}")
    if found is None:
        found = _servers[f"{name} {options}"] = LocalServer(name, options, log)
    return found


class LocalServer:
    """One child process with a resources server on a loopback port, behind a token of its own."""

    def __init__(self, name: str, options: str, log: Path) -> None:
        self._name, self._options, self._log = name, options, log
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[str]] = []
        self._url = ""
        self._token = secrets.token_urlsafe(24)
        weakref.finalize(self, _stop, self._running)

    @property
    def headers(self) -> dict[str, str]:
        """What a client must send along."""
        return {"Authorization": f"Bearer {self._token}"}

    def url(self) -> str:
        """Where it listens; starts it when it does not run. Blocks. Raises `EpisodeError` with the
        end of its log when it does not come up."""
        with self._lock:
            if self._running and self._running[0].poll() is None:
                return self._url
            _stop(self._running)
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        _CHILD,
                        self._name,
                        self._options,
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self._running.append(process)
            with contextlib.suppress(BrokenPipeError):
                print(self._token, file=process.stdin, flush=True)
            port = _line(process.stdout, START_S)
            if not port.strip().isdigit():
                _stop(self._running)
                tail = self._log.read_text("utf-8", "replace").strip()[-800:]
                raise EpisodeError(
                    f"environment nemo_gym: the server {self._name} did not start within "
                    f"{START_S:g} s; its log {self._log} ends with: {tail or '(nothing)'}"
                )
            self._url = f"http://127.0.0.1:{int(port)}"
            return self._url


def _line(stream: IO[str] | None, seconds: float) -> str:
    """The first line that is a number; empty when the stream ends or time runs out."""
    until = time.monotonic() + seconds
    while stream and (left := until - time.monotonic()) > 0:
        if not select.select([stream], [], [], left)[0]:
            break
        line = stream.readline()
        if not line or line.strip().isdigit():
            return line
    return ""


def _stop(running: list[subprocess.Popen[str]]) -> None:
    """End the process and wait for it."""
    while running:
        process = running.pop()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream:
                    stream.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
