"""Waiting for Futures: torch's helpers, and asyncio's.

Futures of rayrpc are plain ``torch.futures.Future``.  Python cannot complete one with an error,
only with a value that raises when it is read; torch's ``wait_all`` sees such an error after all
Futures are done, this one at once.

``await future`` needs a method that torch's class does not have; ``make_awaitable`` adds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch.futures import Future, collect_all

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.reader import release_reader

__all__ = ["Future", "as_completed", "collect_all", "wait_all"]


T = TypeVar("T")


def wait_all(futures: Sequence[Future[T]]) -> list[T]:
    """Wait for all Futures, or for the first error.

    Args:
        futures (list[Future]): to wait for; there is no timeout.

    Returns:
        Their values, in order.

    Raises:
        Exception: the first error of any of them.

    Source: ``torch.futures.wait_all``.
    """
    if not futures:
        return []
    lock = threading.Lock()
    done = threading.Event()
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
            if errors or not left:
                done.set()

    for future in futures:
        future.add_done_callback(completed)
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
        TimeoutError: by the iteration: not all were done in time.

    Source: ``concurrent.futures.as_completed``, ``asyncio.as_completed``.
    """

    def __init__(self, futures: Iterable[Future[T]], timeout: float | None = None) -> None:
        self._futures = list(dict.fromkeys(futures))
        self._timeout = timeout

    def __iter__(self) -> Iterator[Future[T]]:
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._on_each_done(done.put)
        release_reader()
        deadline = Deadline(self._timeout)
        for count in range(len(self._futures)):
            try:
                yield done.get(timeout=deadline.remaining())
            except queue.Empty:
                raise self._timed_out(count) from None

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
    if not self.done():
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake() -> None:
            if not done.done():  # else it was cancelled
                done.set_result(None)

        self.add_done_callback(lambda _: _soon(loop, wake))
        yield from done
    return self.wait()


def make_awaitable() -> None:
    """Give torch's Futures the method that ``await`` needs; idempotent.

    It is called by ``install()`` and at the start of an agent.  Nothing that torch's class had
    changes.
    """
    base: Any = Future.__mro__[1]  # of the Futures of ``then`` and ``collect_all``, too
    base.__await__ = _await
