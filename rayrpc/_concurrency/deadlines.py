"""Deadlines: of one wait, and of all the calls of a worker.

``Deadline`` limits one wait of one thread.  ``DeadlineThread`` watches the deadlines of calls that
no thread waits for.  Most calls have the same timeout and end long before it, so its queue is one
FIFO for each timeout, which is sorted by itself; a call that ended is removed when it comes to the
front, or when such calls outnumber the open ones.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

__all__ = ["Deadline", "DeadlineQueue", "DeadlineThread"]

logger = logging.getLogger(__name__)

# A queue is cleaned when it is longer than twice the number of open calls plus this.
MAX_ENDED_CALLS = 1024


class Deadline:
    """The end of a limited wait.

    Example: ``deadline = Deadline(timeout)``, then ``event.wait(deadline.remaining())`` and
    ``socket.settimeout(deadline.remaining())`` share one timeout.

    Args:
        seconds (float | None): how long from now on; None: without limit.
        clock (Callable): returns the time in seconds; must not go back.
    """

    __slots__ = ("_clock", "_end")

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds

    def remaining(self) -> float | None:
        """Return the seconds that are left, never below 0; None: without limit."""
        return None if self._end is None else max(0.0, self._end - self._clock())

    def within(self, seconds: float) -> float:
        """Return the seconds that are left, ``seconds`` at most: for waits in short steps."""
        remaining = self.remaining()
        return seconds if remaining is None else min(seconds, remaining)

    @property
    def expired(self) -> bool:
        """Tell whether no time is left."""
        return self._end is not None and self._clock() >= self._end


class DeadlineQueue:
    """Sort the deadlines of open calls; not thread-safe, and without a clock of its own.

    Args:
        open_calls (Collection): the ids of the calls that have not ended.
    """

    def __init__(self, open_calls: Collection[int]) -> None:
        self._open_calls = open_calls
        self._queues: dict[float, deque[tuple[float, int]]] = {}  # by timeout

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def add(self, due: float, call_id: int, timeout: float) -> None:
        """Add an open call whose ``timeout`` ends at the time ``due``."""
        open_calls = self._open_calls
        queue = self._queues.get(timeout)
        if queue is None:
            queue = self._queues[timeout] = deque()
        while queue and queue[0][1] not in open_calls:
            queue.popleft()
        queue.append((due, call_id))
        if len(queue) > 2 * len(open_calls) + MAX_ENDED_CALLS:
            self._queues[timeout] = deque(each for each in queue if each[1] in open_calls)

    def take_expired(self, now: float) -> list[tuple[int, float]]:
        """Remove the calls whose deadline has passed; return the open ones and their timeouts."""
        expired = []
        for timeout, queue in list(self._queues.items()):
            while queue and (queue[0][0] <= now or queue[0][1] not in self._open_calls):
                expired.append((queue.popleft()[1], timeout))
            if not queue:
                del self._queues[timeout]
        return [(call_id, timeout) for call_id, timeout in expired if call_id in self._open_calls]

    def next_due(self) -> float:
        """Return the time of the first deadline; infinity if there is none."""
        return min((queue[0][0] for queue in self._queues.values()), default=math.inf)

    def clear(self) -> None:
        """Remove all deadlines."""
        self._queues.clear()


class DeadlineThread:
    """Call back for calls that are still open when their deadline passes.

    The thread starts with the first deadline.

    Args:
        open_calls (Collection): the ids of the calls that have not ended.
        on_expired (Callable): called in the thread with a call's id and timeout; must be short.
    """

    def __init__(
        self, open_calls: Collection[int], on_expired: Callable[[int, float], None]
    ) -> None:
        self._on_expired = on_expired
        self._queue = DeadlineQueue(open_calls)
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._wakes_at = math.inf
        self._closed = False

    def add(self, call_id: int, timeout: float) -> None:
        """Watch an open call.

        Args:
            call_id: of the call.
            timeout: in seconds from now.
        """
        due = time.monotonic() + timeout
        with self._changed:
            if self._closed:
                return
            self._queue.add(due, call_id, timeout)
            if due < self._wakes_at:
                self._wake_at(due)

    def close(self) -> None:
        """Remove all deadlines and end the thread; idempotent."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()

    def _wake_at(self, due: float) -> None:
        self._wakes_at = due
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rayrpc-timers", daemon=True)
            self._thread.start()
        else:
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                expired = self._queue.take_expired(time.monotonic())
                self._wakes_at = self._queue.next_due()
                if not expired and not self._closed:
                    seconds = self._wakes_at - time.monotonic()
                    self._changed.wait(None if seconds == math.inf else max(0.0, seconds))
                if self._closed:
                    return
            for call_id, timeout in expired:
                try:
                    self._on_expired(call_id, timeout)
                except Exception:
                    logger.exception("error in the callback of an expired deadline")
