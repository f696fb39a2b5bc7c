"""``rayrpc run --trace FILE``: one trace of all that a program and its ranks call."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import uuid

from ray.exceptions import RayError

from rayrpc._observe.trace_file import Trace
from rayrpc._transports.ray.cluster import connect
from rayrpc._transports.ray.trace_collector import collected, start_collector
from rayrpc.config import Settings
from rayrpc.startup import TRACE_VARIABLE

__all__ = ["trace_run"]

logger = logging.getLogger(__name__)


def trace_run(settings: Settings, path: str) -> None:
    """Have all workers of this run recorded, and write the trace when this process ends.

    Args:
        settings: name the cluster.
        path: of the file.

    Raises:
        ClusterError: no cluster can be reached or started.
    """
    path = os.path.abspath(path)  # the program may change its folder
    connect(settings)
    name = f"rayrpc-trace:{uuid.uuid4().hex[:8]}"
    actor = start_collector(name, settings.namespace)
    os.environ[TRACE_VARIABLE] = f"{settings.namespace} {name}"  # this process's, and its ranks'

    def write() -> None:
        try:
            found = collected(actor)
        except (RayError, RuntimeError) as exc:
            logger.warning("there is no trace, as its collector cannot be reached: %s", exc)
            return
        Trace((pickle.loads(part), clock) for part, clock in found).write(path)

    # after the program's own handlers, and after it has left its group; before Ray's shutdown
    atexit.register(write)
