"""Deadlines: of one wait, and of all the calls of a worker.

``Deadline`` limits one wait of one thread.  ``DeadlineThread`` watches the deadlines of calls that
no thread waits for.  Most calls end long before their deadlines: a new deadline is only listed, and
becomes part of the heap when an earlier one has expired, if the call is still open then.  Those of
calls that ended are removed when they come to the front of the heap, or outnumber the open ones.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections.abc import Callable, Collection

from rayrpc._concurrency.threads import SingleThread
from rayrpc._concurrency.waiting import MAX_WAIT_SECONDS, Notifier

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
        """Return the seconds that are left, from 0 to ``MAX_WAIT_SECONDS``; None: without limit."""
        if self._end is None:
            return None
        return min(max(0.0, self._end - self._clock()), MAX_WAIT_SECONDS)

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
        self._queue: list[tuple[float, int, float]] = []  # a heap: when due, id, timeout
        self._added: list[tuple[float, int, float]] = []  # no part of the heap yet
        self._first = math.inf  # no deadline is earlier

    def __len__(self) -> int:
        return len(self._queue) + len(self._added)

    def add(self, due: float, call_id: int, timeout: float) -> None:
        """Add an open call whose ``timeout`` ends at the time ``due``."""
        if due < self._first:
            self._first = due
        self._added.append((due, call_id, timeout))
        open_calls = self._open_calls
        if len(self) > 2 * len(open_calls) + MAX_ENDED_CALLS:
            kept = [each for each in self._queue + self._added if each[1] in open_calls]
            heapq.heapify(kept)  # before it is the queue: an interrupt may come in between
            self._queue, self._added = kept, []

    def take_expired(self, now: float) -> list[tuple[int, float]]:
        """Remove the calls whose deadline has passed; return the open ones and their timeouts."""
        queue, added = self._queue, self._added
        self._added = []
        for each in added:
            if each[1] in self._open_calls:
                heapq.heappush(queue, each)
        expired = []
        while queue and (queue[0][0] <= now or queue[0][1] not in self._open_calls):
            _, call_id, timeout = heapq.heappop(queue)
            if call_id in self._open_calls:
                expired.append((call_id, timeout))
        self._first = queue[0][0] if queue else math.inf
        return expired

    def next_due(self) -> float:
        """Return a time before which no call expires; infinity if there is no deadline.

        It may be the deadline of a call that has ended since the last ``take_expired``.
        """
        return self._first

    def clear(self) -> None:
        """Remove all deadlines."""
        self._queue.clear()
        self._added.clear()
        self._first = math.inf


class DeadlineThread:
    """Call back for calls that are still open when their deadline passes.

    The thread starts with the first deadline, or before.

    Args:
        open_calls (Collection): the ids of the calls that have not ended.
        on_expired (Callable): called in the thread with a call's id and timeout; must be short.
    """

    def __init__(
        self, open_calls: Collection[int], on_expired: Callable[[int, float], None]
    ) -> None:
        self._on_expired = on_expired
        self._queue = DeadlineQueue(open_calls)
        self._lock = threading.RLock()
        self._changed = Notifier()
        self._thread = SingleThread(self._run, "rayrpc-timers", "calls do not time out")
        self._wakes_at = math.inf
        self._closed = False

    def start(self) -> None:
        """Start the thread now, so that it need not start in a call, which may be interrupted."""
        self._thread.start()

    def add(self, call_id: int, timeout: float) -> None:
        """Watch an open call.

        Args:
            call_id: of the call.
            timeout: in seconds from now.
        """
        due = time.monotonic() + timeout
        with self._lock:
            if self._closed:
                return
            self._queue.add(due, call_id, timeout)
            is_first = due < self._wakes_at
        if not self._thread.is_running:  # it could not be started before
            self._thread.start()
        if is_first:
            self._changed.notify_all()

    def close(self) -> None:
        """Remove all deadlines and end the thread; idempotent."""
        with self._lock:
            self._closed = True
            self._queue.clear()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                expired = self._queue.take_expired(time.monotonic())
                self._wakes_at = self._queue.next_due()
            if not expired:
                self._changed.wait_until(self._is_due_before, self._wakes_at - time.monotonic())
            for call_id, timeout in expired:
                try:
                    self._on_expired(call_id, timeout)
                except Exception:
                    logger.exception("error in the callback of an expired deadline")

    def _is_due_before(self) -> bool:
        """Tell whether the thread has to wake before it was to."""
        with self._lock:
            result = self._closed or self._queue.next_due() < self._wakes_at
        return result
