"""Threads for users' functions and callbacks, made when needed and kept for a while."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Slots", "ThreadCache"]

logger = logging.getLogger(__name__)

Task = Callable[[], None]

# How long waiting tasks may make no progress before they get another thread.
STUCK_SECONDS = 0.005


class ThreadCache:
    """Run tasks in daemon threads; a task that blocks never holds up the others for long.

    A callback may block on the result of another call, whose callback must then run: a pool of
    fixed size would lock up.  So the pool grows whenever tasks wait and none gets on.

    Args:
        name (str): prefix of the threads' names.
        soft_limit (int): up to this many threads are made as soon as they are needed.
        idle_seconds (float): how long an idle thread stays.
    """

    def __init__(self, name: str, soft_limit: int = 4, idle_seconds: float = 10.0) -> None:
        self._name = name
        self._soft_limit = soft_limit
        self._idle_seconds = idle_seconds
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._count = 0
        self._started = 0
        self._taken = 0
        self._guard: threading.Thread | None = None
        self._guarded = threading.Event()
        self._closed = False

    @property
    def size(self) -> int:
        """The number of threads."""
        return self._count

    def submit(self, task: Task) -> None:
        """Run a task soon."""
        with self._changed:
            self._tasks.append(task)
            if self._idle >= len(self._tasks):
                self._changed.notify()
                return
            if self._count < self._soft_limit:
                self._start()
                return
            if self._guard is None:
                self._guard = threading.Thread(
                    target=self._watch, name=f"{self._name}-guard", daemon=True
                )
                self._guard.start()
            if not self._guarded.is_set():
                self._guarded.set()

    def close(self) -> None:
        """Let the threads end when nothing is left to do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._guarded.set()

    def _start(self) -> None:
        self._count += 1
        self._started += 1
        name = f"{self._name}-{self._started}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._tasks:
                    if self._closed:
                        self._count -= 1
                        return
                    self._idle += 1
                    there = self._changed.wait(self._idle_seconds)
                    self._idle -= 1
                    if not there and not self._tasks:
                        self._count -= 1
                        return
                task: Task | None = self._tasks.popleft()
                self._taken += 1
            try:
                task()  # type: ignore[misc]
            except BaseException:
                logger.exception("error in a task of %s", self._name)
            task = None  # must not keep alive what the task held

    def _watch(self) -> None:
        """Add a thread whenever tasks wait and no thread takes one."""
        while not self._closed:
            self._guarded.wait()
            taken = self._taken
            time.sleep(STUCK_SECONDS)
            with self._changed:
                if not self._tasks:
                    self._guarded.clear()
                elif taken == self._taken and self._idle == 0:
                    self._start()


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
