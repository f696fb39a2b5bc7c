"""What a pool's calls return: results to wait for, and iterators over results."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, MutableMapping
from multiprocessing import TimeoutError as PoolTimeoutError
from typing import Any, Generic, TypeVar

from rayrpc._concurrency.outcome import fresh
from rayrpc._concurrency.waiting import Event, Notifier

__all__ = ["AsyncResult", "IMapIterator", "IMapUnorderedIterator", "MapResult"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
I = TypeVar("I", bound="IMapIterator[Any]")  # noqa: E741
Cache = MutableMapping[int, Any]
Callback = Callable[[Any], object] | None


class AsyncResult(Generic[T]):
    """Wait for the result of ``apply_async``.

    Args:
        job (int): number of the call in its pool.
        cache (dict): the pool's results by job; this one removes itself when it is complete.
        callback (Callable, optional): called with the value, in a thread of the pool.
        error_callback (Callable, optional): called with the exception, in a thread of the pool.

    Source: ``machin.parallel.pool.AsyncResult``, ``multiprocessing.pool.AsyncResult``.
    """

    def __init__(
        self, job: int, cache: Cache, callback: Callback = None, error_callback: Callback = None
    ) -> None:
        self._job = job
        self._cache = cache
        self._callback = callback
        self._error_callback = error_callback
        self._event = Event()
        self._success = True
        self._value: Any = None
        cache[job] = self

    def ready(self) -> bool:
        """Tell whether the task has ended.

        Returns:
            bool: True once ``get`` returns, or raises, at once.
        """
        return self._event.is_set()

    def successful(self) -> bool:
        """Tell whether the task ended without an exception.

        Returns:
            bool: False if ``get`` raises.

        Raises:
            ValueError: the task has not ended.
        """
        if not self.ready():
            raise ValueError("the task has not ended: wait for it, or ask ready() first")
        return self._success

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the task has ended.

        Args:
            timeout (float, optional): in seconds; None: without limit.
        """
        self._event.wait(timeout)

    def get(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout (float, optional): in seconds; None: without limit.

        Returns:
            What the task returned.

        Raises:
            multiprocessing.TimeoutError: the task did not end in time.
            Exception: what the task raised.
        """
        if not self._event.wait(timeout):
            raise PoolTimeoutError(f"the task did not end in {timeout} s; it may still do")
        if self._success:
            value: T = self._value
            return value
        raise self._value

    def set_outcome(self, index: int, outcome: tuple[bool, Any]) -> None:
        """Accept the outcome of one task; called by the pool.

        Args:
            index (int): number of the task in its call.
            outcome (tuple[bool, Any]): True and its value, or False and its exception.
        """
        self._complete(*outcome)

    def fail(self, error: BaseException) -> None:
        """Complete with an error, unless complete already; called by the pool.

        Args:
            error (BaseException): what ``get`` raises.
        """
        self._complete(False, error)

    def _complete(self, success: bool, value: Any) -> None:
        if self._cache.pop(self._job, None) is None:
            return  # it is complete
        self._success, self._value = success, value
        callback = self._callback if success else self._error_callback
        if callback is not None:
            try:
                callback(value)
            except Exception:
                logger.exception("error in a callback of a pool's task")
        self._callback = self._error_callback = None
        self._event.set()


class MapResult(AsyncResult[list[T]]):
    """Wait for the list of results of ``map_async`` or ``starmap_async``.

    Args:
        job, cache, callback, error_callback: as for ``AsyncResult``.
        chunksize (int): number of elements in a task.
        length (int): number of elements.

    Source: ``machin.parallel.pool.MapResult``, ``multiprocessing.pool.MapResult``.
    """

    def __init__(
        self,
        job: int,
        cache: Cache,
        chunksize: int,
        length: int,
        callback: Callback = None,
        error_callback: Callback = None,
    ) -> None:
        super().__init__(job, cache, callback, error_callback)
        self._chunksize = chunksize
        self._values: list[Any] = [None] * length
        self._error: BaseException | None = None
        self._left = -(-length // chunksize) if length else 0
        if not self._left:
            self._complete(True, [])

    def set_outcome(self, index: int, outcome: tuple[bool, Any]) -> None:
        """Accept the outcome of one chunk; the last one completes the result.

        Args:
            index (int): number of the chunk in its call.
            outcome (tuple[bool, Any]): True and its list, or False and its exception.
        """
        success, value = outcome
        if success:
            first = index * self._chunksize
            self._values[first : first + self._chunksize] = value
        elif self._error is None:
            self._error = value
        self._left -= 1
        if not self._left:
            failed = self._error is not None
            self._complete(not failed, self._error if failed else self._values)


class IMapIterator(Generic[T]):
    """Iterate over the results of ``imap`` in the order of the elements.

    Args:
        job (int): number of the call in its pool.
        cache (dict): the pool's results by job; this one removes itself when it is complete.
        length (int | None): number of tasks; None: not known yet.

    Source: ``machin.parallel.pool.IMapIterator``, ``multiprocessing.pool.IMapIterator``.
    """

    def __init__(self, job: int, cache: Cache, length: int | None = None) -> None:
        self._job = job
        self._cache = cache
        self._length = length
        self._lock = threading.Lock()
        self._changed = Notifier()
        self._ready: deque[tuple[bool, Any]] = deque()
        self._early: dict[int, tuple[bool, Any]] = {}  # outcomes that follow a missing one
        self._received = 0
        self._taken = 0
        self._error: BaseException | None = None
        if length != 0:
            cache[job] = self

    def __iter__(self: I) -> I:
        return self

    def __next__(self) -> T:
        return self.next()

    def next(self, timeout: float | None = None) -> T:
        """Wait for the next result.

        Args:
            timeout (float, optional): in seconds; None: without limit.

        Returns:
            What the task of the next element returned.

        Raises:
            StopIteration: all results were returned.
            multiprocessing.TimeoutError: the task did not end in time.
            Exception: what the task raised; the next call goes on with the element after it.
        """
        outcome = self._changed.wait_until(self._take, timeout)
        if outcome is None:
            raise PoolTimeoutError(f"no result came in {timeout} s; it may still do")
        success, value = outcome
        if success:
            result: T = value
            return result
        raise value

    def _take(self) -> tuple[bool, Any] | None:
        """Return the next outcome; None: it is not there yet."""
        with self._lock:
            if self._ready:
                self._taken += 1
                outcome = self._ready.popleft()
                return outcome
            if self._taken == self._length:
                raise StopIteration
            if self._error is not None:
                raise fresh(self._error)
        return None

    def set_outcome(self, index: int, outcome: tuple[bool, Any]) -> None:
        """Accept the outcome of one task; called by the pool.

        Args:
            index (int): number of the task in its call.
            outcome (tuple[bool, Any]): True and its value, or False and its exception.
        """
        with self._lock:
            self._place(index, outcome)
            self._leave_if_complete()
        self._changed.notify_all()

    def _place(self, index: int, outcome: tuple[bool, Any]) -> None:
        self._early[index] = outcome
        while self._received in self._early:
            self._ready.append(self._early.pop(self._received))
            self._received += 1

    def _leave_if_complete(self) -> None:
        if self._received == self._length:
            self._cache.pop(self._job, None)

    def set_length(self, length: int) -> None:
        """Set the number of tasks, where the constructor was given None.

        Args:
            length (int): number of tasks.
        """
        with self._lock:
            self._length = length
            self._leave_if_complete()
        self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Raise an error once the results that are here were returned; called by the pool.

        Args:
            error (BaseException): what ``next`` raises.
        """
        with self._lock:
            self._error = error
            self._cache.pop(self._job, None)
        self._changed.notify_all()


class IMapUnorderedIterator(IMapIterator[T]):
    """Iterate over the results of ``imap_unordered`` in the order in which tasks end.

    Source: ``machin.parallel.pool.IMapUnorderedIterator``,
    ``multiprocessing.pool.IMapUnorderedIterator``.
    """

    def _place(self, index: int, outcome: tuple[bool, Any]) -> None:
        self._ready.append(outcome)
        self._received += 1
