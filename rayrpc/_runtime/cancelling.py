"""Calls that are cancelled: those that this worker makes, and those that it serves.

    caller                                       callee
    the Future fails at once
    cancel_call(id) ───────────────────────────> a queued call does not run
                                                 a coroutine is cancelled
                                                 a function is interrupted: its thread raises
                                                 the calls that it has made are cancelled, too

A function that runs gets an ``asyncio.CancelledError``, as a coroutine does, at its next bytecode.
Python raises it wherever the thread is.  So its thread is interrupted once, and only while it is in
users' code: calls of this package that it waits for end by being cancelled.  What is raised late is
taken back before the thread goes on (``interruptible``).  In a finalizer, or a callback of the
garbage collector, Python ignores an exception: then the thread is interrupted again.

    QUEUED ── cancel ──> does not run          RUNNING ── cancel ──> INTERRUPTED ──> replies
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from rayrpc._concurrency.frames import collection_paused
from rayrpc._protocol.membership import Member
from rayrpc._runtime.caller import Caller
from rayrpc._runtime.current_call import current_call
from rayrpc._runtime.interrupting_calls import is_in_function
from rayrpc._runtime.invocation import Invocation, prompt
from rayrpc._runtime.open_call import OpenCall, Request
from rayrpc._runtime.served_call import ServedCall
from rayrpc.errors import RpcError
from rayrpc.functions import async_execution

__all__ = ["Cancelled", "Cancelling", "cancellable", "interruptible"]

_T = TypeVar("_T")

# Delay before a function is interrupted: by then a reader that runs it has been released.  While
# its thread runs code of this package, that is retried, up to MOST_SECONDS apart.
FIRST_SECONDS = 0.01
MOST_SECONDS = 1.0
# Number of cancelled calls whose ids are kept: some may not have arrived yet.
MAX_EARLY = 1000

# Checks for an interrupt before it counts as lost.
CHECKS = 1000

# held while a thread is interrupted: none must be after its function has ended
_interrupting = threading.Lock()
# by interrupted thread: whether Python has ignored the interrupt
_ignored: dict[int, bool] = {}


class Cancelled(NamedTuple):
    """The result of ``cancel_call``, by which the callee cancels a call.

    Args:
        call_id (int): id of the call that its caller has cancelled.
    """

    call_id: int


@prompt
@async_execution
def cancel_call(call_id: int) -> Cancelled:
    """Cancel a call of the same caller."""
    return Cancelled(call_id)


class Cancelling:
    """Cancel the calls of one worker.

    Args:
        caller (Caller): makes calls.
        submit (Callable): runs a task in a thread.
        kill (Callable): ends the process of a worker, if it is hosted.
    """

    def __init__(
        self,
        caller: Caller,
        submit: Callable[[Callable[[], object]], object],
        kill: Callable[[Member], object],
    ) -> None:
        self._caller = caller
        self._submit = submit
        self._kill = kill
        self._lock = threading.Lock()
        #: calls that were cancelled: some may arrive yet, by the ids of their callers and their own
        self.early: dict[tuple[int, int], None] = {}

    # -- at the caller ------------------------------------------------------------------------

    def cancel(self, future: object, force: bool) -> bool:
        """Cancel the call of a Future.

        Args:
            future: the Future of a call.
            force: end the callee's process, if the callee is hosted.

        Returns:
            True if the call was under way, and was this worker's.
        """
        call = self.find(future)
        if call is None or not self._cancel(call):
            return False
        if force:
            self._kill(call.request.to)
        return True

    def find(self, future: object) -> OpenCall | None:
        """Return this worker's call of a Future, if that is under way."""
        for call in self._caller.under_way()[1]:
            if future is call.future or future is call.returned:
                return call
        return None

    def _cancel(self, call: OpenCall) -> bool:
        if not self._caller.cancel(call):
            return False
        self.notify(call.request)
        return True

    def notify(self, request: Request) -> None:
        """Have a callee end a call whose reply is not needed any more."""
        with contextlib.suppress(RpcError):  # it is gone, or this worker was shut down
            self._caller.future(request.to, Invocation(cancel_call, (request.id,)), None)

    def _cancel_calls_of(self, parent: ServedCall) -> None:
        """Cancel the calls made by the function of a served call."""
        waited, opened = self._caller.under_way()
        for request in waited:
            if request.parent is parent and not request.is_cancelled:
                request.is_cancelled = True  # its thread polls this while it waits
                self.notify(request)
        for call in opened:
            if call.request.parent is parent:
                self._cancel(call)

    # -- at the callee ------------------------------------------------------------------------

    def serve(self, src: int, call_id: int, calls: Callable[[], list[ServedCall]]) -> None:
        """Cancel a call that this worker serves.

        Args:
            src, call_id: of the call, which may not have arrived yet, or have ended.
            calls: returns the calls that the worker serves.
        """
        with self._lock:  # before the search below: a call that arrives meanwhile checks ``early``
            self.early[src, call_id] = None
            if len(self.early) > MAX_EARLY:
                del self.early[next(iter(self.early))]
        for call in calls():
            if call.src == src and call.id == call_id and not call.is_cancelled:
                call.is_cancelled = True
                self._submit(functools.partial(self._end, call, calls))
                return

    def _end(self, call: ServedCall, calls: Callable[[], list[ServedCall]]) -> None:
        """End a call that runs."""
        seconds = FIRST_SECONDS
        is_interrupted = False
        while True:
            time.sleep(seconds)
            seconds = min(2 * seconds, MOST_SECONDS)
            if call not in calls():
                return
            if is_interrupted and call.thread and not _ignored.get(call.thread):
                continue
            stop = call.stop
            if stop is not None:
                stop()  # first: else the coroutine gets the errors of its calls
            self._cancel_calls_of(call)
            if stop is not None or not call.thread:
                return
            is_interrupted = _interrupt(call)


def _interrupt(call: ServedCall) -> bool:
    """Interrupt the function of a call; return False if its thread cannot be interrupted now."""
    with _interrupting:
        thread = call.thread
        with collection_paused():
            if not thread or not is_in_function(sys._current_frames().get(thread)):
                return False
        _note_ignored()
        _ignored[thread] = False
        _set_exception(thread, asyncio.CancelledError)
        return True


def _note_ignored() -> None:
    """Have Python note the interrupts that it ignores, instead of printing them."""
    report: Any = sys.unraisablehook
    if getattr(report, "_notes_interrupts", False):
        return

    def note(unraisable: Any) -> None:
        thread = threading.get_ident()
        if thread in _ignored and unraisable.exc_type is asyncio.CancelledError:
            _ignored[thread] = True
        elif unraisable.exc_type is not _TakenBack:
            report(unraisable)

    note._notes_interrupts = True  # type: ignore[attr-defined]
    sys.unraisablehook = note


def _set_exception(thread: int, kind: type[BaseException]) -> None:
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    set_exception(ctypes.c_ulong(thread), ctypes.py_object(kind))


def interruptible(call: ServedCall, run: Callable[..., _T], *args: Any) -> _T:
    """Run a function for a call, which may be interrupted; no interrupt is pending afterwards.

    Args:
        call: the call, which is this thread's ``current_call`` meanwhile.
        run, args: the function and its arguments.

    Raises:
        asyncio.CancelledError: the call was cancelled.
    """
    token = current_call.set(call)
    call.thread = thread = threading.get_ident()
    try:
        try:
            if call.is_cancelled:
                raise asyncio.CancelledError
            return run(*args)
        finally:
            call.thread = 0
            if call.is_cancelled:
                _take_back(thread)
                _ignored.pop(thread, None)
    finally:  # a second one, as an interrupt may end the first
        current_call.reset(token)


async def cancellable(call: ServedCall, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine for a call, which may be cancelled."""
    task = asyncio.current_task()
    assert task is not None
    loop, cancel = asyncio.get_running_loop(), task.cancel

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(cancel)

    current_call.set(call)
    call.stop = stop
    if call.is_cancelled:
        coroutine.close()
        raise asyncio.CancelledError
    return await coroutine


class _TakenBack(BaseException):
    """Replaces an interrupt that has not been raised."""


def _take_back(thread: int) -> None:
    """Drop an interrupt of this thread: one that is still pending, or that is raised here.

    ``_TakenBack`` replaces it, and is raised here.  If it were only cleared, Python would check for
    it for ever: only raising an exception resets its flag.  (Under tracing, 3.11 only checks.)
    Python may raise it in a finalizer, or a callback of its collector, which lose it: it is set
    again until it is raised here.
    """
    struck: BaseException | None = None
    while True:
        try:
            while True:
                with _interrupting:
                    _set_exception(thread, _TakenBack)
                for _ in range(CHECKS):
                    time.sleep(0)
        except _TakenBack:
            break
        except BaseException as exc:  # the interrupt to drop, or Ctrl-C
            struck = exc
    if isinstance(struck, KeyboardInterrupt):
        raise struck
