"""What a pool's calls return: results to wait for, and iterators over them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from multiprocessing import TimeoutError as PoolTimeoutError
from typing import Any

__all__ = ["AsyncResult", "IMapIterator", "IMapUnorderedIterator", "MapResult"]

logger = logging.getLogger(__name__)

Cache = MutableMapping[int, Any]
Callback = Callable[[Any], Any] | None


class AsyncResult:
    """The result of ``apply_async``.

    Args:
        job (int): number of the task.
        cache (dict): where the pool looks for it; it takes itself out when it is done.
        callback: called with the value, in a thread of the pool.
        error_callback: called with the exception.

    Source: ``multiprocessing.pool.AsyncResult``.
    """

    def __init__(
        self, job: int, cache: Cache, callback: Callback = None, error_callback: Callback = None
    ) -> None:
        self._job = job
        self._cache = cache
        self._callback = callback
        self._error_callback = error_callback
        self._event = threading.Event()
        self._success = True
        self._value: Any = None
        cache[job] = self

    def ready(self) -> bool:
        """Tell whether the task has ended."""
        return self._event.is_set()

    def successful(self) -> bool:
        """Tell whether the task ended without an exception.

        Raises:
            ValueError: it has not ended.
        """
        if not self.ready():
            raise ValueError("the task has not ended: wait for it, or ask ready() first")
        return self._success

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the task has ended, or for ``timeout`` seconds."""
        self._event.wait(timeout)

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it.

        Args:
            timeout (float, optional): in seconds; None: as long as it takes.

        Raises:
            multiprocessing.TimeoutError: it did not come in time.
            Exception: what the task raised.
        """
        if not self._event.wait(timeout):
            raise PoolTimeoutError(f"the task did not end in {timeout} s; it may still do")
        if self._success:
            return self._value
        raise self._value

    def _set(self, index: int, outcome: tuple[bool, Any]) -> None:
        """Take what a task came to; called by the pool."""
        self._end(*outcome)

    def _fail(self, error: BaseException) -> None:
        """Take that no more is to come."""
        self._end(False, error)

    def _end(self, success: bool, value: Any) -> None:
        if self._cache.pop(self._job, None) is None:
            return  # it has ended
        self._success, self._value = success, value
        callback = self._callback if success else self._error_callback
        if callback is not None:
            try:
                callback(value)
            except Exception:
                logger.exception("error in a callback of a pool's task")
        self._callback = self._error_callback = None
        self._event.set()


class MapResult(AsyncResult):
    """The result of ``map_async`` and ``starmap_async``: a list, when all tasks have ended.

    Args:
        job, cache, callback, error_callback: as for ``AsyncResult``.
        chunksize (int): how many elements a task has.
        length (int): the number of elements.
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
            self._end(True, [])

    def _set(self, index: int, outcome: tuple[bool, Any]) -> None:
        success, value = outcome
        if success:
            first = index * self._chunksize
            self._values[first : first + self._chunksize] = value
        elif self._error is None:
            self._error = value
        self._left -= 1
        if not self._left:
            failed = self._error is not None
            self._end(not failed, self._error if failed else self._values)


class IMapIterator:
    """The results of ``imap``, in the order of the elements, each as soon as it is there.

    Args:
        job (int): number of the tasks.
        cache (dict): where the pool looks for it.
        length (int | None): the number of elements; None: not known yet.

    Source: ``multiprocessing.pool.IMapIterator``.
    """

    def __init__(self, job: int, cache: Cache, length: int | None = None) -> None:
        self._job = job
        self._cache = cache
        self._length = length
        self._changed = threading.Condition()
        self._ready: deque[tuple[bool, Any]] = deque()
        self._early: dict[int, tuple[bool, Any]] = {}  # came before one that is in front of them
        self._came = 0
        self._taken = 0
        self._error: BaseException | None = None
        if length != 0:
            cache[job] = self

    def __iter__(self) -> IMapIterator:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result.

        Args:
            timeout (float, optional): in seconds; None: as long as it takes.

        Raises:
            StopIteration: there are no more.
            multiprocessing.TimeoutError: it did not come in time.
            Exception: what the task raised.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._ready:
                if self._taken == self._length:
                    raise StopIteration
                if self._error is not None:
                    raise self._error
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise PoolTimeoutError(f"no result came in {timeout} s; it may still do")
                self._changed.wait(left)
            success, value = self._ready.popleft()
            self._taken += 1
        if success:
            return value
        raise value

    def _set(self, index: int, outcome: tuple[bool, Any]) -> None:
        with self._changed:
            self._place(index, outcome)
            if self._came == self._length:
                self._cache.pop(self._job, None)
            self._changed.notify_all()

    def _place(self, index: int, outcome: tuple[bool, Any]) -> None:
        self._early[index] = outcome
        while self._came in self._early:
            self._ready.append(self._early.pop(self._came))
            self._came += 1

    def _set_length(self, length: int) -> None:
        with self._changed:
            self._length = length
            if self._came == length:
                self._cache.pop(self._job, None)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._cache.pop(self._job, None)
            self._changed.notify_all()


class IMapUnorderedIterator(IMapIterator):
    """The results of ``imap_unordered``, in the order in which they come."""

    def _place(self, index: int, outcome: tuple[bool, Any]) -> None:
        self._ready.append(outcome)
        self._came += 1
