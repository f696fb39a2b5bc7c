"""Workers for tasks of ``rayrpc.jit.fork``, started with the first one."""

from __future__ import annotations

import dataclasses

from rayrpc import config
from rayrpc.launch.worker_pool import count_cpus
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
    count = settings.fork_workers or count_cpus()
    start_with(settings, [f"{prefix}{number}" for number in range(count)])
