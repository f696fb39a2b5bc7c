"""How long the threads that serve calls wait for Python's lock (GIL)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

__all__ = ["GilWaits"]


class GilWaits:
    """Measure the wait for the lock at the beginning of each call.

    The thread releases the lock and takes it again, behind the threads that wait for it.

    Source: torch's ``enable_gil_profiling``, which measures it where a thread of C++ begins to run
    Python code.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0

    @contextlib.contextmanager
    def measured(self, invocation: object) -> Iterator[None]:
        """Measure the wait once, then run a call."""
        began = time.perf_counter()
        time.sleep(0)
        self._seconds += time.perf_counter() - began
        self._count += 1
        yield

    @property
    def average_us(self) -> float:
        """The average wait in microseconds; 0 without a call."""
        return self._seconds / max(1, self._count) * 1e6
