"""Waiting for Futures: torch's helpers, and asyncio's.

Futures of rayrpc are plain ``torch.futures.Future``.  Python cannot complete one with an error,
only with a value that raises when it is read; torch's ``wait_all`` sees such an error after all
Futures are done, this one at once.

``extend_futures`` gives torch's class the method that ``await`` needs and a ``repr`` that tells its
state, and lets Ctrl-C interrupt ``wait``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import reprlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.futures import Future, collect_all

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.reader import release_reader
from rayrpc._concurrency.waiting import Event, Notifier, wait_for_lock

__all__ = ["Future", "as_completed", "collect_all", "wait_all"]


T = TypeVar("T")

#: scripted functions return Futures of this class, which is below torch.futures.Future
AnyFuture: Any = Future.__mro__[1]

_short = reprlib.Repr()
_short.maxother = _short.maxstring = 200  # characters

FindCall = Callable[[Any], tuple[str, float] | None]
_find_call: FindCall | None = None  # see ``extend_futures``


def value_of(future: Any) -> Any:
    """Return the value of a Future that is done.

    Later work of this thread on accelerators is ordered after the work that makes the value.
    """
    return future.wait() if torch.cuda.is_initialized() else future.value()


def wait_all(futures: Iterable[Future[T]]) -> list[T]:
    """Wait for all Futures, or for the first error.

    Args:
        futures (list[Future]): to wait for; there is no timeout.

    Returns:
        Their values, in order.

    Raises:
        Exception: the first error of any of them.

    Source: ``torch.futures.wait_all``.
    """
    futures = list(futures)
    if not futures:
        return []
    lock = threading.Lock()
    done = Event()
    left = len(futures)
    errors: list[BaseException] = []

    def completed(future: Any) -> None:
        nonlocal left
        try:
            future.value()
        except BaseException as exc:
            errors.append(exc)
        with lock:
            left -= 1
            is_done = bool(errors) or not left
        if is_done:
            done.set()

    for future in futures:
        if future.done():  # torch would swallow an interrupt of the callback
            completed(future)
        else:
            future.add_done_callback(completed)
    if not done.is_set():
        release_reader()
        done.wait()
    if errors:
        raise errors[0]
    return [future.wait() for future in futures]


class as_completed(Generic[T]):
    """Iterate over Futures as they complete, with ``for`` or ``async for``.

    Args:
        futures (Iterable[Future]): yielded themselves, each once.
        timeout (float | None): for all of them, in seconds; None: none.

    Raises:
        TypeError: one of them is no Future.
        TimeoutError: by the iteration: not all were done in time.

    Source: ``concurrent.futures.as_completed``, ``asyncio.as_completed``.
    """

    def __init__(self, futures: Iterable[Future[T]], timeout: float | None = None) -> None:
        futures = list(futures)
        for future in futures:
            if not isinstance(future, AnyFuture):
                raise TypeError(f"as_completed waits for Futures, not for {future!r}")
        self._futures = list(dict.fromkeys(futures))
        self._timeout = timeout

    def __iter__(self) -> Iterator[Future[T]]:
        done: collections.deque[Any] = collections.deque()
        changed = Notifier()

        def add(future: Any) -> None:
            done.append(future)
            changed.notify()

        self._on_each_done(add)
        release_reader()
        deadline = Deadline(self._timeout)
        for count in range(len(self._futures)):
            if not changed.wait_until(lambda: len(done), deadline.remaining()):
                raise self._timed_out(count)
            yield done.popleft()

    async def __aiter__(self) -> AsyncIterator[Future[T]]:
        loop = asyncio.get_running_loop()
        done: asyncio.Queue[Any] = asyncio.Queue()
        self._on_each_done(lambda future: _soon(loop, done.put_nowait, future))
        deadline = Deadline(self._timeout)
        for count in range(len(self._futures)):
            try:
                future = await asyncio.wait_for(done.get(), deadline.remaining())
            except asyncio.TimeoutError:
                raise self._timed_out(count) from None
            yield future

    def _on_each_done(self, done: Callable[[Any], None]) -> None:
        for future in self._futures:
            # a callback gets another object for the same Future
            future.add_done_callback(functools.partial(_call_with, done, future))

    def _timed_out(self, count: int) -> TimeoutError:
        return TimeoutError(
            f"{len(self._futures) - count} of {len(self._futures)} Futures were not done after "
            f"{self._timeout:g} s"
        )


def _call_with(done: Callable[[Any], None], future: Any, _: object) -> None:
    done(future)


def _soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(callback, *args)


def _await(self: Any) -> Generator[Any, None, Any]:
    """Wait for the value in a coroutine: ``await future``."""
    __tracebackhide__ = True
    if not self.done():
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake() -> None:
            if not done.done():  # else it was cancelled
                done.set_result(None)

        self.add_done_callback(lambda _: _soon(loop, wake))
        yield from done
    return self.wait()


def _text(self: Any) -> str:
    """Return the state of a Future, for ``repr``: its call while that is open, or its value."""
    if not self.done():
        call = _find_call(self) if _find_call is not None else None
        if call is None:
            return "<Future: pending>"
        name, seconds = call
        return f"<Future of {name}: pending for {seconds:.1f} s>"
    try:
        value = self.value()
    except Exception as exc:
        return f"<Future: failed with {_short.repr(exc)}>"
    return f"<Future: done, {_short.repr(value)}>"


def extend_futures(find_call: FindCall | None = None) -> None:
    """Let torch's Futures be awaited and shown, and their ``wait`` be interrupted; idempotent.

    It is called by ``install()`` and at the start of an agent.  Nothing else changes.

    Args:
        find_call (Callable, optional): returns which call a Future is of, and for how many seconds
            that is under way, for its ``repr``; None if it is not known.
    """
    global _find_call
    if find_call is not None:
        _find_call = find_call
    # of the Futures of ``then`` and ``collect_all``, too
    AnyFuture.__await__ = _await
    AnyFuture.__repr__ = _text
    if not hasattr(AnyFuture.wait, "__wrapped__"):
        AnyFuture.wait = _interruptible(AnyFuture.wait)


def _interruptible(wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a ``wait`` that an interrupt ends; torch's blocks in C++, where none is seen."""

    @functools.wraps(wait)
    def wait_until_done(self: Any) -> Any:
        __tracebackhide__ = True
        if threading.current_thread() is threading.main_thread() and not self.done():
            done = threading.Lock()
            done.acquire()
            self.add_done_callback(lambda _: done.release())
            release_reader()
            if not self.done():  # else torch may have swallowed an interrupt of the callback
                wait_for_lock(done)
        return wait(self)

    return wait_until_done
