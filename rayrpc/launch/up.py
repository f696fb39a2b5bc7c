"""``rayrpc up`` and ``rayrpc down``: a local cluster that is there before the programs."""

from __future__ import annotations

import os
import time

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.notices import noticed
from rayrpc._transports.ray import local_lease
from rayrpc.config import Settings
from rayrpc.errors import ConfigError
from rayrpc.launch.preloading import load_torch

__all__ = ["down", "up"]

LOAD_SECONDS = 120.0  # a busy machine takes many times what a quiet one does
DOWN_SECONDS = 10.0
POLL_SECONDS = 0.1


def up(settings: Settings) -> str:
    """Keep a local cluster between programs, with torch loaded for their workers.

    Args:
        settings (Settings): ``idle_timeout``, and those of local clusters.

    Returns:
        What has been done, for a terminal.

    Raises:
        ConfigError: another cluster is named.
        ClusterError: it could not be started.
    """
    _check(settings)
    is_new, forks = local_lease.keep(settings, settings.idle_timeout)
    with noticed("torch to be loaded"):
        is_loaded = load_torch(forks, os.environ, LOAD_SECONDS)
    if not is_new:
        return "the local cluster is up already"
    workers = "" if is_loaded else "; its workers load torch themselves"
    return f"the local cluster is up{workers}; `rayrpc down` ends it"


def down(settings: Settings) -> str:
    """End what ``up`` keeps, once no program uses it.

    Args:
        settings (Settings): as for ``up``.

    Returns:
        What has been done, for a terminal.

    Raises:
        ConfigError: another cluster is named.
    """
    _check(settings)
    if not local_lease.release(settings):
        return "no local cluster is up"
    socket = local_lease.local_file(settings, ".sock")
    deadline = Deadline(DOWN_SECONDS)
    while socket.exists():
        if deadline.expired:
            return "programs use the local cluster; it ends with the last of them"
        time.sleep(POLL_SECONDS)
    return "the local cluster is down"


def _check(settings: Settings) -> None:
    named = settings.address or os.environ.get("RAY_ADDRESS")
    if named:
        raise ConfigError(
            f"`rayrpc up` keeps a local cluster, but {named!r} is named by --address, the settings "
            "or RAY_ADDRESS"
        )
