"""Pools whose workers are threads of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rayrpc.parallel.pool.base import BasePool, PoolStates, Setup
from rayrpc.parallel.pool.contexts import add_context, check_contexts
from rayrpc.parallel.pool.processes import Pool

__all__ = ["CtxThreadPool", "ThreadPool"]

JOIN_SECONDS = 5.0


class _Thread(threading.Thread):
    """A worker; keeps the exception that ended it."""

    def __init__(self, number: int, main: Callable[[], None]) -> None:
        super().__init__(name=f"pool-worker-{number}", daemon=True)
        self.number = number
        self.error: BaseException | None = None
        self._main = main

    def run(self) -> None:
        try:
            self._main()
        except BaseException as exc:
            self.error = exc


class ThreadPool(Pool):
    """Run tasks in threads of this process, on the caller's own objects.

    Args:
        processes (int, optional): number of threads; default: of this machine's CPUs.
        initializer, initargs, maxtasksperchild: as for ``BasePool``.
        is_recursive, is_daemon, is_copy_tensor, share_method: accepted for machin's sake: nothing
            is pickled or copied.

    Source: ``machin.parallel.pool.ThreadPool``.
    """

    _pool: list[_Thread]

    worker = staticmethod(BasePool.worker)  # Pool's prepares exceptions for pickling

    def _count_cpus(self) -> int:
        return BasePool._count_cpus(self)

    def _prepare(self, func: Callable[..., Any]) -> Any:
        return BasePool._prepare(self, func)

    def setup_queues(self) -> None:
        """Make the queues of tasks and results."""
        self._inqueue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results = queue.SimpleQueue()

    def repopulate_pool(self) -> None:
        """Start threads until there are as many as there should be."""
        for number in sorted(set(range(self._processes)) - {each.number for each in self._pool}):
            thread = _Thread(number, self._runner(number))
            self._pool.append(thread)
            thread.start()

    def _runner(self, number: int) -> Callable[[], None]:
        initializer, initargs = self._worker_setup(number)

        def run() -> None:
            self.worker(
                self._inqueue.get, self._results.put, initializer, initargs, self._maxtasksperchild
            )
            self._wake.set()

        return run

    def maintain_pool(self) -> None:
        """Replace threads that have run ``maxtasksperchild`` tasks.

        Raises:
            Exception: that ended a thread, as of an initializer.
        """
        for thread in [each for each in self._pool if not each.is_alive()]:
            self._pool.remove(thread)
            if thread.error is not None:
                raise thread.error
        if self._needs_workers():
            self.repopulate_pool()

    def pool_inqueue_put(self, obj: Any) -> None:
        """Queue a task.

        Args:
            obj: a task; None ends one thread.
        """
        self._inqueue.put(obj)

    def join_workers(self) -> None:
        """Wait until all threads have ended; after ``terminate``, 5 s for each at most."""
        timeout = JOIN_SECONDS if self._state is PoolStates.TERMINATE else None
        for thread in self._pool:
            thread.join(timeout)

    def terminate_workers(self) -> None:
        """End each thread after the task that it is running: a thread cannot be killed."""
        while not self._inqueue.empty():
            try:
                self._inqueue.get_nowait()
            except queue.Empty:
                break
        for _ in range(self._processes):
            self._inqueue.put(None)


class CtxThreadPool(ThreadPool):
    """Run tasks in threads with a context each, which functions get as their first argument.

    Args:
        processes (int): number of threads.
        initializer, initargs: as for ``BasePool``.
        worker_contexts (list, optional): one for each thread; default: None for all.

    Raises:
        ValueError: the number of contexts is not that of the threads.

    Source: ``machin.parallel.pool.CtxThreadPool``.
    """

    _context = threading.local()

    def __init__(
        self,
        processes: int,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        worker_contexts: Sequence[Any] | None = None,
    ) -> None:
        self._contexts = check_contexts(processes, worker_contexts)
        super().__init__(processes, initializer, initargs)

    def _worker_setup(self, number: int) -> Setup:
        def initialize() -> None:
            self._context.value = self._contexts[number]
            if self._initializer is not None:
                self._initializer(*self._initargs)

        return initialize, ()

    @staticmethod
    def worker(
        get: Callable[[], Any], put: Callable[[Any], None], *args: Any, **kwargs: Any
    ) -> None:
        """Run tasks with this thread's context as the functions' first argument.

        Args:
            get (Callable): returns a task, or None at the end.
            put (Callable): accepts a result.
            *args: the other arguments of ``BasePool.worker``.
            **kwargs: the same, by name.
        """
        get = add_context(lambda: CtxThreadPool._context.value, get)
        ThreadPool.worker(get, put, *args, **kwargs)
