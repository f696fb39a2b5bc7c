"""The one-shot core of all that completes once: calls, replies and values of RRefs."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rayrpc._concurrency.waiting import wait_for_lock

__all__ = ["OneShot", "PENDING", "Promise"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: the value before it is set; for subclasses
PENDING: Any = object()


class OneShot(Generic[T]):
    """Hold a value that is set once; the base of classes with an interface of their own.

    Its protected methods are for that interface.

        PENDING ── set ──> DONE     callbacks run, waiting threads return

    Args:
        lock (threading.Lock, optional): guards the value; several may share one. It is held for
            a few instructions only, and never while a callback runs.
    """

    __slots__ = ("_callbacks", "_lock", "_value")

    def __init__(self, lock: threading.Lock | None = None) -> None:
        self._lock = threading.Lock() if lock is None else lock
        self._value: T = PENDING
        self._callbacks: list[Callable[[T], object]] | None = None

    @property
    def is_done(self) -> bool:
        """Tell whether the value was set."""
        return self._value is not PENDING

    @property
    def value(self) -> T | None:
        """The value; None while it is pending."""
        value = self._value
        return None if value is PENDING else value

    def set(self, value: T) -> bool:
        """Set the value, and run the callbacks in this thread.

        An exception of a callback is logged: the thread may be the reader of a connection.  One
        that is no ``Exception``, such as an interrupt, is raised when all callbacks were called.

        Returns:
            False if it was set before: then nothing changes.
        """
        with self._lock:
            if self._value is not PENDING:
                return False
            self._value = value
        if self._callbacks is not None:
            self._run_callbacks()
        return True

    def set_again(self, value: T) -> None:
        """Do what an interrupt has left of ``set``; callbacks may be called a second time."""
        if not self.set(value) and self._callbacks is not None:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Run the callbacks once the value is set: no thread adds or removes one any more."""
        callbacks = self._callbacks
        interrupt = None
        for callback in callbacks or ():
            try:
                callback(self._value)
            except Exception:
                logger.exception("error in a callback")
            except BaseException as exc:
                interrupt = exc
        if interrupt is not None:
            raise interrupt
        self._callbacks = None

    def _add_callback(self, callback: Callable[[T], object]) -> None:
        """Call ``callback`` with the value, once: at once if it is there, else from ``set``."""
        if self._value is PENDING:
            with self._lock:
                if self._append(callback):
                    return
        callback(self._value)

    def _append(self, callback: Callable[[T], object]) -> bool:
        """Add a callback, with the lock held; return False if the value was set."""
        if self._value is not PENDING:
            return False
        if self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)
        return True

    def _remove_callback(self, callback: Callable[[T], object]) -> bool:
        """Drop a callback; return False if the value was set before."""
        with self._lock:
            if self._value is not PENDING:
                return False
            if self._callbacks is not None and callback in self._callbacks:
                self._callbacks.remove(callback)
            return True

    def _wait_value(self, timeout: float | None = None) -> T:
        """Return the value.

        Args:
            timeout: in seconds; None: as long as it takes.

        Raises:
            TimeoutError: it was not set in time.
        """
        if self._value is PENDING:
            done = threading.Lock()
            done.acquire()

            def wake(_: T) -> None:
                with contextlib.suppress(RuntimeError):  # called again after an interrupt
                    done.release()

            self._add_callback(wake)
            if not wait_for_lock(done, timeout) and self._remove_callback(wake):
                raise TimeoutError
        return self._value


class Promise(OneShot[T]):
    """A value that is set once, to wait for or to be called back with; see ``OneShot``."""

    __slots__ = ()

    def on_done(self, callback: Callable[[T], object]) -> None:
        """Call ``callback`` with the value, once: at once if it is there, else from ``set``."""
        self._add_callback(callback)

    def wait(self, timeout: float | None = None) -> T:
        """Return the value.

        Args:
            timeout: in seconds; None: as long as it takes.

        Raises:
            TimeoutError: it was not set in time.
        """
        return self._wait_value(timeout)
