"""Forked children of a process that is connected to Ray: they have no client of Ray.

A forked child shares its parent's connections to Ray.  Ray's handles send messages when they are
deleted, which the garbage collector does in a child, too; on a shared connection these would make
the parent's next messages unreadable.  So Ray's client is dropped in forked children, and the
collector rests during a fork: handlers of other libraries may run in the child before ours.

SIGTERM is blocked during a fork, too.  Ray's workers handle it by an exception, which a child that
still runs such handlers would ignore; ``multiprocessing.Pool.terminate`` would then wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Set
from typing import Any

from rayrpc.errors import ClusterError

__all__ = ["prepare", "set_sigterm"]

FORKED = (
    "this process was forked from one that is connected to Ray, and cannot use that connection. "
    "Start it with multiprocessing.get_context('spawn'), or before the first use of rayrpc."
)

_is_forked = False  # from a process that was connected
_client_of_parent: Any = None  # never used, and never deleted


class _ThreadState(threading.local):
    collects = False  # the garbage collector did before this thread began to fork
    blocked: Set[int] = frozenset()  # the signals that this thread blocked then


_forking = _ThreadState()


def prepare() -> None:
    """Have the children that this process forks drop Ray's client.

    Raises:
        ClusterError: this process is such a child.
    """
    if _is_forked:
        raise ClusterError(FORKED)
    _register()


@functools.cache
def _register() -> None:
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_in_child
    )


def _before_fork() -> None:
    _forking.collects = gc.isenabled()
    gc.disable()
    _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.blocked)
    if _forking.collects:
        gc.enable()


def _after_in_child() -> None:
    _drop_client()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    # a bound method of a builtin has no module
    is_rays = str(getattr(on_sigterm, "__module__", "")).startswith("ray.")
    set_sigterm(None if is_rays else on_sigterm)
    _after_fork()


def set_sigterm(handler: Any) -> None:
    """Set a handler of SIGTERM in the place of Ray's, which prints stacks.

    Args:
        handler: as ``signal.signal`` takes it; None: the system's.
    """
    with contextlib.suppress(ValueError):  # this is not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


def _drop_client() -> None:
    """Have this process's handles of Ray send nothing more."""
    global _is_forked, _client_of_parent
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    _is_forked = True
    worker = ray._private.worker.global_worker
    # it would use the shared connection, and wait for threads that only the parent has
    atexit.unregister(ray._private.worker.shutdown)
    _client_of_parent = vars(worker).get("core_worker")
    worker.core_worker = _NoClient()


class _ForkedError(ClusterError, AttributeError):
    """Ray is used in a forked child; handles that are deleted suppress AttributeErrors."""


class _NoClient:
    """Stands for Ray's client in a forked child."""

    def __getattr__(self, name: str) -> Any:
        raise _ForkedError(FORKED)
