"""What a running cluster offers, asked by a process of its own: this one stays free of Ray.

Starts no worker and no cluster.
"""

from __future__ import annotations

import json
import subprocess
import sys

from miles import ConfigError
from miles_plugins.runtime.ray.cluster import Cluster, connected, reach
from miles_plugins.runtime.ray.layout import Node

__all__ = ["look"]


def look(address: str, *, timeout_s: float) -> list[Node]:
    """Its living nodes. Raises `ConfigError` when it cannot be reached, or when this machine is not
    a node of it."""
    if fault := reach(address):
        raise ConfigError(fault)
    command = [sys.executable, "-P", "-m", __name__, address]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"address {address!r}: Ray did not answer within {timeout_s:g} s (start_timeout_s)"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"address {address!r}: {lines[-1]}")
    return [Node(**node) for node in json.loads(done.stdout.splitlines()[-1])]


def main() -> int:
    """Print the nodes of the cluster that the command line names, as JSON."""
    cluster = Cluster()
    try:
        with connected(sys.argv[1], cpus=None, gpus=None) as here:
            cluster.here = here
            fields = ("id", "address", "cpus", "gpus")
            print(json.dumps([{f: getattr(n, f) for f in fields} for n in cluster.nodes()]))
    except ConfigError as error:
        said = " ".join(str(error).split()).removeprefix("runtime ray: ")  # who asks says that
        print(said, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
