"""Call a program's observers when members join its group or leave it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rayrpc._protocol.membership import Change

__all__ = ["Observer", "Observers"]

logger = logging.getLogger(__name__)

Observer = Callable[[Change], object]


@dataclass(frozen=True, eq=False)
class _Entry:
    observer: Observer
    kinds: tuple[str, ...]

    def wants(self, change: Change) -> bool:
        return not self.kinds or change.kind in self.kinds


class Observers:
    """Call observers for each change of a group's members, one at a time, in its order.

    They are users' functions, which may call and block; so they run in a thread of their own:

        IDLE ── report ──> RUNNING ── report ──> RUNNING ── no change is left ──> IDLE

    Args:
        submit (Callable): runs a task in another thread.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        self._submit = submit
        self._lock = threading.Lock()
        self._observers: list[_Entry] = []
        self._changes: deque[Change] = deque()
        self._is_running = False

    def add(self, observer: Observer, *kinds: str) -> Callable[[], None]:
        """Have an observer called for changes from now on; return what ends that.

        Args:
            observer: takes a change.
            *kinds: of the changes; none: all.
        """
        entry = _Entry(observer, kinds)
        with self._lock:
            self._observers.append(entry)

        def remove() -> None:
            with self._lock:
                if entry in self._observers:
                    self._observers.remove(entry)

        return remove

    def report(self, change: Change) -> None:
        """Have the observers called for a change; does not wait."""
        with self._lock:
            if not any(entry.wants(change) for entry in self._observers):
                return
            self._changes.append(change)
            if self._is_running:
                return
            self._is_running = True
        try:
            self._submit(self._run)
        except RuntimeError:  # no thread can be started: the next change is reported with this one
            with self._lock:
                self._is_running = False
            logger.exception("observers of the members of a group are not called yet")

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._changes:
                    self._is_running = False
                    return
                change = self._changes.popleft()
                observers = [each.observer for each in self._observers if each.wants(change)]
            for observer in observers:
                try:
                    observer(change)
                except Exception:
                    logger.exception(
                        "an observer of the members of a group failed as %r %s",
                        change.member.name,
                        change.kind,
                    )
