"""Workers for tasks of ``rayrpc.jit.fork``, started with the first one."""

from __future__ import annotations

import dataclasses

import ray

from rayrpc import config
from rayrpc._transports.ray_cluster import connect
from rayrpc.launch.workers import start_with

__all__ = ["start_forkers"]

# Tasks that wait for tasks of their own keep a thread each.
THREADS = 512


def start_forkers(prefix: str) -> None:
    """Start workers for tasks, as many as the setting ``fork_workers`` says.

    Args:
        prefix (str): of their names.
    """
    settings = dataclasses.replace(config.settings(), num_worker_threads=THREADS)
    connect(settings)
    count = settings.fork_workers or int(ray.cluster_resources().get("CPU", 1))
    start_with(settings, [f"{prefix}{number}" for number in range(count)])
