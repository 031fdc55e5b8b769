"""A server of an OpenEnv package in a process of its own (`python -m miles_plugin_openenv.serve
NAME`).

How such a process starts, listens and ends is `miles.ChildServer`'s business.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from miles import ChildServer, serve_child

__all__ = ["server_of"]


def server_of(package: str, log: Path) -> ChildServer:
    """The server of a package, one for all of this process; `log` is where a new one writes."""
    who = f"environment openenv: the server of {package}"
    return ChildServer.of("miles_plugin_openenv.serve", package, who=who, log=log)


if __name__ == "__main__":
    serve_child(lambda: import_module(f"{sys.argv[1]}.server.app").app)
