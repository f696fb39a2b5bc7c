"""Pools whose workers are processes all over the cluster.

A worker asks the pool for tasks, by a call that brings the results of the last ones, and does
them in one thread, as the main thread of a process of ``multiprocessing`` would.
"""

from __future__ import annotations

import functools
import queue
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.pool import ExceptionWithTraceback, MaybeEncodingError  # type: ignore
from typing import Any, NamedTuple

from torch.futures import Future

from rayrpc._runtime import current
from rayrpc._runtime.outcome import Error, Value, attempt, complete
from rayrpc.errors import CallError, RpcError, SerializationError, WorkerDiedError
from rayrpc.functions import async_execution
from rayrpc.launch.crew import OWNER, Crew, count_cpus
from rayrpc.parallel.pool.base import BasePool, PoolStates
from rayrpc.parallel.pool.board import Board
from rayrpc.parallel.pool.contexts import CtxPoolStorage, checked, enter, with_context
from rayrpc.parallel.pool.shipping import Inbound, Outbound, prepared
from rayrpc.parallel.pool.tasks import Result, Task

__all__ = ["CtxPool", "P2PPool", "Pool"]

NO_TIMEOUT = 0.0

Setup = tuple[Callable[..., Any] | None, tuple[Any, ...]]


class _Order(NamedTuple):
    """What a worker is started with.

    Args:
        key (str): of the pool.
        name (str): of the worker.
        copies (bool): tensors go by value.
        work (Callable): the pool's ``worker``.
        initializer, initargs, maxtasks: for it.
    """

    key: str
    name: str
    copies: bool
    work: Callable[..., None]
    initializer: Callable[..., Any] | None
    initargs: tuple[Any, ...]
    maxtasks: int | None


# -- the pool -----------------------------------------------------------------------------------


class _Process:
    """A worker as its pool knows it."""

    def __init__(self, number: int, name: str, copies: bool) -> None:
        self.number = number
        self.name = name
        self.way = Outbound(copies)
        self.ended = threading.Event()
        self.error: BaseException | None = None  # that ends the pool


_pools: weakref.WeakValueDictionary[str, Pool] = weakref.WeakValueDictionary()


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
        self._is_recursive = is_recursive
        self._is_daemon = is_daemon
        self._is_copy_tensor = is_copy_tensor
        self._share_method = share_method
        super().__init__(processes, initializer, initargs, maxtasksperchild)

    def _count_cpus(self) -> int:
        return count_cpus()

    def _prepared(self, func: Callable[..., Any]) -> Any:
        func = super()._prepared(func)
        return prepared(func, self._is_recursive) if self._is_copy_tensor else func

    def setup_queues(self) -> None:
        """Make the board that workers ask for tasks, and a queue of results."""
        self._key = uuid.uuid4().hex
        self._named: dict[str, _Process] = {}
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._board = Board(self._results.put, self._pack)
        self._crew = Crew(here=not self._is_copy_tensor)
        _pools[self._key] = self

    def _pack(self, name: str, tasks: list[Task]) -> Any:
        return self._named[name].way.tasks(tasks)

    def repopulate_pool(self) -> None:
        """Start workers until there are as many as there should be."""
        missing = sorted(set(range(self._processes)) - {each.number for each in self._pool})
        for number, name in zip(missing, self._crew.start(len(missing)), strict=True):
            process = _Process(number, name, self._is_copy_tensor)
            self._named[process.name] = process
            self._pool.append(process)
            self._board.add(process.name, self._maxtasksperchild)
            setup = self._setup_of(process.number)
            order = _Order(
                self._key,
                process.name,
                self._is_copy_tensor,
                self.worker,
                *setup,
                self._maxtasksperchild,
            )
            future = self._crew.call(process.name, _serve, (order,))
            future.add_done_callback(functools.partial(self._ended, process))

    def _ended(self, process: _Process, future: Any) -> None:
        outcome = attempt(future.value)
        error = outcome.error if isinstance(outcome, Error) else None
        left: BaseException = error or CallError(
            f"worker {process.name!r} of a pool ended before it did its task"
        )
        has_worked = self._board.remove(process.name, left)
        if error is not None and not (isinstance(error, WorkerDiedError) and has_worked):
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
        for name in self._board.late():
            future = self._crew.call(name, _give_back, (self._key,))
            future.add_done_callback(functools.partial(self._given_back, name))

    def _forget(self, processes: list[_Process]) -> None:
        for process in processes:
            self._pool.remove(process)
            del self._named[process.name]
        self._crew.end([process.name for process in processes])

    def _given_back(self, name: str, future: Any) -> None:
        outcome = attempt(future.value)
        if isinstance(outcome, Value):
            self._board.give_back(name, outcome.value)

    def pool_inqueue_put(self, obj: Any) -> None:
        """Put a task on the board."""
        if obj is None:
            self._board.close()
        else:
            self._board.put(obj)

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
        self._crew.stop()

    def terminate_workers(self) -> None:
        """End all workers at once."""
        _pools.pop(self._key, None)
        self._board.close(drop=True)
        self._crew.stop()

    def _take(self, name: str, results: list[Any], error: BaseException | None) -> Any:
        process = self._named.get(name)
        if process is None:
            return _settled(None)
        if error is not None:
            process.way.forget()
        return self._board.take(name, process.way.results(results), error)

    def _report(self, name: str, results: list[Any]) -> None:
        process = self._named.get(name)
        if process is not None:
            self._board.report(name, process.way.results(results))

    @staticmethod
    def worker(
        get: Callable[[], Any],
        put: Callable[[Any], None],
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        maxtasks: int | None = None,
    ) -> None:
        """Do tasks until there are no more; exceptions bring their traceback with them."""

        def put_result(result: Result) -> None:
            job, index, (success, value) = result
            if not success and not isinstance(value, MaybeEncodingError):
                value = ExceptionWithTraceback(value, value.__traceback__)
            put((job, index, (success, value)))

        BasePool.worker(get, put_result, initializer, initargs, maxtasks)


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
        get: Callable[[], Any],
        put: Callable[[Any], None],
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        maxtasks: int | None = None,
    ) -> None:
        """Do tasks, with this worker's context as the functions' first argument."""
        get = with_context(lambda: CtxPoolStorage.storage, get)
        Pool.worker(get, put, initializer, initargs, maxtasks)


def _settled(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


# -- called by workers --------------------------------------------------------------------------


@async_execution
def _next(key: str, name: str, results: list[Any], error: BaseException | None) -> Any:
    pool = _pools.get(key)
    return _settled(None) if pool is None else pool._take(name, results, error)


def _bring(key: str, name: str, results: list[Any]) -> None:
    pool = _pools.get(key)
    if pool is not None:
        pool._report(name, results)


# -- the worker ---------------------------------------------------------------------------------


class _Desk:
    """Where a worker has its tasks, and results that it has not sent.

    Args:
        order (_Order): what it was started with.
    """

    def __init__(self, order: _Order) -> None:
        self._who = (order.key, order.name)
        self._way = Inbound(order.copies)
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._results: list[Any] = []

    def get(self) -> Task | None:
        """Return the next task, None if there will be none."""
        while True:
            with self._lock:
                if self._tasks:
                    return self._tasks.popleft()
            sent = self._ask()
            if sent is None:
                return None
            for task in self._way.tasks(sent):
                if len(task) == 3:  # it could not be read
                    self.put(task)
                else:
                    self._tasks.append(task)

    def put(self, result: Result) -> None:
        """Keep a result for the next message."""
        self._results.append(self._way.result(result))

    def give_back(self) -> list[tuple[int, int]]:
        """Return which tasks were not begun, and never will be."""
        with self._lock:
            back = [task[:2] for task in self._tasks]
            self._tasks.clear()
        return back

    def flush(self) -> None:
        """Send the results that were kept."""
        results, self._results = self._results, []
        try:
            self._call(_bring, results)
        except RpcError:
            self._bring_each(results)

    def _ask(self) -> Any:
        results, self._results = self._results, []
        error: BaseException | None = None
        while True:
            try:
                return self._call(_next, results, error)
            except WorkerDiedError:
                return None
            except Exception as exc:
                # a result that cannot be sent, or a task that cannot be read
                self._bring_each(results)
                results, error = [], SerializationError(f"a task of a pool {exc}")

    def _bring_each(self, results: list[Any]) -> None:
        for each in results:
            try:
                self._call(_bring, [each])
            except WorkerDiedError:
                return
            except Exception as exc:
                job, index, outcome = each
                failure = MaybeEncodingError(exc, outcome[1])
                self._call(_bring, [(job, index, (False, failure))])

    def _call(self, func: Any, *args: Any) -> Any:
        agent = current.get_agent()
        arguments = (*self._who, *args)
        return agent.caller.sync(agent.lookup(OWNER), func, arguments, {}, NO_TIMEOUT)


_desks: dict[str, _Desk] = {}


@async_execution
def _serve(order: _Order) -> Any:
    ended: Any = Future()
    desk = _desks[order.key] = _Desk(order)

    def run() -> None:
        try:
            order.work(desk.get, desk.put, order.initializer, order.initargs, order.maxtasks)
            desk.flush()
            outcome: Any = Value(None)
        except Exception as exc:
            outcome = Error(exc)
        except BaseException as exc:
            outcome = Error(WorkerDiedError(order.name, f"a task ended it by {exc!r}", "?"))
        del _desks[order.key]
        complete(ended, outcome)

    threading.Thread(target=run, name="pool-worker", daemon=True).start()
    return ended


def _give_back(key: str) -> list[tuple[int, int]]:
    desk = _desks.get(key)
    return desk.give_back() if desk is not None else []
