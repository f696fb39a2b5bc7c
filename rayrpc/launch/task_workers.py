"""Workers for the tasks of ``rayrpc.jit.fork``, started with the first task."""

from __future__ import annotations

import dataclasses

from rayrpc import config
from rayrpc.launch.worker_pool import count_cpus
from rayrpc.launch.workers import start_with

__all__ = ["start_task_workers"]

# A task that waits for tasks of its own occupies a thread.
NUM_THREADS = 512


def start_task_workers(prefix: str) -> None:
    """Start workers for tasks, as many as the setting ``fork_workers`` says.

    Args:
        prefix (str): of their names, before a number.

    Raises:
        PlacementError, GroupError: see ``start_workers``.
    """
    settings = dataclasses.replace(config.settings(), num_worker_threads=NUM_THREADS)
    count = settings.fork_workers or count_cpus()
    start_with(settings, [f"{prefix}{number}" for number in range(count)])
