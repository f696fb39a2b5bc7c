"""The one-shot core of all that completes once: calls, replies and values of RRefs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Promise", "resolved"]

T = TypeVar("T")

_PENDING: Any = object()


class Promise(Generic[T]):
    """Hold a value that is set once.

        PENDING ── set ──> DONE     waiting threads return, callbacks run

    Args:
        lock (threading.Lock, optional): guards the promise; promises may share one. It is held
            for a few instructions only, and never while a callback runs.
    """

    __slots__ = ("_callbacks", "_lock", "_value", "_waiters")

    def __init__(self, lock: threading.Lock | None = None) -> None:
        self._lock = threading.Lock() if lock is None else lock
        self._value: T = _PENDING
        self._callbacks: list[Callable[[T], None]] | None = None
        self._waiters: list[threading.Lock] | None = None  # one a waiting thread, to be released

    @property
    def is_done(self) -> bool:
        """Tell whether the value was set."""
        return self._value is not _PENDING

    @property
    def value(self) -> T | None:
        """The value; None while it is pending."""
        value = self._value
        return None if value is _PENDING else value

    def set(self, value: T) -> bool:
        """Set the value, and run the callbacks in this thread.

        Returns:
            False if it was set before: then nothing changes.
        """
        with self._lock:
            if self._value is not _PENDING:
                return False
            self._value = value
            callbacks, waiters = self._callbacks, self._waiters
            self._callbacks = self._waiters = None
        if waiters is not None:
            for waiter in waiters:
                waiter.release()
        if callbacks is not None:
            for callback in callbacks:
                callback(value)
        return True

    def on_done(self, callback: Callable[[T], None]) -> None:
        """Call ``callback`` with the value, once: at once if it is there, else from ``set``."""
        if self._value is _PENDING:
            with self._lock:
                if self._value is _PENDING:
                    if self._callbacks is None:
                        self._callbacks = [callback]
                    else:
                        self._callbacks.append(callback)
                    return
        callback(self._value)

    def wait(self, timeout: float | None = None) -> T:
        """Return the value.

        Args:
            timeout: in seconds; None: as long as it takes.

        Raises:
            TimeoutError: it was not set in time.
        """
        if self._value is _PENDING:
            waiter = threading.Lock()
            waiter.acquire()
            with self._lock:
                if self._value is not _PENDING:
                    return self._value
                if self._waiters is None:
                    self._waiters = [waiter]
                else:
                    self._waiters.append(waiter)
            if not waiter.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                with self._lock:
                    if self._value is _PENDING:
                        if self._waiters is not None:
                            self._waiters.remove(waiter)
                        raise TimeoutError
        return self._value


def resolved(value: T) -> Promise[T]:
    """Return a promise whose value is set."""
    promise: Promise[T] = Promise()
    promise._value = value
    return promise
