"""The directory of this process's group, which tests kill."""

from __future__ import annotations

import os
import signal

import ray
from conftest import eventually

import rayrpc as rpc

__all__ = ["kill_directory", "pid_of_directory", "wait_for_restart"]


def pid_of_directory() -> int:
    """Return the id of the directory's process."""
    actor = rpc._get_current_rpc_agent()._directory._actor
    pid: int = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
    return pid


def kill_directory() -> int:
    """Kill the directory's process; return its id."""
    pid = pid_of_directory()
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_for_restart(old: int) -> None:
    """Wait until the directory runs in another process."""

    def is_restarted() -> bool:
        try:
            return pid_of_directory() != old
        except ray.exceptions.RayActorError:
            return False

    assert eventually(is_restarted, 60)
