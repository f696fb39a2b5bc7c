"""Report the handles of RRefs that Python has collected, in whatever thread it collects.

The callback of a weak reference, a function in C, reports them.  If an interrupt such as Ctrl-C
ended a finalizer in Python, Python would ignore that, and the report would be lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from rayrpc._protocol.ids import GloballyUniqueId

__all__ = ["CollectedHandles", "HandleRef"]


class HandleRef(weakref.ref[Any]):
    """A reference to the handle of a fork."""

    __slots__ = ("fork_id",)

    fork_id: GloballyUniqueId


class CollectedHandles:
    """Watch handles.

    Args:
        report (Callable): takes the reference to a handle that was collected; in C.
    """

    def __init__(self, report: Callable[[HandleRef], None]) -> None:
        self._report = report
        self._refs: dict[int, HandleRef] = {}  # by their id; Python calls back those that live

    def __len__(self) -> int:
        return len(self._refs)

    def watch(self, handle: object, fork_id: GloballyUniqueId) -> None:
        """Report a handle once it is collected; then call ``forget``."""
        ref = HandleRef(handle, self._report)
        ref.fork_id = fork_id
        self._refs[id(ref)] = ref

    def forget(self, ref: HandleRef) -> None:
        """Delete the reference to a handle that was reported."""
        self._refs.pop(id(ref), None)
