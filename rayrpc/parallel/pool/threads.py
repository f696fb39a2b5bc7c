"""Pools whose workers are threads of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rayrpc.parallel.pool.base import BasePool, PoolStates
from rayrpc.parallel.pool.contexts import checked, with_context
from rayrpc.parallel.pool.processes import Pool

__all__ = ["CtxThreadPool", "ThreadPool"]

JOIN_SECONDS = 5.0


class _Thread(threading.Thread):
    """A worker."""

    def __init__(self, number: int, work: Callable[[], None]) -> None:
        super().__init__(name=f"pool-worker-{number}", daemon=True)
        self.number = number
        self.error: BaseException | None = None
        self._work = work

    def run(self) -> None:
        try:
            self._work()
        except BaseException as exc:
            self.error = exc


class ThreadPool(Pool):
    """A pool of threads, which see the same objects as who gives them tasks.

    Args:
        processes (int, optional): the number of threads; default: of this machine's CPUs.
        initializer, initargs, maxtasksperchild: as for ``BasePool``.
        is_recursive, is_daemon, is_copy_tensor, share_method: as for ``Pool``; nothing is copied.

    Source: ``machin.parallel.pool.ThreadPool``.
    """

    _pool: list[_Thread]

    worker = staticmethod(BasePool.worker)  # not Pool's, which pickles exceptions

    def _count_cpus(self) -> int:
        return BasePool._count_cpus(self)

    def _prepared(self, func: Callable[..., Any]) -> Any:
        return BasePool._prepared(self, func)

    def setup_queues(self) -> None:
        """Make two queues of this process."""
        self._inqueue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results = queue.SimpleQueue()

    def repopulate_pool(self) -> None:
        """Start threads until there are as many as there should be."""
        for number in sorted(set(range(self._processes)) - {each.number for each in self._pool}):
            thread = _Thread(number, self._work_of(number))
            self._pool.append(thread)
            thread.start()

    def _work_of(self, number: int) -> Callable[[], None]:
        initializer, initargs = self._setup_of(number)

        def work() -> None:
            self.worker(
                self._inqueue.get, self._results.put, initializer, initargs, self._maxtasksperchild
            )
            self._wake.set()

        return work

    def maintain_pool(self) -> None:
        """Replace threads that have done ``maxtasksperchild`` tasks; raise what ended one."""
        for thread in [each for each in self._pool if not each.is_alive()]:
            self._pool.remove(thread)
            if thread.error is not None:
                raise thread.error
        if self._needs_workers():  # else they are meant to end
            self.repopulate_pool()

    def pool_inqueue_put(self, obj: Any) -> None:
        """Put a task into the queue."""
        self._inqueue.put(obj)

    def join_workers(self) -> None:
        """Wait until all threads have ended, after ``terminate`` for 5 s at most."""
        timeout = JOIN_SECONDS if self._state is PoolStates.TERMINATE else None
        for thread in self._pool:
            thread.join(timeout)

    def terminate_workers(self) -> None:
        """Let the threads end after the task that each is at: a thread cannot be ended."""
        while not self._inqueue.empty():
            try:
                self._inqueue.get_nowait()
            except queue.Empty:
                break
        for _ in range(self._processes):
            self._inqueue.put(None)


class CtxThreadPool(ThreadPool):
    """A pool of threads with a context each, which functions get as their first argument.

    Args:
        processes (int): the number of threads.
        initializer, initargs: as for ``BasePool``.
        worker_contexts (list, optional): one for each; default: None for all.

    Raises:
        ValueError: there are more or fewer contexts than threads.

    Source: ``machin.parallel.pool.CtxThreadPool``.
    """

    _context = threading.local()

    def __init__(
        self,
        processes: int,
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        worker_contexts: Sequence[Any] | None = None,
    ) -> None:
        self._contexts = checked(processes, worker_contexts)
        super().__init__(processes, initializer, initargs)

    def _setup_of(self, number: int) -> tuple[Callable[..., Any] | None, tuple[Any, ...]]:
        def enter() -> None:
            self._context.value = self._contexts[number]
            if self._initializer is not None:
                self._initializer(*self._initargs)

        return enter, ()

    @staticmethod
    def worker(
        get: Callable[[], Any], put: Callable[[Any], None], *args: Any, **kwargs: Any
    ) -> None:
        """Do tasks, with this thread's context as the functions' first argument."""
        get = with_context(lambda: CtxThreadPool._context.value, get)
        ThreadPool.worker(get, put, *args, **kwargs)
