"""What all pools have: a state, tasks that go in, results that come out, and two threads.

A pool's state::

    RUN ──close()──> CLOSE: accepts no calls; when all are complete, the workers end
     │                 │
     └─────────────────┴──terminate(), or an error of the workers──> TERMINATE: workers are killed
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from rayrpc._concurrency.outcome import fresh
from rayrpc._concurrency.waiting import Event
from rayrpc.errors import CallError
from rayrpc.parallel.pool.calls import Call, PoolCalls, PoolResult
from rayrpc.parallel.pool.tasks import run_tasks

__all__ = ["BasePool", "PoolStates", "Setup"]

logger = logging.getLogger(__name__)

# How often the threads of a pool check its state.
POLL_SECONDS = 0.1

B = TypeVar("B", bound="BasePool")
R = TypeVar("R", bound=PoolResult)
Setup = tuple[Callable[..., object] | None, tuple[Any, ...]]  # an initializer and its arguments


class PoolStates(Enum):
    """Name the states of a pool.

    Source: ``machin.parallel.pool.PoolStates``.
    """

    RUN = 0
    CLOSE = 1
    TERMINATE = 2


class BasePool(PoolCalls):
    """Run tasks in workers; a subclass defines what workers are.

    It overrides ``setup_queues``, ``repopulate_pool``, ``maintain_pool``, ``pool_inqueue_put``,
    ``pool_outqueue_get``, ``join_workers`` and ``terminate_workers``; its workers run ``worker``.

    Args:
        processes (int, optional): number of workers; default: of this machine's CPUs.
        initializer (Callable, optional): called first in each worker.
        initargs (tuple): its arguments.
        maxtasksperchild (int, optional): number of tasks after which a worker is replaced.
        context: for subclasses; kept as ``_ctx``.

    Raises:
        ValueError: ``processes`` or ``maxtasksperchild`` is less than 1.
        TypeError: the initializer is no callable.

    Source: ``machin.parallel.pool.BasePool`` and ``multiprocessing.pool.Pool``.  As in machin, a
    call reads its iterable to the end first, and raises what that raises.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        maxtasksperchild: int | None = None,
        context: Any = None,
    ) -> None:
        self._processes = self._count_cpus() if processes is None else processes
        if self._processes < 1:
            raise ValueError(f"a pool needs at least 1 worker, got processes={processes}")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be a callable, got {initializer!r}")
        if maxtasksperchild is not None and maxtasksperchild < 1:
            raise ValueError(f"maxtasksperchild must be at least 1, got {maxtasksperchild}")
        self._initializer = initializer
        self._initargs = tuple(initargs)
        self._maxtasksperchild = maxtasksperchild
        self._ctx = context
        self._state = PoolStates.RUN
        self._pool: list[Any] = []
        self._cache: dict[int, Any] = {}
        self._jobs = itertools.count()
        self._error: BaseException | None = None
        self._wake = Event()  # set when maintain_pool has something to do
        self._lock = threading.Lock()
        self.setup_queues()
        try:
            self.repopulate_pool()
        except BaseException:
            self._state = PoolStates.TERMINATE
            self.terminate_workers()
            raise
        self._threads = [
            threading.Thread(target=self._handle_results, name="pool-results", daemon=True),
            threading.Thread(target=self._maintain, name="pool-maintenance", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _count_cpus(self) -> int:
        return os.cpu_count() or 1

    def __repr__(self) -> str:
        state = f"state={self._state.name} size={self.size()} pending={len(self._cache)}"
        return f"<{type(self).__name__} {state}>"

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError("pool objects cannot be passed between processes or pickled")

    def __enter__(self: B) -> B:
        self._check_running()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.terminate()

    def size(self) -> int:
        """Return the number of workers.

        Returns:
            int: less than the pool was made with while workers are being replaced.

        Source: ``machin.parallel.pool.BasePool.size``.
        """
        return len(self._pool)

    def _submit(self, make: Callable[[int], R], tasks: list[Call]) -> R:
        with self._lock:  # after close() the result thread must not miss a call
            self._check_running()
            job = next(self._jobs)
            result = make(job)
        try:
            for index, task in enumerate(tasks):
                self.pool_inqueue_put((job, index, *task))
        except BaseException:
            self._cache.pop(job, None)
            raise
        if self._state is PoolStates.TERMINATE:  # since the check above
            result.fail(self._error or _terminated())
        return result

    def _check_running(self) -> None:
        if self._error is not None:
            raise fresh(self._error)
        if self._state is not PoolStates.RUN:
            raise ValueError(f"the pool is not running: its state is {self._state.name}")

    def _worker_setup(self, number: int) -> Setup:
        """Return the initializer, and its arguments, of the worker with a number, from 0."""
        return self._initializer, self._initargs

    # -- end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Accept no more calls; the workers end when all tasks have.

        ``join`` waits for that.

        Source: ``machin.parallel.pool.BasePool.close``.
        """
        with self._lock:
            if self._state is PoolStates.RUN:
                self._state = PoolStates.CLOSE
        self._wake.set()

    def terminate(self) -> None:
        """End the workers at once; calls that are not complete raise ``CallError``.

        Source: ``machin.parallel.pool.BasePool.terminate``.
        """
        self._stop(_terminated())

    def join(self) -> None:
        """Wait until the workers have ended.

        Raises:
            ValueError: neither ``close`` nor ``terminate`` was called.

        Source: ``machin.parallel.pool.BasePool.join``.
        """
        if self._state is PoolStates.RUN:
            raise ValueError("the pool is still running: call close() or terminate() before join()")
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self.join_workers()

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            if self._state is PoolStates.TERMINATE:
                return
            self._state = PoolStates.TERMINATE
        self._wake.set()
        for result in list(self._cache.values()):
            result.fail(error)
        self.terminate_workers()

    # -- threads ------------------------------------------------------------------------------

    def _needs_workers(self) -> bool:
        """Tell whether calls are open, or may still be made."""
        return self._state is PoolStates.RUN or (
            self._state is PoolStates.CLOSE and bool(self._cache)
        )

    def _handle_results(self) -> None:
        while self._needs_workers():
            try:
                received = self.pool_outqueue_get(POLL_SECONDS)
            except TimeoutError:
                continue
            except (OSError, EOFError) as exc:
                self._fail(exc)
                return
            if received is not None:
                self._deliver(*received)
            del received
        if self._state is PoolStates.CLOSE:
            for _ in range(self._processes):
                self.pool_inqueue_put(None)

    def _deliver(self, job: int, index: int, outcome: tuple[bool, Any]) -> None:
        result = self._cache.get(job)
        if result is not None:
            result.set_outcome(index, outcome)

    def _maintain(self) -> None:
        while self._needs_workers():
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            try:
                self.maintain_pool()
            except BaseException as exc:
                self._fail(exc)
                return

    def _fail(self, error: BaseException) -> None:
        if self._state is PoolStates.TERMINATE:
            return
        logger.error("a pool ends because its workers do: %s", error)
        self._error = error
        self._stop(error)

    # -- for subclasses -----------------------------------------------------------------------

    def setup_queues(self) -> None:
        """Make the queues of tasks and results; called first.

        Source: ``machin.parallel.pool.BasePool.setup_queues``.
        """
        raise NotImplementedError

    def repopulate_pool(self) -> None:
        """Start workers until there are as many as there should be.

        Source: ``machin.parallel.pool.BasePool.repopulate_pool``.
        """
        raise NotImplementedError

    def maintain_pool(self) -> None:
        """Replace workers that have ended; called in a thread, several times a second.

        Raises:
            Exception: of a worker; it ends the pool.

        Source: ``machin.parallel.pool.BasePool.maintain_pool``.
        """
        raise NotImplementedError

    def pool_inqueue_put(self, obj: Any) -> None:
        """Queue a task for the workers.

        Args:
            obj: ``(job, index, func, args, kwds)``; None ends one worker.

        Source: ``machin.parallel.pool.BasePool.pool_inqueue_put``.
        """
        raise NotImplementedError

    def pool_outqueue_get(self, timeout: float) -> Any:
        """Return the next result.

        Args:
            timeout (float): in seconds.

        Returns:
            ``(job, index, (success, value or exception))``, as ``worker`` put it; or None.

        Raises:
            TimeoutError: no result came.
            OSError, EOFError: no result can come any more; it ends the pool.

        Source: ``machin.parallel.pool.BasePool.pool_outqueue_get``.
        """
        raise NotImplementedError

    def join_workers(self) -> None:
        """Wait until all workers have ended.

        Source: ``machin.parallel.pool.BasePool.join_workers``.
        """
        raise NotImplementedError

    def terminate_workers(self) -> None:
        """End all workers at once.

        Source: ``machin.parallel.pool.BasePool.terminate_workers``.
        """
        raise NotImplementedError

    @staticmethod
    def worker(
        get: Callable[[], Any],
        put: Callable[[Any], None],
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        maxtasks: int | None = None,
    ) -> None:
        """Run tasks until there are no more; what a worker executes.

        Args:
            get (Callable): returns a task, or None at the end.
            put (Callable): accepts a result.
            initializer (Callable, optional): called first.
            initargs (tuple): its arguments.
            maxtasks (int, optional): number of tasks to run at most.

        Source: ``machin.parallel.pool.BasePool.worker``.
        """
        run_tasks(get, put, initializer, initargs, maxtasks)


def _terminated() -> CallError:
    return CallError("the pool was terminated before this task ended")
