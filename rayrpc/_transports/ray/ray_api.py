"""Ray's functions, which here are errors where Ray has ended.

The functions of the same names in ``ray``, and ``remote`` of an actor's method, start Ray again: a
thread that outlives ``ray.shutdown()`` would start a cluster that nobody wants, and wait for an
answer there.  And while
``ray.shutdown()`` runs in another thread, Ray ends the process if a reference is deleted: so the
error comes when it has run, since references are deleted where it is handled.

Where Ray's control service has ended, ``ray.shutdown()`` ends no thread that waits for an answer;
and if one waits while Python ends, the process fails with a segmentation fault.  So no thread but
the main one waits for long at a time, and ``end_waits`` ends all waits.
"""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import GetTimeoutError, RaySystemError

from rayrpc._concurrency.deadlines import Deadline

__all__ = [
    "STEP_SECONDS",
    "end_waits",
    "get",
    "get_actor",
    "on_this_node",
    "submit",
    "wait",
    "was_restarted",
]

# How long ``ray.shutdown()`` may take to end Ray's client.
SHUTDOWN_SECONDS = 30.0
POLL_SECONDS = 0.01
# Threads wait for so long at a time.
STEP_SECONDS = 1.0

_waiting: set[int] = set()  # threads that are in one of the functions
_has_ended = False


def _called(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of Ray's functions, which raises after a ``ray.shutdown()`` under way."""

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        me = threading.get_ident()
        _waiting.add(me)
        try:
            _check()
            return call(*args, **kwargs)
        except BaseException:  # in some threads Ray raises SystemExit
            _wait_for_shutdown()
            raise
        finally:
            _waiting.discard(me)

    return called


def _wait_for_shutdown() -> None:
    ray_worker = worker.global_worker
    deadline = Deadline(SHUTDOWN_SECONDS)
    while not (ray_worker.connected or deadline.expired) and hasattr(ray_worker, "core_worker"):
        time.sleep(POLL_SECONDS)


def _check() -> None:
    if _has_ended and threading.current_thread() is not threading.main_thread():
        raise SystemExit


def end_waits() -> None:
    """End the threads that wait for answers of Ray, but for the main one; they raise SystemExit."""
    global _has_ended
    _has_ended = True
    deadline = Deadline(2 * STEP_SECONDS)
    while _waiting - {threading.main_thread().ident} and not deadline.expired:
        time.sleep(POLL_SECONDS)


def get(refs: Any, *, timeout: float | None = None) -> Any:
    """``ray.get``.

    Args:
        refs: an ObjectRef, or a list of them.
        timeout: in seconds; None: none.
    """
    if threading.current_thread() is threading.main_thread():
        return _get(refs, timeout=timeout)
    deadline = Deadline(timeout)
    while True:
        try:
            return _get(refs, timeout=deadline.within(STEP_SECONDS))
        except GetTimeoutError:
            if deadline.expired:
                raise


def submit(method: Any, *args: Any) -> Any:
    """Call an actor's method; return the ObjectRef.

    Args:
        method: of the actor's handle.
        args: of the method.

    Raises:
        RaySystemError: Ray has ended.
    """
    if not ray.is_initialized():
        raise RaySystemError("Ray has not been started yet.")
    return method.remote(*args)


def on_this_node(soft: bool) -> Any:
    """Return the scheduling strategy of an actor on this process's node.

    Args:
        soft: it may start elsewhere where it cannot start here.
    """
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return affinity(ray.get_runtime_context().get_node_id(), soft=soft)


def was_restarted() -> bool:
    """Tell whether this process is that of an actor which Ray has started again."""
    if not ray.is_initialized():  # else Ray would start
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)


_get = _called(worker.get)
get_actor = _called(worker.get_actor)
wait = _called(worker.wait)
