"""Ray's functions, which here are errors where Ray has ended.

The functions of the same names in ``ray`` start Ray again: a thread that outlives
``ray.shutdown()`` would start a cluster that nobody wants, and wait for an answer there.  And while
``ray.shutdown()`` runs in another thread, Ray ends the process if a reference is deleted: so the
error comes when it has run, since references are deleted where it is handled.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from ray._private import worker

from rayrpc._concurrency.deadlines import Deadline

__all__ = ["get", "get_actor", "wait"]

# How long ``ray.shutdown()`` may take to end Ray's client.
SHUTDOWN_SECONDS = 30.0
POLL_SECONDS = 0.01


def _called(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of Ray's functions, which raises after a ``ray.shutdown()`` under way."""

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except BaseException:  # in some threads Ray raises SystemExit
            _wait_for_shutdown()
            raise

    return called


def _wait_for_shutdown() -> None:
    ray_worker = worker.global_worker
    deadline = Deadline(SHUTDOWN_SECONDS)
    while not (ray_worker.connected or deadline.expired) and hasattr(ray_worker, "core_worker"):
        time.sleep(POLL_SECONDS)


get = _called(worker.get)
get_actor = _called(worker.get_actor)
wait = _called(worker.wait)
