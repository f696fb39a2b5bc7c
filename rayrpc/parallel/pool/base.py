"""What all pools have: tasks go in, workers do them, results come out and find who waits."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from typing import Any

from rayrpc.errors import CallError
from rayrpc.parallel.pool.results import (
    AsyncResult,
    Callback,
    IMapIterator,
    IMapUnorderedIterator,
    MapResult,
)
from rayrpc.parallel.pool.tasks import chunks_of, mapstar, starmapstar, work

__all__ = ["BasePool", "PoolStates"]

logger = logging.getLogger(__name__)

# How often the threads of a pool look whether it was closed.
TICK_SECONDS = 0.1


class PoolStates(Enum):
    """The states of a pool."""

    RUN = 0
    CLOSE = 1
    TERMINATE = 2


class BasePool:
    """Give tasks to workers; what they are, a subclass says.

    It overrides ``setup_queues``, ``repopulate_pool``, ``maintain_pool``, ``pool_inqueue_put``,
    ``pool_outqueue_get``, ``join_workers`` and ``terminate_workers``; its workers run ``worker``.

    Args:
        processes (int, optional): the number of workers; default: of CPUs.
        initializer (Callable, optional): called once in each worker.
        initargs (tuple): its arguments.
        maxtasksperchild (int, optional): after so many tasks a worker is replaced.
        context: for subclasses; kept as ``_ctx``.

    Raises:
        ValueError: ``processes`` or ``maxtasksperchild`` is less than 1.
        TypeError: the initializer cannot be called.

    Source: ``machin.parallel.pool.BasePool`` and ``multiprocessing.pool.Pool``.  As in machin, an
    iterable is read to its end by the call that it is given to, which raises what it raises.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., Any] | None = None,
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
        self._wake = threading.Event()  # the maintenance has something to do
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
        import os

        return os.cpu_count() or 1

    def __repr__(self) -> str:
        return f"<{type(self).__name__} state={self._state.name} size={self.size()}>"

    def __reduce__(self) -> Any:
        raise NotImplementedError("pool objects cannot be passed between processes or pickled")

    def __enter__(self) -> BasePool:
        self._check_running()
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def size(self) -> int:
        """Return the number of workers."""
        return len(self._pool)

    # -- calls --------------------------------------------------------------------------------

    def apply(self, func: Callable[..., Any], args: Iterable[Any] = (), kwds: Any = None) -> Any:
        """Run a task and return its result.

        Args:
            func (Callable): what to call.
            args (tuple), kwds (dict): with these.
        """
        return self.apply_async(func, args, kwds).get()

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: Any = None,
        callback: Callback = None,
        error_callback: Callback = None,
    ) -> AsyncResult:
        """Start a task.

        Args:
            func, args, kwds: as for ``apply``.
            callback: called with the result, in a thread of the pool, before it is ready.
            error_callback: called with the exception, if there is one.

        Returns:
            AsyncResult: of the task.
        """
        task = (self._prepared(func), tuple(args), dict(kwds or {}))
        made = functools.partial(
            AsyncResult, cache=self._cache, callback=callback, error_callback=error_callback
        )
        return self._submit(made, [task])  # type: ignore[no-any-return]

    def map(
        self,
        func: Callable[[Any], Any],
        iterable: Collection[Any],
        chunksize: int | None = None,
    ) -> list[Any]:
        """Call a function with each element, and return the results in order.

        Args:
            func (Callable): takes an element.
            iterable (Collection): of elements.
            chunksize (int, optional): how many of them are a task; default: a fourth of each
                worker's share.

        Raises:
            Exception: what a task raised, when all have ended.
        """
        return self.map_async(func, iterable, chunksize).get()  # type: ignore[no-any-return]

    def map_async(
        self,
        func: Callable[[Any], Any],
        iterable: Collection[Any],
        chunksize: int | None = None,
        callback: Callback = None,
        error_callback: Callback = None,
    ) -> MapResult:
        """Start the tasks of ``map``; return a MapResult of the list."""
        return self._map(mapstar, func, iterable, chunksize, callback, error_callback)

    def starmap(
        self,
        func: Callable[..., Any],
        iterable: Collection[tuple[Any, ...]],
        chunksize: int | None = None,
    ) -> list[Any]:
        """Do as ``map``, with a function that takes the values in an element as arguments."""
        return self.starmap_async(func, iterable, chunksize).get()  # type: ignore[no-any-return]

    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Collection[tuple[Any, ...]],
        chunksize: int | None = None,
        callback: Callback = None,
        error_callback: Callback = None,
    ) -> MapResult:
        """Start the tasks of ``starmap``; return a MapResult of the list."""
        return self._map(starmapstar, func, iterable, chunksize, callback, error_callback)

    def imap(
        self, func: Callable[[Any], Any], iterable: Collection[Any], chunksize: int = 1
    ) -> IMapIterator | list[Any]:
        """Call a function with each element, and return an iterator over the results.

        Args:
            func, iterable: as for ``map``.
            chunksize (int): how many elements are a task.

        Returns:
            IMapIterator: if ``chunksize`` is 1; else, as in machin, a list of the results.
        """
        return self._imap(IMapIterator, func, iterable, chunksize)  # type: ignore[no-any-return]

    def imap_unordered(
        self, func: Callable[[Any], Any], iterable: Collection[Any], chunksize: int = 1
    ) -> IMapUnorderedIterator | list[Any]:
        """Do as ``imap``, with the results in the order in which they come."""
        return self._imap(IMapUnorderedIterator, func, iterable, chunksize)  # type: ignore[no-any-return]

    def _map(
        self,
        task: Callable[..., Any],
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int | None,
        callback: Callback,
        error_callback: Callback,
    ) -> MapResult:
        elements = list(iterable)
        if chunksize is None:
            chunksize = max(1, -(-len(elements) // (4 * self._processes)))
        chunks = chunks_of(elements, chunksize)
        prepared = self._prepared(func)
        made = functools.partial(
            MapResult,
            cache=self._cache,
            chunksize=chunksize,
            length=len(elements),
            callback=callback,
            error_callback=error_callback,
        )
        tasks: list[Any] = [(task, (prepared, chunk), {}) for chunk in chunks]
        return self._submit(made, tasks)  # type: ignore[no-any-return]

    def _imap(
        self,
        kind: type[IMapIterator],
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int,
    ) -> Any:
        elements = list(iterable)
        func = self._prepared(func)
        tasks: list[Any] = [(func, (each,), {}) for each in elements]
        if chunksize != 1:
            tasks = [(mapstar, (func, chunk), {}) for chunk in chunks_of(elements, chunksize)]
        made = functools.partial(kind, cache=self._cache, length=len(tasks))
        result = self._submit(made, tasks)
        return result if chunksize == 1 else list(itertools.chain.from_iterable(result))

    def _submit(
        self, made: Callable[[int], Any], tasks: list[tuple[Any, tuple[Any, ...], Any]]
    ) -> Any:
        """Put tasks in; return what their results come to, which ``made`` makes of a number."""
        with self._lock:  # or close() finds nothing to wait for
            self._check_running()
            job = next(self._jobs)
            result = made(job)
        try:
            for index, task in enumerate(tasks):
                self.pool_inqueue_put((job, index, *task))
        except BaseException:
            self._cache.pop(job, None)
            raise
        if self._state is PoolStates.TERMINATE:  # it came to that while we were putting
            result._fail(self._error or _terminated())
        return result

    def _check_running(self) -> None:
        if self._error is not None:
            raise self._error
        if self._state is not PoolStates.RUN:
            raise ValueError(f"the pool is not running: its state is {self._state.name}")

    def _prepared(self, func: Callable[..., Any]) -> Any:
        """Return what to put into a task for a function."""
        if not callable(func):
            raise TypeError(f"func must be a callable, got {func!r}")
        return func

    def _setup_of(self, number: int) -> tuple[Callable[..., Any] | None, tuple[Any, ...]]:
        """Return the initializer of a worker, which are numbered from 0, and its arguments."""
        return self._initializer, self._initargs

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Take no more tasks; the workers end when all are done.  ``join`` waits for that."""
        with self._lock:
            if self._state is PoolStates.RUN:
                self._state = PoolStates.CLOSE
        self._wake.set()

    def terminate(self) -> None:
        """End the workers at once; results that are not there yet will be a CallError."""
        self._stop(_terminated())

    def join(self) -> None:
        """Wait until the workers have ended.

        Raises:
            ValueError: neither ``close`` nor ``terminate`` was called.
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
            result._fail(error)
        self.terminate_workers()

    # -- threads ------------------------------------------------------------------------------

    def _needs_workers(self) -> bool:
        """Tell whether there are tasks, or may be."""
        return self._state is PoolStates.RUN or (
            self._state is PoolStates.CLOSE and bool(self._cache)
        )

    def _handle_results(self) -> None:
        while self._needs_workers():
            try:
                got = self.pool_outqueue_get(TICK_SECONDS)
            except TimeoutError:
                continue
            except (OSError, EOFError) as exc:
                self._break(exc)
                return
            if got is not None:
                self._settle(*got)
            del got
        if self._state is PoolStates.CLOSE:
            for _ in range(self._processes):
                self.pool_inqueue_put(None)

    def _settle(self, job: int, index: int, outcome: tuple[bool, Any]) -> None:
        waiting = self._cache.get(job)
        if waiting is not None:
            waiting._set(index, outcome)

    def _maintain(self) -> None:
        while self._needs_workers():
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()
            try:
                self.maintain_pool()
            except BaseException as exc:
                self._break(exc)
                return

    def _break(self, error: BaseException) -> None:
        if self._state is PoolStates.TERMINATE:
            return
        logger.error("a pool ends because its workers do: %s", error)
        self._error = error
        self._stop(error)

    # -- what a subclass says -----------------------------------------------------------------

    def setup_queues(self) -> None:
        """Make what tasks and results go through."""
        raise NotImplementedError

    def repopulate_pool(self) -> None:
        """Start workers until there are as many as there should be."""
        raise NotImplementedError

    def maintain_pool(self) -> None:
        """Raise the exceptions of workers, which end the pool; replace those that have retired."""
        raise NotImplementedError

    def pool_inqueue_put(self, obj: Any) -> None:
        """Give a task to the workers; None ends one of them."""
        raise NotImplementedError

    def pool_outqueue_get(self, timeout: float) -> Any:
        """Return the next result.

        Args:
            timeout (float): in seconds.

        Raises:
            TimeoutError: none came.
            OSError, EOFError: none can come any more.
        """
        raise NotImplementedError

    def join_workers(self) -> None:
        """Wait until all workers have ended."""
        raise NotImplementedError

    def terminate_workers(self) -> None:
        """End all workers at once."""
        raise NotImplementedError

    @staticmethod
    def worker(
        get: Callable[[], Any],
        put: Callable[[Any], None],
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        maxtasks: int | None = None,
    ) -> None:
        """Do tasks until there are no more; what a worker runs.

        Args:
            get: returns a task, or None at the end.
            put: takes a result.
            initializer, initargs: called first.
            maxtasks (int, optional): how many tasks to do at most.
        """
        work(get, put, initializer, initargs, maxtasks)


def _terminated() -> CallError:
    return CallError("the pool was terminated before this task ended")
