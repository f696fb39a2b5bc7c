"""The thread that does what an RRef context has to do later.

A task may be queued in any thread, also by a finalizer or by the callback of a weak reference.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from rayrpc._concurrency.deadlines import Deadline

__all__ = ["RETRANSMIT_SECONDS", "Upkeep"]

logger = logging.getLogger(__name__)

# A deletion waits this long for others, so that a program that drops many sends few messages.
BATCH_SECONDS = 0.002
# Messages that were not acknowledged for this long are sent again.
RETRANSMIT_SECONDS = 1.0

T = TypeVar("T")


class Upkeep(Generic[T]):
    """Run the tasks of an RRef context in batches, and have it send its messages.

    Args:
        run (Callable): runs a task.
        retransmit (Callable): makes the messages pending again that were not acknowledged.
        flush (Callable): sends the pending messages.
        clock (Callable): returns the time in seconds; must not go back.
        sleep (Callable): takes the seconds.
    """

    def __init__(
        self,
        run: Callable[[T], None],
        retransmit: Callable[[], None],
        flush: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._retransmit = retransmit
        self._flush = flush
        self._clock = clock
        self._sleep = sleep
        self._tasks: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        #: queues a task; in C, and safe in any thread
        self.submit: Callable[[T], None] = self._tasks.put
        self._closed = False

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self.run, name="rayrpc-rrefs", daemon=True).start()

    def close(self) -> None:
        """End the thread, without the tasks that are queued."""
        self._closed = True
        self._tasks.put(None)

    def run(self) -> None:
        """Run tasks until ``close``."""
        next_due = Deadline(RETRANSMIT_SECONDS, self._clock)
        while not self._closed:
            tasks = self._take()
            if is_due := next_due.expired:
                next_due = Deadline(RETRANSMIT_SECONDS, self._clock)
            for task in tasks:
                try:
                    self._run(task)
                except Exception:
                    logger.exception("an error in the protocol of RRefs: this worker may leak some")
            try:
                if is_due:
                    self._retransmit()
                if (tasks or is_due) and not self._closed:
                    self._flush()
            except Exception:  # what was not sent is retransmitted
                logger.exception("messages of RRefs could not be sent")

    def _take(self) -> list[T]:
        """Return a batch of tasks, empty after ``RETRANSMIT_SECONDS`` without one."""
        try:
            first = self._tasks.get(timeout=RETRANSMIT_SECONDS)
        except queue.Empty:
            return []
        if first is None:
            return []
        self._sleep(BATCH_SECONDS)
        tasks = [first]
        while True:
            try:
                more = self._tasks.get_nowait()
            except queue.Empty:
                return tasks
            if more is not None:
                tasks.append(more)
