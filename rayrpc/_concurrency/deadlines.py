"""One thread that watches the deadlines of a worker's calls.

Most calls have the same timeout and end long before it.  So deadlines wait in line, a line for
each timeout, and are in order there by themselves; what has ended is dropped when it comes to the
front, or when it outweighs the rest.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

__all__ = ["Deadlines"]

logger = logging.getLogger(__name__)

# Ended calls stay in line until they outweigh the others by this much.
SLACK = 1024


class Deadlines:
    """Call back for calls that are still open when their deadline passes.

    Args:
        open_calls (Collection): the numbers of calls that have not ended.
        expired (Callable): called with such a number and the timeout, from the thread that
            watches; it must be short.
    """

    def __init__(self, open_calls: Collection[int], expired: Callable[[int, float], None]) -> None:
        self._open = open_calls
        self._expired = expired
        self._lines: dict[float, deque[tuple[float, int]]] = {}
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._wakes = math.inf  # when the thread looks next
        self._closed = False

    def add(self, number: int, seconds: float) -> None:
        """Watch an open call."""
        due = time.monotonic() + seconds
        with self._changed:
            line = self._lines.get(seconds)
            if line is None:
                line = self._lines[seconds] = deque()
            while line and line[0][1] not in self._open:
                line.popleft()
            line.append((due, number))
            if len(line) > 2 * len(self._open) + SLACK:
                self._lines[seconds] = deque(each for each in line if each[1] in self._open)
            if due < self._wakes:
                self._wake(due)

    def close(self) -> None:
        """Forget all deadlines and end the thread."""
        with self._changed:
            self._closed = True
            self._lines.clear()
            self._changed.notify()

    def _wake(self, due: float) -> None:
        if self._closed:
            return
        self._wakes = due
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rayrpc-timers", daemon=True)
            self._thread.start()
        else:
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                late = self._take_late()
                if not late and not self._closed:
                    left = self._wakes - time.monotonic()
                    self._changed.wait(None if left == math.inf else max(0.0, left))
                if self._closed:
                    return
            for number, seconds in late:
                try:
                    self._expired(number, seconds)
                except Exception:
                    logger.exception("error in a deadline's callback")

    def _take_late(self) -> list[tuple[int, float]]:
        now = time.monotonic()
        late = []
        self._wakes = math.inf
        for seconds, line in list(self._lines.items()):
            while line and (line[0][0] <= now or line[0][1] not in self._open):
                late.append((line.popleft()[1], seconds))
            if line:
                self._wakes = min(self._wakes, line[0][0])
            else:
                del self._lines[seconds]
        return [(number, seconds) for number, seconds in late if number in self._open]
