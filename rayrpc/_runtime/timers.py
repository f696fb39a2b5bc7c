"""One thread that watches all deadlines of a process."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

__all__ = ["Timers"]


class Timers:
    """Call back when deadlines pass.

    Callbacks run in the timer thread and must be short.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` in ``seconds``."""
        due = time.monotonic() + seconds
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._heap, (due, next(self._count), callback))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rayrpc-timers", daemon=True
                )
                self._thread.start()
            elif self._heap[0][0] == due:
                self._changed.notify()

    def close(self) -> None:
        """Forget all deadlines and end the thread."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed:
                    if not self._heap:
                        self._changed.wait()
                        continue
                    left = self._heap[0][0] - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                if self._closed:
                    return
                _, _, callback = heapq.heappop(self._heap)
            callback()
