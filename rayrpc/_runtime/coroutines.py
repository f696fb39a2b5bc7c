"""Event loops for users' async functions.

The coroutines of a worker share one loop, because asyncio's locks and queues belong to a loop.  If
a coroutine blocks the loop, the loop is retired: it keeps its coroutines, and new ones run on
another loop.  Else two workers that call one another could wait for ever.  A coroutine that raises
SystemExit or KeyboardInterrupt ends alone: its loop goes on.

    IDLE ── submit ──> CURRENT ── blocked ──> RETIRED ── last coroutine done ──> closed
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import types
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any

from rayrpc._concurrency.outcome import Error, Outcome, Value
from rayrpc._concurrency.reader import on_block
from rayrpc._concurrency.threads import new_thread
from rayrpc._concurrency.waiting import Event

__all__ = ["Coroutines", "next_of", "stepwise"]

# A loop that takes no coroutine out of the queue for this long is blocked outside of rayrpc.
STUCK_SECONDS = 1.0

Done = Callable[[Outcome[Any]], None]


class Coroutines:
    """Run coroutines on event loops.

    Args:
        name (str): prefix of the threads' names.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queue: deque[tuple[Coroutine[Any, Any, Any], Done]] = deque()
        self._current: _Loop | None = None
        self._loops: set[_Loop] = set()
        self._guard: threading.Thread | None = None
        self._waiting = Event()
        self._taken = 0
        self._closed = False

    def submit(self, coroutine: Coroutine[Any, Any, Any], done: Done) -> None:
        """Run a coroutine; ``done`` is called with its outcome, here if no loop can be started."""
        with self._lock:
            if self._closed:
                coroutine.close()
                return
            self._queue.append((coroutine, done))
            try:
                self._start_guard()
                self._wake()
            except (RuntimeError, OSError) as exc:  # no thread, or no descriptor
                self._queue.pop()
                error = Error(exc)
            else:
                self._waiting.set()
                return
        coroutine.close()
        done(error)

    def close(self) -> None:
        """Cancel all coroutines and stop the loops."""
        with self._lock:
            self._closed = True
            loops = list(self._loops)
            for coroutine, _ in self._queue:
                coroutine.close()
            self._queue.clear()
        self._waiting.set()
        for loop in loops:
            loop.end()

    def _start_guard(self) -> None:
        if self._guard is None:
            guard = new_thread(self._watch, f"{self._name}-guard")
            guard.start()
            self._guard = guard

    def _wake(self) -> None:
        """Have the current loop take from the queue; start a loop if there is none."""
        if self._current is None:
            self._current = _Loop(f"{self._name}-{len(self._loops)}", self._take, self._leave)
            self._loops.add(self._current)
        if self._current.is_idle:
            self._current.is_idle = False
            self._current.wake()

    def _take(self, loop: _Loop) -> tuple[Coroutine[Any, Any, Any], Done] | None:
        with self._lock:
            if loop is self._current and self._queue:
                self._taken += 1
                result = self._queue.popleft()
                return result
            loop.is_idle = True
            return None

    def _leave(self, loop: _Loop, ends: bool) -> None:
        """Stop passing coroutines to a loop; ``ends``: its last coroutine is done."""
        with self._lock:
            if self._current is loop:
                self._current = None
                if self._queue:
                    with contextlib.suppress(RuntimeError, OSError):  # the guard tries again
                        self._wake()
            if ends:
                self._loops.discard(loop)

    def _watch(self) -> None:
        while not self._closed:
            self._waiting.wait()
            taken = self._taken
            time.sleep(STUCK_SECONDS)
            loop = self._current
            if not self._queue:
                self._waiting.clear()
                if self._queue:
                    self._waiting.set()
            elif loop is None:
                with self._lock, contextlib.suppress(RuntimeError, OSError):
                    self._wake()
            elif taken == self._taken:
                loop.retire()


class _Loop:
    """An event loop in a thread."""

    def __init__(
        self,
        name: str,
        take: Callable[[_Loop], tuple[Coroutine[Any, Any, Any], Done] | None],
        leave: Callable[[_Loop, bool], None],
    ) -> None:
        self._take = take
        self._leave = leave
        self._count = 0
        self._is_retired = False
        #: it waits for ``wake``
        self.is_idle = True
        self._is_ended = False
        self._loop = asyncio.new_event_loop()
        try:
            new_thread(self._run, name).start()
        except RuntimeError:
            self._loop.close()
            raise

    def wake(self) -> None:
        """Have the loop take from the queue."""
        self._loop.call_soon_threadsafe(self._next)

    def retire(self) -> None:
        """Take no more coroutines; close after the last one."""
        if self._is_retired:
            return
        self._is_retired = True
        self._leave(self, False)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end_if_empty)

    def end(self) -> None:
        """Stop the loop and cancel its coroutines."""
        self._is_retired = self._is_ended = True
        with contextlib.suppress(RuntimeError):  # it has just ended by itself
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with on_block(self.retire):
            self._run_until(lambda: self._is_ended or (self._is_retired and not self._count))
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            gathered = asyncio.gather(*tasks, return_exceptions=True)
            gathered.add_done_callback(lambda _: self._loop.stop())
            self._run_until(gathered.done)
        self._loop.close()
        self._leave(self, True)

    def _run_until(self, is_over: Callable[[], bool]) -> None:
        """Run the loop until it is stopped and ``is_over``.

        A task that raises SystemExit or KeyboardInterrupt is done, but asyncio raises these from
        the loop, too, and drops its request to stop.
        """
        while not is_over():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def _next(self) -> None:
        taken = self._take(self)
        if taken is None:
            return
        coroutine, done = taken
        self._count += 1
        task = self._loop.create_task(coroutine)
        task.add_done_callback(lambda ended: self._done(ended, done))
        self._loop.call_soon(self._next)  # after its first step, which may block

    def _done(self, task: asyncio.Task[Any], done: Done) -> None:
        self._count -= 1
        try:
            outcome: Outcome[Any] = Value(task.result())
        except asyncio.CancelledError:
            outcome = Error(RuntimeError("the coroutine was cancelled"))
        except BaseException as exc:
            outcome = Error(exc)
        try:
            done(outcome)
        finally:
            self._end_if_empty()

    def _end_if_empty(self) -> None:
        if self._is_retired and not self._count:
            self._loop.stop()


async def next_of(iterator: AsyncIterator[Any]) -> Any:
    """Return the next value of an asynchronous iterator."""
    return await iterator.__anext__()


async def stepwise(
    coroutine: Coroutine[Any, Any, Any], within: Callable[[], AbstractContextManager[Any]]
) -> Any:
    """Run a coroutine, each of its steps in a context of its own."""
    return await _steps(coroutine, within)  # from Python 3.12 on no task takes a generator


@types.coroutine
def _steps(
    coroutine: Coroutine[Any, Any, Any], within: Callable[[], AbstractContextManager[Any]]
) -> Generator[Any, Any, Any]:
    sent: Any = None
    thrown: BaseException | None = None
    while True:
        with within():
            try:
                waits_for = coroutine.send(sent) if thrown is None else coroutine.throw(thrown)
            except StopIteration as stop:
                return stop.value
        try:
            sent, thrown = (yield waits_for), None
        except BaseException as exc:
            thrown = exc
