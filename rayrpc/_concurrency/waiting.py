"""Waits for what other threads do; an interrupt ends one without a trace.

``threading.Condition`` and ``threading.Event`` are Python code.  Where a signal's handler raises in
it, as Ctrl-C does in a program's main thread, their lock may stay held for ever, or a ``with`` may
release a lock that is not held.  Here a thread waits for a lock of its own, which is C code, and
holds no other one meanwhile.

Python runs a signal's handler in the main thread, between two steps of its code.  A signal that
arrives after the last check before the thread blocks, or that the kernel gives to another thread,
does not end the wait: so the main thread waits in short steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Event", "MAX_WAIT_SECONDS", "Notifier", "wait_for_lock"]

T = TypeVar("T")

# Locks refuse to wait longer.
MAX_WAIT_SECONDS = min(threading.TIMEOUT_MAX, 1e9)
# How long the main thread waits at a time: a signal is handled so late at most.
STEP_SECONDS = 1.0


def wait_for_lock(lock: Any, timeout: float | None = None) -> bool:
    """Acquire a lock that another thread is to release; in the main thread, handle signals.

    Args:
        lock: of ``threading``.
        timeout: in seconds; None: none.

    Returns:
        False if it was not released in time.
    """
    if timeout is not None and timeout <= STEP_SECONDS:
        return lock.acquire(timeout=max(0.0, timeout))  # type: ignore[no-any-return]
    if lock.acquire(timeout=STEP_SECONDS):
        return True
    left = MAX_WAIT_SECONDS
    if timeout is not None:
        left = min(timeout - STEP_SECONDS, left)
    if threading.get_ident() == threading.main_thread().ident:
        end = time.monotonic() + left
        while left > STEP_SECONDS:
            if lock.acquire(timeout=STEP_SECONDS):
                return True
            left = end - time.monotonic()
    return lock.acquire(timeout=max(0.0, left))  # type: ignore[no-any-return]


class Notifier:
    """Wake threads that wait until something is so: a condition variable without a lock.

    A thread changes what the others wait for, then notifies them.  It may hold a lock of its own
    meanwhile; they hold none while they wait.  (Known as an eventcount.)
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[Any] = []  # a lock of each thread, which holds it

    def wait_until(self, ready: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until ``ready()`` is true; it is checked again after each notification.

        Args:
            ready: the condition, and its result; it takes the locks that it needs.
            timeout: in seconds; None: none.

        Returns:
            What ``ready()`` returned last; after the time-out it is called once more.
        """
        if result := ready():
            return result
        end = None if timeout is None else time.monotonic() + timeout
        waiter = threading.Lock()
        waiter.acquire()
        try:
            self._waiters.append(waiter)
            while not (result := ready()):
                seconds = None if end is None else end - time.monotonic()
                if seconds is not None and seconds <= 0:
                    break
                wait_for_lock(waiter, seconds)
        finally:
            if waiter in self._waiters:  # else it was interrupted before
                self._waiters.remove(waiter)
            if not waiter.locked():  # it was notified again, and another thread was not
                self.notify()
        return result or ready()

    def notify(self) -> None:
        """Have one thread check its condition, of those that wait and were not notified yet."""
        for waiter in [*self._waiters]:
            if _wake(waiter):
                return

    def notify_all(self) -> None:
        """Have all threads that wait check their conditions."""
        for waiter in [*self._waiters]:
            _wake(waiter)


def _wake(waiter: Any) -> bool:
    """Wake the thread that waits for its lock; return False if it was notified before."""
    try:
        waiter.release()
    except RuntimeError:
        return False
    return True


class Event:
    """``threading.Event``; a thread that has not looked before it is cleared waits on."""

    __slots__ = ("_changed", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._changed = Notifier()

    def is_set(self) -> bool:
        """Tell whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake the threads that wait for it."""
        self._is_set = True
        self._changed.notify_all()

    def clear(self) -> None:
        """Set it no more."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set.

        Args:
            timeout: in seconds; None: none.

        Returns:
            False if it was not set in time.
        """
        return self._changed.wait_until(self.is_set, timeout)
