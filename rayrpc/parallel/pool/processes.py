"""Pools whose workers are processes on all nodes of the cluster; a worker is in ``worker.py``."""

from __future__ import annotations

import functools
import queue
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.pool import ExceptionWithTraceback, MaybeEncodingError  # type: ignore
from typing import Any

from rayrpc._concurrency.outcome import Error, Value, attempt
from rayrpc._concurrency.waiting import Event
from rayrpc.errors import CallError, CallLostError, WorkerDiedError
from rayrpc.launch.worker_pool import WorkerPool, count_cpus
from rayrpc.parallel.pool.base import BasePool, PoolStates, Setup
from rayrpc.parallel.pool.contexts import (
    CtxPoolStorage,
    add_context,
    check_contexts,
    initialize_context,
)
from rayrpc.parallel.pool.scheduler import Scheduler
from rayrpc.parallel.pool.task_codec import TaskEncoder, decode_object, prepare_function
from rayrpc.parallel.pool.tasks import Result, Task
from rayrpc.parallel.pool.worker import WorkerSpec, collect_results, pools, run_worker

__all__ = ["CtxPool", "P2PPool", "Pool"]


class _Worker:
    """A worker as its pool sees it.

    Args:
        number (int): its place in the pool, from 0.
        name (str): unique among the workers of this process's pools.
        copy_tensors (bool): send tensors by value.
    """

    def __init__(self, number: int, name: str, copy_tensors: bool) -> None:
        self.number = number
        self.name = name
        self.encoder = TaskEncoder(copy_tensors)
        self.ended = Event()
        self.error: BaseException | None = None  # set before ``ended``; it ends the pool


class Pool(BasePool):
    """Run tasks in Ray workers, on all nodes of the cluster.

    Lambdas and local functions may be tasks.  A worker that dies is replaced; the tasks that it
    had fail with ``WorkerDiedError``.

    Args:
        processes (int, optional): number of workers; default: of the cluster's CPUs.
        initializer, initargs, maxtasksperchild: as for ``BasePool``.
        is_recursive (bool): accepted for machin's sake: what local functions refer to is sent.
        is_daemon (bool): accepted for machin's sake: workers end with this process.
        is_copy_tensor (bool): send tensors by value.  Else all workers are on this node, and the
            tensors of arguments and results are moved to memory that they share.
        share_method (str): "cpu" or "cuda"; needed if not ``is_copy_tensor``.

    Raises:
        RuntimeError: ``share_method`` is neither.
        PlacementError: the cluster lacks what the setting ``workers`` asks for.

    Source: ``machin.parallel.pool.Pool``.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
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

    def _prepare(self, func: Callable[..., Any]) -> Any:
        func = super()._prepare(func)
        return prepare_function(func) if self._is_copy_tensor else func

    def setup_queues(self) -> None:
        """Make the scheduler that answers workers, and the queue of results."""
        self._key = uuid.uuid4().hex
        self._by_name: dict[str, _Worker] = {}
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._scheduler = Scheduler(self._results.put, self._encode)
        self._worker_pool = WorkerPool(here=not self._is_copy_tensor, at_exit=self.terminate)
        pools[self._key] = self

    def _encode(self, name: str, tasks: list[Task]) -> Any:
        worker = self._by_name.get(name)
        return None if worker is None else worker.encoder.encode(tasks)

    def repopulate_pool(self) -> None:
        """Start workers until there are as many as there should be."""
        missing = sorted(set(range(self._processes)) - {each.number for each in self._pool})
        for number, name in zip(missing, self._worker_pool.start(len(missing)), strict=True):
            worker = _Worker(number, name, self._is_copy_tensor)
            self._by_name[name] = worker
            self._pool.append(worker)
            self._scheduler.add_worker(name, self._maxtasksperchild)
            initializer, initargs = self._worker_setup(number)
            spec = WorkerSpec(
                self._key,
                name,
                self._is_copy_tensor,
                self.worker,
                prepare_function(initializer),
                initargs,
                self._maxtasksperchild,
            )
            future = self._worker_pool.call(name, run_worker, (spec,))
            future.add_done_callback(functools.partial(self._on_ended, worker))

    def _on_ended(self, worker: _Worker, future: Any) -> None:
        outcome = attempt(future.value)
        error = outcome.error if isinstance(outcome, Error) else None
        error_of_tasks: BaseException = error or CallError(
            f"worker {worker.name!r} of a pool ended before it did its task: submit it again"
        )
        has_worked = self._scheduler.remove_worker(worker.name, error_of_tasks)
        is_lost = isinstance(error, (CallLostError, WorkerDiedError)) and has_worked
        if error is not None and not is_lost:
            worker.error = error
        worker.ended.set()
        self._wake.set()

    def maintain_pool(self) -> None:
        """Replace workers that have ended, and collect results of workers that are overdue.

        Raises:
            Exception: of a worker that could not start, or whose initializer failed.
        """
        ended = [worker for worker in self._pool if worker.ended.is_set()]
        if ended:
            self._remove(ended)
            for worker in ended:
                if worker.error is not None:
                    raise worker.error
            if self._needs_workers():
                self.repopulate_pool()
        for name, batch, revoke in self._scheduler.find_overdue():
            future = self._worker_pool.call(name, collect_results, (self._key, revoke))
            future.add_done_callback(functools.partial(self._on_collected, name, batch))

    def _remove(self, workers: list[_Worker]) -> None:
        for worker in workers:
            self._pool.remove(worker)
            del self._by_name[worker.name]
        self._worker_pool.end([worker.name for worker in workers])

    def _on_collected(self, name: str, batch: int, future: Any) -> None:
        outcome = attempt(future.value)
        if isinstance(outcome, Value):
            results, revoked = outcome.value
            self.report_results(name, results)
            if revoked:
                self._scheduler.return_tasks(name, batch, revoked)

    def pool_inqueue_put(self, obj: Any) -> None:
        """Submit a task to the scheduler.

        Args:
            obj: a task; None: there will be no more.
        """
        if obj is None:
            self._scheduler.close()
        else:
            self._scheduler.submit(obj)

    def pool_outqueue_get(self, timeout: float) -> Any:
        """Return the next result.

        Args:
            timeout (float): in seconds.

        Raises:
            TimeoutError: no result came.
        """
        try:
            return self._results.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no result came in {timeout} s") from None

    def join_workers(self) -> None:
        """Wait until all workers have ended."""
        workers = list(self._pool)
        if self._state is not PoolStates.TERMINATE:
            for worker in workers:
                worker.ended.wait()
        self._remove(workers)
        self._worker_pool.stop()

    def terminate_workers(self) -> None:
        """End all workers at once."""
        pools.pop(self._key, None)
        self._scheduler.close(drop=True)
        self._worker_pool.stop()

    def request_tasks(self, name: str, results: list[Any], retried: bool) -> Any:
        """Accept results of a worker and give it its next tasks; called by the worker.

        Args:
            name (str): of the worker.
            results (list): encoded.
            retried (bool): the worker sent this request before, and did not get the answer.

        Returns:
            Future: of encoded tasks; None where there will be none.
        """
        worker = self._by_name.get(name)
        if retried and worker is not None:
            worker.encoder.forget()
        return self._scheduler.request(name, map(_decode_result, results))

    def report_results(self, name: str, results: list[Any]) -> None:
        """Accept results of a worker; called by the worker.

        Args:
            name (str): of the worker.
            results (list): encoded.
        """
        self._scheduler.report(name, map(_decode_result, results))

    @staticmethod
    def worker(
        get: Callable[[], Any], put: Callable[[Any], None], *args: Any, **kwargs: Any
    ) -> None:
        """Run tasks until there are no more; exceptions are sent with their traceback.

        Args:
            get (Callable): returns a task, or None at the end.
            put (Callable): accepts a result.
            *args: the other arguments of ``BasePool.worker``.
            **kwargs: the same, by name.
        """

        def put_result(result: Result) -> None:
            job, index, (success, value) = result
            if not success and not isinstance(value, MaybeEncodingError):
                value = ExceptionWithTraceback(value, value.__traceback__)
            put((job, index, (success, value)))

        BasePool.worker(get, put_result, *args, **kwargs)


class P2PPool(Pool):
    """Run tasks in workers that do not share a queue; the same as ``Pool`` here.

    Args: as for ``Pool``.

    Source: ``machin.parallel.pool.P2PPool``.
    """


class CtxPool(Pool):
    """Run tasks in workers with a context each, which functions get as their first argument.

    Args:
        processes (int): number of workers.
        worker_contexts (list, optional): one for each worker, pickled; default: None for all.
        initializer, initargs, maxtasksperchild: as for ``Pool``.
        is_recursive, is_daemon, is_copy_tensor, share_method: as for ``Pool``.

    Raises:
        ValueError: the number of contexts is not that of the workers.

    Source: ``machin.parallel.pool.CtxPool``.
    """

    def __init__(
        self,
        processes: int,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        maxtasksperchild: int | None = None,
        worker_contexts: Sequence[Any] | None = None,
        is_recursive: bool = False,
        is_daemon: bool = True,
        is_copy_tensor: bool = True,
        share_method: str | None = None,
    ) -> None:
        self._contexts = check_contexts(processes, worker_contexts)
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

    def _worker_setup(self, number: int) -> Setup:
        return initialize_context, (self._contexts[number], self._initializer, *self._initargs)

    @staticmethod
    def worker(
        get: Callable[[], Any], put: Callable[[Any], None], *args: Any, **kwargs: Any
    ) -> None:
        """Run tasks with this worker's context as the functions' first argument.

        Args:
            get (Callable): returns a task, or None at the end.
            put (Callable): accepts a result.
            *args: the other arguments of ``BasePool.worker``.
            **kwargs: the same, by name.
        """
        get = add_context(lambda: CtxPoolStorage.storage, get)
        Pool.worker(get, put, *args, **kwargs)


def _decode_result(sent: Any) -> Result:
    job, index, (success, value) = sent
    try:
        return job, index, (success, decode_object(value))
    except Exception as exc:
        return job, index, (False, exc)
