"""One thread that watches all deadlines of a process."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Timers"]

logger = logging.getLogger(__name__)

# Cancelled deadlines stay in the heap as bare numbers until they outweigh the others.
SLACK = 1024


class Timers:
    """Call back when deadlines pass.

    Callbacks run in the timer thread and must be short.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def after(self, seconds: float, callback: Callable[[], None]) -> int:
        """Call ``callback`` in ``seconds``; return a number to cancel it by."""
        due = time.monotonic() + seconds
        with self._changed:
            number = next(self._count)
            if self._closed:
                return number
            self._callbacks[number] = callback
            heapq.heappush(self._heap, (due, number))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rayrpc-timers", daemon=True)
                self._thread.start()
            elif self._heap[0][1] == number:
                self._changed.notify()
            return number

    def cancel(self, number: int) -> None:
        """Forget a deadline, if it has not passed."""
        with self._changed:
            self._callbacks.pop(number, None)
            if len(self._heap) > 2 * len(self._callbacks) + SLACK:
                self._heap = [entry for entry in self._heap if entry[1] in self._callbacks]
                heapq.heapify(self._heap)

    def close(self) -> None:
        """Forget all deadlines and end the thread."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._callbacks.clear()
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
                _, number = heapq.heappop(self._heap)
                callback = self._callbacks.pop(number, None)
            if callback is not None:
                try:
                    callback()
                except Exception:
                    logger.exception("error in a deadline's callback")
