"""An iterator that makes its values one at a time, each when it is due, in whatever thread.

Values are numbered from 0.  Callers request them by number, in any order; the steps run in the
order of the numbers, one at a time.  A step ends when its value has been encoded, as a generator
that goes on may write to what it has yielded.

    IDLE ── the step that is due is requested ──> RUNNING ── end_step, no step is due ──> IDLE
     │                                           │
     └─ close ──> CLOSING <── end_step, closed ──┘       RUNNING ── the iterator ends ──> ENDED
                     └── the iterator is closed ──> ENDED: each request gets ``Ended``
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from rayrpc._concurrency.outcome import Error, Outcome, Value, attempt
from rayrpc._concurrency.promise import Promise
from rayrpc._runtime.coroutines import Coroutines, next_of, stepwise
from rayrpc._runtime.invocation import Invocation

__all__ = ["AsyncSteps", "Ended", "Steps"]

Task = Callable[[], object]
#: the context of a step, which may be entered again for each part of one
Within = Callable[[], AbstractContextManager[Any]]


class Ended(NamedTuple):
    """What is sent in place of a value: the iterator has ended.

    Args:
        value: what a generator returned.
    """

    value: Any = None


class Steps:
    """The steps of an iterator.

    Args:
        iterator: its ``close``, if it has one, is called when it is closed before its end.
        func (Callable): the function that made it; names it where calls are recorded.
    """

    def __init__(self, iterator: Any, func: Any) -> None:
        self._iterator = iterator
        step: Any = functools.partial(next, iterator)
        step.__module__ = getattr(func, "__module__", None)
        step.__qualname__ = getattr(func, "__qualname__", type(func).__qualname__)
        self._step = Invocation(step)
        self._lock = threading.Lock()
        self._due = 0  # the number of the next step
        self._requested: dict[int, Task] = {}  # what begins the steps to come, by number
        self._is_running = False
        self._has_ended = False
        self._finish: Task | None = None  # it is to be closed: what closes it
        self._outcome: Outcome[None] = Value(None)  # of closing it after a cancelled step
        self._closed: Promise[Outcome[None]] = Promise()

    def take(self, number: int, begin: Task) -> bool:
        """Begin a step if it is due, or register what begins it later.

        Args:
            number: the number of the step.
            begin: called, from any thread, when the step becomes due, unless it is due now.

        Returns:
            True if the step is due now: the caller runs ``make``.
        """
        with self._lock:
            if not self._has_ended:
                if self._is_running or number != self._due:
                    self._requested[number] = begin
                    return False
                self._is_running = True
        return True

    def make(self, run: Callable[[Invocation], Any]) -> Outcome[Any]:
        """Return the next value, an error of the iterator, or ``Ended``; ``end_step`` follows.

        Args:
            run: runs the iterator.
        """
        if self._has_ended:
            return Value(Ended())
        try:
            return Value(run(self._step))
        except StopIteration as stop:
            outcome: Outcome[Any] = Value(Ended(stop.value))
        except BaseException as exc:
            outcome = Error(exc)
            if isinstance(exc, asyncio.CancelledError):  # perhaps before the iterator ran
                self._outcome = self._close_iterator()
        self._has_ended = True
        return outcome

    def end_step(self) -> None:
        """Let the next step begin; called once for each ``make``."""
        with self._lock:
            self._due += 1
            has_ended = self._has_ended
            finish = None if has_ended else self._finish
            if has_ended:
                due = [*self._requested.values()]
                self._requested.clear()
            else:
                begin = None if finish is not None else self._requested.pop(self._due, None)
                due = [] if begin is None else [begin]
                self._is_running = finish is not None or begin is not None
        if finish is not None:
            finish()
        for begin in due:
            begin()
        if has_ended:
            self._closed.set(self._outcome)

    def close(self, submit: Callable[[Task], object]) -> Promise[Outcome[None]]:
        """Close the iterator once its step has ended; it makes no further values.

        Args:
            submit: runs a task of users' code in another thread.

        Returns:
            Its outcome: what ``close`` of the iterator raised.
        """
        with self._lock:
            is_first = self._finish is None and not self._has_ended
            is_idle = is_first and not self._is_running
            if is_first:
                self._finish = functools.partial(submit, self._end)
                self._is_running = True
        if is_idle:
            submit(self._end)
        return self._closed

    def _close_iterator(self) -> Outcome[None]:
        close = getattr(self._iterator, "close", None)
        return Value(None) if close is None else attempt(Invocation(close).__call__)

    def _end(self) -> None:
        outcome = self._close_iterator()
        with self._lock:
            self._has_ended = True
            due = [*self._requested.values()]
            self._requested.clear()
        for begin in due:
            begin()
        self._closed.set(outcome)


class AsyncSteps:
    """The steps of an asynchronous iterator, in one coroutine, as asyncio's objects need.

    Args:
        iterator: its ``aclose``, if it has one, is called when it is closed before its end.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._lock = threading.Lock()
        self._due = 0
        self._requested: dict[int, tuple[Within | None, Callable[[Outcome[Any]], object]]] = {}
        self._coroutines: Coroutines | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None  # during a step
        self._is_closing = False
        self._has_ended = False
        self._closed: Promise[Outcome[None]] = Promise()

    def take(
        self,
        number: int,
        within: Within | None,
        done: Callable[[Outcome[Any]], object],
        coroutines: Coroutines,
    ) -> None:
        """Make a value when its step is due.

        Args:
            number: the number of the step.
            within: returns a context for each part of the step; None: it needs none.
            done: takes the value, an error of the iterator, or ``Ended``; the next step begins
                when it returns.
            coroutines: run the steps.
        """
        with self._lock:
            has_ended = self._has_ended
            is_first = self._coroutines is None
            self._coroutines = coroutines
            if not has_ended:
                self._requested[number] = within, done
        if has_ended:
            done(Value(Ended()))
        elif is_first:
            coroutines.submit(self._run(), self._on_end)
        else:
            self._wake()

    def close(self) -> Promise[Outcome[None]]:
        """Close the iterator: cancel its step; it makes no further values.

        Returns:
            Its outcome: what ``aclose`` of the iterator raised.
        """
        with self._lock:
            self._is_closing = True
            has_begun = self._coroutines is not None
        if has_begun:
            self._wake()
        else:
            self._on_end(Value(None))
        return self._closed

    def _wake(self) -> None:
        """Have the coroutine check for requests; it also does when it starts."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._on_change)

    def _on_change(self) -> None:
        self._changed.set()
        if self._is_closing and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        """Run the steps as they are requested, until the iterator ends or is closed."""
        self._loop = asyncio.get_running_loop()
        try:
            while not (self._is_closing or self._has_ended):
                with self._lock:
                    requested = self._requested.pop(self._due, None)
                if requested is None:
                    await self._changed.wait()
                    self._changed.clear()
                    continue
                self._due += 1
                within, done = requested
                done(await self._make(within))
        finally:
            close = getattr(self._iterator, "aclose", None)
            if close is not None and not self._has_ended:
                await close()

    async def _make(self, within: Within | None) -> Outcome[Any]:
        self._task = asyncio.current_task()
        step = next_of(self._iterator)
        try:
            outcome: Outcome[Any] = Value(
                await (step if within is None else stepwise(step, within))
            )
        except StopAsyncIteration:
            outcome = Value(Ended())
        except asyncio.CancelledError as exc:  # it has ended the iterator, too
            outcome = Value(Ended()) if self._is_closing else Error(exc)
        except BaseException as exc:
            outcome = Error(exc)
        finally:
            self._task = None
        self._has_ended = isinstance(outcome, Error) or type(outcome.value) is Ended
        return outcome

    def _on_end(self, outcome: Outcome[Any]) -> None:
        with self._lock:
            self._has_ended = True
            due = [*self._requested.values()]
            self._requested.clear()
        left = Value(Ended()) if self._is_closing or isinstance(outcome, Value) else outcome
        for _, done in due:
            done(left)
        self._closed.set(outcome)
