"""Threads for users' functions and callbacks, started on demand and kept while they are used."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from rayrpc._concurrency.waiting import Notifier

__all__ = ["SingleThread", "Slots", "ThreadCache", "new_thread", "start_thread"]

logger = logging.getLogger(__name__)

Task = Callable[[], object]

# If no thread takes a queued task for this long, another thread starts.
STALL_SECONDS = 0.005


def new_thread(run: Task, name: str) -> threading.Thread:
    """Return a daemon thread whose ``start`` does not wait until it runs.

    Python's waits, in Python code, in which Ctrl-C may leave the new thread waiting for ever; and
    the new thread may collect garbage first, and run a finalizer that waits for its starter.
    It cannot be joined before it runs.

    Args:
        run: its function.
        name: its name.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    started: Any = getattr(thread, "_started", None)  # an Event of threading
    if started is not None:
        started.wait = _return_at_once
    return thread


def _return_at_once(timeout: float | None = None) -> bool:
    return True


def start_thread(run: Task, name: str, otherwise: str | None) -> threading.Thread | None:
    """Start a daemon thread, if the system has one.

    Args:
        run: its function.
        name: its name.
        otherwise: what its lack means, for a warning; None: no warning.

    Returns:
        None if it could not be started; later it may.
    """
    thread = new_thread(run, name)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as exc:
        if otherwise is not None:
            logger.warning("%s, because no thread starts: %s", otherwise, exc)
        return None
    return thread


class SingleThread:
    """A daemon thread that is started once, and tried again where the system starts none.

    Args:
        run (Callable): its function.
        name (str): its name.
        otherwise (str): what its lack means, for a warning.
    """

    def __init__(self, run: Task, name: str, otherwise: str) -> None:
        self._run = run
        self._name = name
        self._otherwise = otherwise
        self._lock = threading.RLock()
        self._is_starting = False
        self._threads: dict[str, threading.Thread] = {}  # at most one, as setdefault is atomic
        #: it has been started; False: it has not, or could not be, or is being started
        self.is_running = False

    def start(self) -> None:
        """Start it, unless it runs; after an interrupt another call starts it."""
        try:
            with self._lock:
                if self.is_running or self._is_starting:
                    return
                self._is_starting = True
            if start_thread(self._run_once, self._name, self._otherwise) is not None:
                self.is_running = True
        finally:
            self._is_starting = False

    def _run_once(self) -> None:
        """Run, unless another thread does, whose start was interrupted before it was noted."""
        me = threading.current_thread()
        if self._threads.setdefault(self._name, me) is me:
            self.is_running = True
            self._run()

    @property
    def thread(self) -> threading.Thread | None:
        """The thread; None: it does not run yet."""
        return self._threads.get(self._name)


class ThreadCache:
    """Run tasks in daemon threads; a task that blocks does not block the tasks after it.

    A callback may block on the result of another call, whose callback must then run: a pool of
    fixed size would deadlock.  So the pool grows whenever its queue makes no progress.  Its
    watchdog starts the threads, as no interrupt comes between what it does.  While the system
    starts no more threads, tasks stay in the queue, and the watchdog tries again.

    Args:
        name (str): prefix of the threads' names.
        soft_limit (int): up to this many threads start without delay; further ones start when the
            queue stalls.
        idle_seconds (float): an idle thread ends after this time.
    """

    def __init__(self, name: str, soft_limit: int = 4, idle_seconds: float = 10.0) -> None:
        self._name = name
        self._soft_limit = soft_limit
        self._idle_seconds = idle_seconds
        self._tasks: deque[Task] = deque()
        self._lock = threading.RLock()
        self._added = Notifier()  # for idle threads
        self._idle = 0  # threads without a task
        self._count = 0  # threads
        self._started = 0  # threads so far
        self._taken = 0  # tasks so far
        self._watchdog: threading.Thread | None = None
        self._is_watching = False  # the watchdog looks at the queue again soon
        # wakes the watchdog; in C, as an interrupt must not come between
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_short = False  # the last thread could not be started
        self._closed = False

    @property
    def size(self) -> int:
        """The number of threads."""
        return self._count

    def start(self) -> None:
        """Start the watchdog now: then no task is refused later.

        Raises:
            RuntimeError, MemoryError: the system starts no thread.
        """
        if self._watchdog is None:
            self._start_watchdog()

    def submit(self, task: Task) -> None:
        """Run a task in one of the threads.

        Args:
            task: what it raises is logged.

        Raises:
            RuntimeError, MemoryError: there is no thread yet, and the system starts none.
        """
        try:
            self._tasks.append(task)  # first: an interrupt of the wait for the lock keeps it
            with self._lock:
                is_watched = self._watchdog is not None
                is_taken = self._idle >= len(self._tasks)
                is_needed = self._count < self._soft_limit or not self._is_watching
            if not is_watched:
                self._start_watchdog(task)
            if is_taken:
                self._added.notify()
            elif is_needed:
                self._wake_ups.put(None)
        except BaseException:  # an interrupt: the watchdog sees to the task
            self._wake_ups.put(None)
            raise

    def close(self) -> None:
        """End the threads once the queue is empty; idempotent."""
        self._closed = True
        self._wake_ups.put(None)
        self._added.notify_all()

    def _start_watchdog(self, task: Task | None = None) -> None:
        """Start it; if it cannot start, the next task tries again.

        Args:
            task: taken back where no thread starts at all.
        """
        watchdog = new_thread(self._watch, f"{self._name}-watchdog")
        with self._lock:
            if self._watchdog is not None:
                return
            self._watchdog = watchdog
        try:
            watchdog.start()
        except (RuntimeError, MemoryError):
            self._watchdog = None
            if not self._closed and not self._count and not self._start():
                if task is not None:
                    self._tasks.remove(task)
                raise

    def _start(self) -> bool:
        """Start a thread; return False if the system starts none."""
        with self._lock:
            self._count += 1
            self._started += 1
            name = f"{self._name}-{self._started}"
        otherwise = None if self._is_short else f"tasks of {self._name} wait"
        self._is_short = start_thread(self._run, name, otherwise) is None
        if self._is_short:
            with self._lock:
                self._count -= 1
                self._started -= 1
        return not self._is_short

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except BaseException:
                with contextlib.suppress(BaseException):  # an error may fail to be shown
                    logger.exception("error in a task of %s", self._name)
            del task  # an idle thread must not keep the task's objects alive

    def _next(self) -> Task | None:
        """Return the next task; None: the thread ends."""
        was_idle = has_timed_out = False
        while True:
            with self._lock:
                self._idle -= was_idle
                if self._tasks:
                    self._taken += 1
                    task = self._tasks.popleft()
                    return task
                if self._closed or has_timed_out:
                    self._count -= 1
                    return None
                self._idle += 1
            was_idle = True
            has_timed_out = not self._added.wait_until(self._has_more, self._idle_seconds)

    def _has_more(self) -> bool:
        return bool(self._tasks) or self._closed

    def _watch(self) -> None:
        """Start a thread whenever tasks are queued and no thread takes one."""
        while True:
            with self._lock:
                if self._closed and not self._tasks:
                    self._watchdog = None  # another task starts another one
                    return
                taken = self._taken
                self._is_watching = bool(self._tasks)  # else the next task wakes this thread
            stalled = False
            seconds = STALL_SECONDS if self._is_watching or self._closed else None
            try:
                self._wake_ups.get(timeout=seconds)
            except queue.Empty:
                stalled = taken == self._taken
            if not self._tasks:
                continue
            if self._idle:
                self._added.notify()  # an interrupt may have come before it
            elif stalled or self._count < self._soft_limit:
                self._start()


class Slots:
    """Run at most ``limit`` tasks at a time; queue the others in order.

    A thread that received a task may run it itself while a slot is free, which saves a context
    switch, and else submits it.

    Args:
        limit (int): how many tasks run at a time.
        cache (ThreadCache): its threads run the submitted tasks.
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
        """The number of queued tasks."""
        return len(self._backlog)

    def hold(self) -> None:
        """Queue all tasks until ``release``; call it before the first task."""
        with self._lock:
            self._free = 0

    def release(self) -> None:
        """Run the tasks that were queued since ``hold``, and those to come."""
        for _ in range(self.limit):
            self.leave()

    def enter(self) -> bool:
        """Take a slot for this thread; pair with ``leave``.

        Returns:
            False if no slot is free.
        """
        with self._lock:
            if self._free == 0:
                return False
            self._free -= 1
            return True

    def leave(self) -> None:
        """Release this thread's slot to the first queued task, if any."""
        with self._lock:
            if not self._backlog:
                self._free += 1
                return
            task = self._backlog.popleft()
        try:
            self._start(task)
        except RuntimeError:
            with self._lock:
                self._backlog.appendleft(task)  # for the next thread that leaves
            logger.exception("a call waits, because no thread starts")

    def submit(self, task: Task) -> None:
        """Run a task in another thread as soon as a slot is free.

        Raises:
            RuntimeError: the system starts no thread; see ``ThreadCache.submit``.
        """
        with self._lock:
            if self._free == 0:
                self._backlog.append(task)
                return
            self._free -= 1
        self._start(task)

    def submit_aside(self, task: Task) -> None:
        """Run a task in another thread, in no slot; safe in any thread that collects garbage."""
        self._cache.submit(task)

    def _start(self, task: Task) -> None:
        """Run a task in another thread, in a slot that is taken; release it if that fails."""
        try:
            self._cache.submit(lambda: self._run(task))
        except RuntimeError:
            with self._lock:
                self._free += 1
            raise

    def _run(self, task: Task) -> None:
        try:
            task()
        finally:
            self.leave()
