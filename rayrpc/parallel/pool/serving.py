"""A worker of a pool, in a process of its own.

It asks the pool for tasks, by a call that brings the results of the last ones, and does them in
one thread, as the main thread of a process of ``multiprocessing`` would.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.futures import Future

from rayrpc._concurrency.outcome import Error, Value, complete
from rayrpc._runtime import current
from rayrpc._runtime.invocation import Invocation
from rayrpc.errors import CallLostError, RpcError, WorkerDiedError
from rayrpc.functions import async_execution
from rayrpc.launch.worker_pool import OWNER
from rayrpc.parallel.pool.shipping import Inbound, opened, packed
from rayrpc.parallel.pool.tasks import Result, Task

__all__ = ["Order", "pools", "serve", "tell"]

AGAIN_SECONDS = 0.1  # after a connection was cut

#: by the keys that workers know them by
pools: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class Order(NamedTuple):
    """What a worker is started with.

    Args:
        key (str): of the pool.
        name (str): of the worker.
        copies (bool): tensors go by value.
        work (Callable): the pool's ``worker``.
        initializer, initargs, maxtasks: for it; the first ``prepared``.
    """

    key: str
    name: str
    copies: bool
    work: Callable[..., None]
    initializer: Any
    initargs: tuple[Any, ...]
    maxtasks: int | None


def _settled(value: Any) -> Any:
    """Return a Future that is done."""
    future: Any = Future()
    future.set_result(value)
    return future


# -- called by workers --------------------------------------------------------------------------


@async_execution
def _next(key: str, name: str, results: list[Any], again: bool) -> Any:
    pool = pools.get(key)
    return _settled(None) if pool is None else pool.take(name, results, again)


def _bring(key: str, name: str, results: list[Any], again: bool) -> None:
    pool = pools.get(key)
    if pool is not None:
        pool.report(name, results)


# -- the worker ---------------------------------------------------------------------------------


class _Desk:
    """Where a worker has its tasks, and results that it has not sent.

    Args:
        order (Order): what it was started with.
    """

    def __init__(self, order: Order) -> None:
        self._who = (order.key, order.name)
        self._copies = order.copies
        self._way = Inbound()
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._results: list[Any] = []

    def get(self) -> Task | None:
        """Return the next task, None if there will be none."""
        while True:
            with self._lock:
                if self._tasks:
                    return self._tasks.popleft()
            sent = self._say(_next)
            if sent is None:
                return None
            arrived = self._way.tasks(sent)
            for each in arrived:
                if len(each) == 3:  # it could not be sent, or read
                    self.put(each)
            with self._lock:
                self._tasks.extend(each for each in arrived if len(each) != 3)

    def put(self, result: Result) -> None:
        """Keep a result for the next message."""
        job, index, (success, value) = result
        # what the next task may change is copied
        value = packed(value, self._copies, at_once=not self._tasks)
        with self._lock:
            self._results.append((job, index, (success, value)))

    def so_far(self, is_wanted: bool) -> tuple[list[Any], list[tuple[int, int]]]:
        """Return the results that are kept, and, if wanted, what will not be begun any more.

        The results will be sent again with the next message, which may be there earlier.
        """
        back: list[tuple[int, int]] = []
        with self._lock:
            results = list(self._results)
            if is_wanted:
                back = [task[:2] for task in self._tasks]
                self._tasks.clear()
        return results, back

    def flush(self) -> None:
        """Send the results that were kept."""
        self._say(_bring)

    def _say(self, func: Any) -> Any:
        with self._lock:
            results, self._results = self._results, []
        again = False
        while True:
            agent = current.get_agent()
            args = (*self._who, results, again)
            try:
                return agent.caller.sync(agent.lookup(OWNER), Invocation(func, args), None)
            except CallLostError:
                again = True
                time.sleep(AGAIN_SECONDS)
            except RpcError:  # the pool's process is gone, or this one was told to leave
                return None


_desks: dict[str, _Desk] = {}


@async_execution
def serve(order: Order) -> Any:
    """Do tasks of a pool in a thread; return a Future that is done when that has ended."""
    ended: Any = Future()
    desk = _desks[order.key] = _Desk(order)

    def run() -> None:
        try:
            initializer = opened(order.initializer)
            order.work(desk.get, desk.put, initializer, order.initargs, order.maxtasks)
            outcome: Any = Value(None)
        except Exception as exc:
            outcome = Error(exc)
        except BaseException as exc:
            outcome = Error(WorkerDiedError(order.name, f"it was ended by {exc!r}", "?"))
        desk.flush()
        del _desks[order.key]
        complete(ended, outcome)

    threading.Thread(target=run, name="pool-worker", daemon=True).start()
    return ended


def tell(key: str, is_wanted: bool) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return results that a worker has kept, and, if wanted, tasks that it gives back."""
    desk = _desks.get(key)
    return desk.so_far(is_wanted) if desk is not None else ([], [])
