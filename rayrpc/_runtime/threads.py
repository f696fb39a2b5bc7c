"""Threads for users' functions and callbacks, made when needed and kept for a while."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Slots", "ThreadCache"]

logger = logging.getLogger(__name__)

Task = Callable[[], None]


class ThreadCache:
    """Run tasks in daemon threads, never making one wait for another.

    A callback may block on the result of another call, whose callback must then run: with a
    pool of fixed size a chain of them would lock up.

    Args:
        name (str): prefix of the threads' names.
        idle_seconds (float): how long an idle thread stays.
    """

    def __init__(self, name: str, idle_seconds: float = 10.0) -> None:
        self._name = name
        self._idle_seconds = idle_seconds
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # threads that wait, less tasks that wait for them
        self._count = 0

    @property
    def idle(self) -> int:
        """The number of threads without work."""
        return max(self._idle, 0)

    def submit(self, task: Task) -> None:
        """Run a task soon, in a thread of its own for as long as it takes."""
        with self._lock:
            self._idle -= 1
            start = self._idle < 0
            if start:
                self._idle += 1
                self._count += 1
                number = self._count
        if start:
            thread = threading.Thread(
                target=self._run, args=(task,), name=f"{self._name}-{number}", daemon=True
            )
            thread.start()
        else:
            self._tasks.put(task)

    def close(self) -> None:
        """Let idle threads end."""
        with self._lock:
            idle = max(self._idle, 0)
        for _ in range(idle):
            self._tasks.put(None)

    def _run(self, task: Task | None) -> None:
        while True:
            if task is None:
                with self._lock:
                    self._idle -= 1
                return
            try:
                task()
            except BaseException:
                logger.exception("error in a task of %s", self._name)
            task = None  # must not keep alive what the task held
            with self._lock:
                self._idle += 1
            try:
                task = self._tasks.get(timeout=self._idle_seconds)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:
                        self._idle -= 1
                        return
                # a task is on its way to this thread
                task = self._tasks.get()


class Slots:
    """Let at most ``limit`` tasks run at a time; others wait their turn, in order.

    A thread that brought a task may run it itself if a slot is free (no hand-over on the way
    of a call), and else leaves it to the cache's threads.

    Args:
        limit (int): how many run at a time.
        cache (ThreadCache): where tasks that had to wait run.
    """

    def __init__(self, limit: int, cache: ThreadCache) -> None:
        self.limit = limit
        self._free = limit
        self._cache = cache
        self._backlog: deque[Task] = deque()
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """The number of slots without a task."""
        return self._free

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for a slot."""
        return len(self._backlog)

    def enter(self) -> bool:
        """Take a slot for this thread, if one is free; pair with ``leave``."""
        with self._lock:
            if self._free == 0:
                return False
            self._free -= 1
            return True

    def leave(self) -> None:
        """Give the slot on, to the first task that waits."""
        with self._lock:
            if not self._backlog:
                self._free += 1
                return
            task = self._backlog.popleft()
        self._cache.submit(lambda: self._run(task))

    def submit(self, task: Task) -> None:
        """Run a task in another thread as soon as a slot is free."""
        with self._lock:
            if self._free == 0:
                self._backlog.append(task)
                return
            self._free -= 1
        self._cache.submit(lambda: self._run(task))

    def _run(self, task: Task) -> None:
        try:
            task()
        finally:
            self.leave()
