"""Have no thread wait for a lock of coverage's for ever."""

from __future__ import annotations

import os
import sys
import threading

__all__ = ["renew_locks"]


def renew_locks() -> None:
    """Replace the locks of this process's coverage, here and in children that it forks.

    Coverage takes its lock in Python, in the midst of the code that it measures: what is raised in
    a thread from outside, as a cancellation is, may come just then, and the lock stays taken. A
    function that is written in C is not interrupted. In a forked child, a lock that another thread
    held stays taken, too.
    """
    module = sys.modules.get("coverage")
    coverage = module.Coverage.current() if module is not None else None
    if coverage is not None:
        _renew_lock_of_collector(coverage)
        os.register_at_fork(after_in_child=lambda: _renew_all(coverage))


def _renew_lock_of_collector(coverage: object) -> None:
    collector = getattr(coverage, "_collector", None)
    if getattr(collector, "data_lock", None) is None:
        return
    lock = threading.Lock()
    collector.data_lock = lock  # type: ignore[union-attr]
    for each in (collector, *collector.tracers):  # type: ignore[union-attr]
        each.lock_data, each.unlock_data = lock.acquire, lock.release


def _renew_all(coverage: object) -> None:
    _renew_lock_of_collector(coverage)
    data = getattr(coverage, "_data", None)
    if data is not None:
        data._lock = threading.RLock()
