"""`python -m quire.core.network.ray.probe`: what this machine's Ray cluster has, a line; code 1 for none."""

from __future__ import annotations

import os

from ....ipc.errors import ConfigError
from .ray_cluster import RayCluster, load_ray


def main() -> None:
    """Entry point."""
    try:
        cluster = RayCluster(load_ray())
        text, code = f"{len(cluster.nodes)} nodes: {cluster.describe({'CPU': 0.0, 'GPU': 0.0})}", 0
    except ConfigError as error:
        text, code = error.allowed, 1
    print(text, flush=True)
    os._exit(code)  # as a launcher does; Ray's own goodbye takes a second


if __name__ == "__main__":
    main()
