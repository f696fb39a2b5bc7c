"""Ray for tests: nodes that have the time they need to start, and clusters of several of them."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from rayrpc._concurrency.deadlines import Deadline

__all__ = ["simulated_cluster", "wait_for_nodes"]

START_SECONDS = 120.0


@functools.cache
def wait_for_nodes() -> None:
    """Have this process wait as long as a busy machine takes until a node of Ray has started.

    Ray waits a fixed 30 s, and leaves the processes of a node that took longer.
    """
    from ray._private import services

    get_node = services.get_node

    def get_started_node(*args: Any, **kwargs: Any) -> Any:
        deadline = Deadline(START_SECONDS)
        while True:
            try:
                return get_node(*args, **kwargs)
            except RuntimeError:
                if deadline.expired:
                    raise
                time.sleep(0.2)

    services.get_node = get_started_node


@contextlib.contextmanager
def simulated_cluster() -> Iterator[Any]:
    """Start a cluster of nodes that are all on this machine; it ends with the block.

    Yields:
        The ``ray.cluster_utils.Cluster``; its head has 2 CPUs, ``add_node`` starts other nodes.
    """
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rr-", dir="/tmp")  # short: it holds sockets
    from ray.cluster_utils import Cluster

    wait_for_nodes()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "include_dashboard": False,
            "object_store_memory": 100 << 20,
        },
    )
    try:
        yield cluster
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
