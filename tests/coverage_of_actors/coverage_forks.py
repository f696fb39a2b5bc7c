"""Have the forked children of a process that is measured end: they take new locks of coverage's."""

from __future__ import annotations

import os
import sys
import threading

__all__ = ["renew_locks_in_children"]


def renew_locks_in_children() -> None:
    """Replace the locks of this process's coverage in children that it forks.

    A thread may hold one during the fork; ``os._exit``, which saves what was covered, would then
    wait for it for ever.
    """
    module = sys.modules.get("coverage")
    coverage = module.Coverage.current() if module is not None else None
    if coverage is not None:
        os.register_at_fork(after_in_child=lambda: _renew_locks(coverage))


def _renew_locks(coverage: object) -> None:
    collector = getattr(coverage, "_collector", None)
    if getattr(collector, "data_lock", None) is not None:
        collector.data_lock = threading.Lock()  # type: ignore[union-attr]
    data = getattr(coverage, "_data", None)
    if data is not None:
        data._lock = threading.RLock()
