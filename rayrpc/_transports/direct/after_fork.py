"""Close the connections of the parent in a forked child."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Protocol

__all__ = ["register", "unregister"]


class _HasDescriptors(Protocol):
    def close_after_fork(self) -> None:
        """Close the descriptors that a forked child inherited."""


_all: weakref.WeakSet[_HasDescriptors] = weakref.WeakSet()
_lock = threading.Lock()
_handles_forks = False


def register(transport: _HasDescriptors) -> None:
    """Have forked children close a transport's descriptors: else they keep connections open."""
    global _handles_forks
    with _lock:
        _all.add(transport)
        if not _handles_forks:
            _handles_forks = True
            os.register_at_fork(after_in_child=_in_child)


def unregister(transport: _HasDescriptors) -> None:
    """Remove a closed transport from those that forked children close."""
    _all.discard(transport)


def _in_child() -> None:
    for transport in list(_all):
        with contextlib.suppress(Exception):
            transport.close_after_fork()
    _all.clear()
