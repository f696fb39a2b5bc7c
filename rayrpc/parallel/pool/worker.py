"""A worker of a pool, in a process of its own.

It requests tasks from the pool by a call that reports the results of the last ones, and runs them
in one thread, as the main thread of a process of ``multiprocessing`` would.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch.futures import Future

from rayrpc._concurrency.outcome import Error, Value, complete
from rayrpc._runtime import current
from rayrpc._runtime.invocation import Invocation
from rayrpc.errors import CallLostError, RpcError, WorkerDiedError
from rayrpc.functions import async_execution
from rayrpc.launch.worker_pool import OWNER
from rayrpc.parallel.pool.scheduler import TaskKey
from rayrpc.parallel.pool.task_codec import TaskDecoder, encode_object, load_function
from rayrpc.parallel.pool.tasks import Result, Task

__all__ = ["TaskSource", "WorkerSpec", "collect_results", "pools", "run_worker"]

RETRY_SECONDS = 0.1  # after a broken connection


class TaskSource(Protocol):
    """What workers call in the process of their pool."""

    def request_tasks(self, name: str, results: list[Any], retried: bool) -> Any:
        """Accept encoded results of a worker; return a Future of its next tasks, encoded."""

    def report_results(self, name: str, results: list[Any]) -> None:
        """Accept encoded results of a worker."""


# The pools of this process, by the keys that their workers have.
pools: weakref.WeakValueDictionary[str, TaskSource] = weakref.WeakValueDictionary()


class WorkerSpec(NamedTuple):
    """What a worker is started with.

    Args:
        key (str): of the pool.
        name (str): of the worker.
        copy_tensors (bool): send tensors by value.
        run (Callable): the pool's ``worker``.
        initializer: for ``run``, encoded by ``prepare_function``.
        initargs (tuple): for ``run``.
        maxtasks (int | None): for ``run``.
    """

    key: str
    name: str
    copy_tensors: bool
    run: Callable[..., None]
    initializer: Any
    initargs: tuple[Any, ...]
    maxtasks: int | None


# -- in the pool's process, called by workers -----------------------------------------------------


@async_execution
def _request_tasks(key: str, name: str, results: list[Any], retried: bool) -> Any:
    pool = pools.get(key)
    if pool is not None:
        return pool.request_tasks(name, results, retried)
    ended: Any = Future()
    ended.set_result(None)
    return ended


def _report_results(key: str, name: str, results: list[Any], retried: bool) -> None:
    pool = pools.get(key)
    if pool is not None:
        pool.report_results(name, results)


# -- in the worker --------------------------------------------------------------------------------


class _TaskBuffer:
    """Hold a worker's tasks, and its results until the next message to the pool.

    Args:
        spec (WorkerSpec): of the worker.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._sender = (spec.key, spec.name)
        self._copy_tensors = spec.copy_tensors
        self._decoder = TaskDecoder()
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._results: list[Any] = []

    def get(self) -> Task | None:
        """Return the next task, None if there will be none."""
        while True:
            with self._lock:
                if self._tasks:
                    result = self._tasks.popleft()
                    return result
            sent = self._send(_request_tasks)
            if sent is None:
                return None
            arrived = self._decoder.decode(sent)
            for each in arrived:
                if len(each) == 3:  # it could not be pickled, or unpickled
                    self.put(each)
            with self._lock:
                self._tasks.extend(each for each in arrived if len(each) != 3)

    def put(self, result: Result) -> None:
        """Keep a result for the next message."""
        job, index, (success, value) = result
        # the next task in the buffer may change the tensors of this result
        value = encode_object(value, self._copy_tensors, copy_buffers=bool(self._tasks))
        with self._lock:
            self._results.append((job, index, (success, value)))

    def collect(self, revoke: bool) -> tuple[list[Any], list[TaskKey]]:
        """Return a copy of the results, and remove the tasks that have not begun if revoked.

        The results are sent again in the next message, which may arrive before this answer.
        """
        revoked: list[TaskKey] = []
        with self._lock:
            results = list(self._results)
            if revoke:
                revoked = [task[:2] for task in self._tasks]
                self._tasks.clear()
        return results, revoked

    def flush(self) -> None:
        """Send the results."""
        self._send(_report_results)

    def _send(self, func: Callable[..., Any]) -> Any:
        with self._lock:
            results, self._results = self._results, []
        retried = False
        while True:
            agent = current.get_agent()
            args = (*self._sender, results, retried)
            try:
                return agent.caller.sync(agent.lookup(OWNER), Invocation(func, args), None)
            except CallLostError:
                retried = True
                time.sleep(RETRY_SECONDS)
            except RpcError:  # the pool's process has ended, or this one is to leave
                return None


_buffers: dict[str, _TaskBuffer] = {}


@async_execution
def run_worker(spec: WorkerSpec) -> Any:
    """Run a pool's tasks in a thread; return a Future that completes when the thread has ended."""
    ended: Any = Future()
    buffer = _buffers[spec.key] = _TaskBuffer(spec)

    def run() -> None:
        try:
            initializer = load_function(spec.initializer)
            spec.run(buffer.get, buffer.put, initializer, spec.initargs, spec.maxtasks)
            outcome: Any = Value(None)
        except Exception as exc:
            outcome = Error(exc)
        except BaseException as exc:
            outcome = Error(WorkerDiedError(spec.name, f"it was ended by {exc!r}", "?"))
        buffer.flush()
        del _buffers[spec.key]
        complete(ended, outcome)

    threading.Thread(target=run, name="pool-worker", daemon=True).start()
    return ended


def collect_results(key: str, revoke: bool) -> tuple[list[Any], list[TaskKey]]:
    """Return results that a worker has not sent yet and, if revoked, tasks that it will not run.

    Args:
        key (str): of the pool.
        revoke (bool): take the tasks that have not begun from the worker.
    """
    buffer = _buffers.get(key)
    return buffer.collect(revoke) if buffer is not None else ([], [])
