"""Pools whose workers are processes all over the cluster.

The other end, a worker, is in ``serving.py``.
"""

from __future__ import annotations

import functools
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.pool import ExceptionWithTraceback, MaybeEncodingError  # type: ignore
from typing import Any

from rayrpc._concurrency.outcome import Error, Value, attempt
from rayrpc.errors import CallError, CallLostError, WorkerDiedError
from rayrpc.launch.worker_pool import WorkerPool, count_cpus
from rayrpc.parallel.pool.base import BasePool, PoolStates
from rayrpc.parallel.pool.contexts import CtxPoolStorage, checked, enter, with_context
from rayrpc.parallel.pool.scheduler import Scheduler
from rayrpc.parallel.pool.serving import Order, pools, serve, tell
from rayrpc.parallel.pool.shipping import (
    Outbound,
    prepared,
    unpacked,
)
from rayrpc.parallel.pool.tasks import Result, Task

__all__ = ["CtxPool", "P2PPool", "Pool"]

AGAIN_SECONDS = 0.1  # after a connection was cut

Setup = tuple[Callable[..., Any] | None, tuple[Any, ...]]


class _Process:
    """A worker as its pool knows it."""

    def __init__(self, number: int, name: str, copies: bool) -> None:
        self.number = number
        self.name = name
        self.way = Outbound(copies)
        self.ended = threading.Event()
        self.error: BaseException | None = None  # that ends the pool


class Pool(BasePool):
    """A pool of Ray workers, on all nodes of the cluster.

    Lambdas and local functions can be given to it.  A worker that dies while it has tasks is
    replaced; the tasks fail with ``WorkerDiedError``.

    Args:
        processes (int, optional): the number of workers; default: of the cluster's CPUs.
        initializer, initargs, maxtasksperchild: as for ``BasePool``.
        is_recursive (bool): accepted for machin's sake: what local functions refer to is sent.
        is_daemon (bool): accepted for machin's sake: workers end with this process.
        is_copy_tensor (bool): send the values of tensors; else workers, all on this node, see
            the memory of tensors in arguments and results, which are moved to shared memory.
        share_method (str): if not ``is_copy_tensor``: "cpu", or "cuda".

    Raises:
        RuntimeError: ``share_method`` is neither.
        PlacementError: the cluster has not what the setting ``workers`` asks for.

    Source: ``machin.parallel.pool.Pool``.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        maxtasksperchild: int | None = None,
        is_recursive: bool = False,
        is_daemon: bool = True,
        is_copy_tensor: bool = True,
        share_method: str | None = None,
    ) -> None:
        if not is_copy_tensor and share_method not in ("cpu", "cuda"):
            raise RuntimeError(
                f'Invalid share method: "{share_method}"; with is_copy_tensor=False it must be '
                '"cpu" or "cuda"'
            )
        self._is_copy_tensor = is_copy_tensor
        super().__init__(processes, initializer, initargs, maxtasksperchild)

    def _count_cpus(self) -> int:
        return count_cpus()

    def _prepared(self, func: Callable[..., Any]) -> Any:
        func = super()._prepared(func)
        return prepared(func) if self._is_copy_tensor else func

    def setup_queues(self) -> None:
        """Make the scheduler that workers ask for tasks, and a queue of results."""
        self._key = uuid.uuid4().hex
        self._named: dict[str, _Process] = {}
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._scheduler = Scheduler(self._results.put, self._pack)
        self._worker_pool = WorkerPool(here=not self._is_copy_tensor, at_exit=self.terminate)
        pools[self._key] = self

    def _pack(self, name: str, tasks: list[Task]) -> Any:
        process = self._named.get(name)
        return None if process is None else process.way.tasks(tasks)

    def repopulate_pool(self) -> None:
        """Start workers until there are as many as there should be."""
        missing = sorted(set(range(self._processes)) - {each.number for each in self._pool})
        for number, name in zip(missing, self._worker_pool.start(len(missing)), strict=True):
            process = _Process(number, name, self._is_copy_tensor)
            self._named[process.name] = process
            self._pool.append(process)
            self._scheduler.add(process.name, self._maxtasksperchild)
            initializer, initargs = self._setup_of(process.number)
            order = Order(
                self._key,
                process.name,
                self._is_copy_tensor,
                self.worker,
                prepared(initializer),
                initargs,
                self._maxtasksperchild,
            )
            future = self._worker_pool.call(process.name, serve, (order,))
            future.add_done_callback(functools.partial(self._ended, process))

    def _ended(self, process: _Process, future: Any) -> None:
        outcome = attempt(future.value)
        error = outcome.error if isinstance(outcome, Error) else None
        left: BaseException = error or CallError(
            f"worker {process.name!r} of a pool ended before it did its task"
        )
        has_worked = self._scheduler.remove(process.name, left)
        is_lost = isinstance(error, (CallLostError, WorkerDiedError)) and has_worked
        if error is not None and not is_lost:
            process.error = error
        process.ended.set()
        self._wake.set()

    def maintain_pool(self) -> None:
        """Replace workers that died, or did their number of tasks; raise what ended one else."""
        ended = [process for process in self._pool if process.ended.is_set()]
        if ended:
            self._forget(ended)
            for process in ended:
                if process.error is not None:
                    raise process.error
            if self._needs_workers():  # else they are meant to end
                self.repopulate_pool()
        for name, turn, is_wanted in self._scheduler.late():
            future = self._worker_pool.call(name, tell, (self._key, is_wanted))
            future.add_done_callback(functools.partial(self._told, name, turn))

    def _forget(self, processes: list[_Process]) -> None:
        for process in processes:
            self._pool.remove(process)
            del self._named[process.name]
        self._worker_pool.end([process.name for process in processes])

    def _told(self, name: str, turn: int, future: Any) -> None:
        outcome = attempt(future.value)
        if isinstance(outcome, Value):
            results, back = outcome.value
            self.report(name, results)
            if back:
                self._scheduler.give_back(name, turn, back)

    def pool_inqueue_put(self, obj: Any) -> None:
        """Put a task on the scheduler."""
        if obj is None:
            self._scheduler.close()
        else:
            self._scheduler.put(obj)

    def pool_outqueue_get(self, timeout: float) -> Any:
        """Take a result out of the queue."""
        try:
            return self._results.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no result came in {timeout} s") from None

    def join_workers(self) -> None:
        """Wait until all workers have ended."""
        processes = list(self._pool)
        if self._state is not PoolStates.TERMINATE:
            for process in processes:
                process.ended.wait()
        self._forget(processes)
        self._worker_pool.stop()

    def terminate_workers(self) -> None:
        """End all workers at once."""
        pools.pop(self._key, None)
        self._scheduler.close(drop=True)
        self._worker_pool.stop()

    def take(self, name: str, results: list[Any], again: bool) -> Any:
        """Take results of a worker that asks for tasks, and return a Future of these."""
        process = self._named.get(name)
        if again and process is not None:
            process.way.forget()
        return self._scheduler.take(name, map(_result, results))

    def report(self, name: str, results: list[Any]) -> None:
        """Take results of a worker."""
        self._scheduler.report(name, map(_result, results))

    @staticmethod
    def worker(
        get: Callable[[], Any], put: Callable[[Any], None], *args: Any, **kwargs: Any
    ) -> None:
        """Do tasks until there are no more; exceptions bring their traceback with them."""

        def put_result(result: Result) -> None:
            job, index, (success, value) = result
            if not success and not isinstance(value, MaybeEncodingError):
                value = ExceptionWithTraceback(value, value.__traceback__)
            put((job, index, (success, value)))

        BasePool.worker(get, put_result, *args, **kwargs)


class P2PPool(Pool):
    """A pool whose workers do not share a queue.

    That is so for ``Pool`` here, too: each of its workers has its own connection to it.

    Source: ``machin.parallel.pool.P2PPool``.
    """


class CtxPool(Pool):
    """A pool of workers with a context each, which functions get as their first argument.

    Args:
        processes (int): the number of workers.
        worker_contexts (list, optional): one for each, pickled; default: None for all.
        initializer, initargs, maxtasksperchild, is_recursive, is_daemon, is_copy_tensor,
            share_method: as for ``Pool``.

    Raises:
        ValueError: there are more or fewer contexts than workers.

    Source: ``machin.parallel.pool.CtxPool``.
    """

    def __init__(
        self,
        processes: int,
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        maxtasksperchild: int | None = None,
        worker_contexts: Sequence[Any] | None = None,
        is_recursive: bool = False,
        is_daemon: bool = True,
        is_copy_tensor: bool = True,
        share_method: str | None = None,
    ) -> None:
        self._contexts = checked(processes, worker_contexts)
        super().__init__(
            processes,
            initializer,
            initargs,
            maxtasksperchild,
            is_recursive,
            is_daemon,
            is_copy_tensor,
            share_method,
        )

    def _setup_of(self, number: int) -> Setup:
        return enter, (self._contexts[number], self._initializer, *self._initargs)

    @staticmethod
    def worker(
        get: Callable[[], Any], put: Callable[[Any], None], *args: Any, **kwargs: Any
    ) -> None:
        """Do tasks, with this worker's context as the functions' first argument."""
        get = with_context(lambda: CtxPoolStorage.storage, get)
        Pool.worker(get, put, *args, **kwargs)


def _result(sent: Any) -> Result:
    job, index, (success, value) = sent
    try:
        return job, index, (success, unpacked(value))
    except Exception as exc:
        return job, index, (False, exc)
