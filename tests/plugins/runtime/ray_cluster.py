"""A small Ray cluster on loopback, for tests: two nodes with addresses of their own.

Run as a program, it prints the head's address and ends with its standard input.
"""

from __future__ import annotations

import sys


def main() -> None:
    from ray.cluster_utils import Cluster

    cpus, gpus = map(int, sys.argv[1:3])
    cluster = Cluster()
    for node in ("127.0.0.1", "127.0.0.2"):
        cluster.add_node(
            num_cpus=cpus,
            num_gpus=gpus,
            node_ip_address=node,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
        )
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
