"""Streams at the worker that makes their values.

A stream is an RRef to an iterator, and calls that each return one of its values:

    caller                                  callee
    remote(open_iterator, func, args)  ──>  the cell of the RRef keeps the iterator
    advance(RRef, 0), ... (window - 1) ──>  each waits until the iterator has made its value
    a value <─────────────────────────────  ... which is the reply
    advance(RRef, window)              ──>
    the handle of the RRef is dropped  ──>  the iterator is closed

So the death of either worker is handled as the loss of an RRef's owner or holder, and an error of
the iterator as that of a call.
"""

from __future__ import annotations

import functools
import logging
import pickle
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple

from rayrpc._concurrency.latency_profile import LatencyProfile, profiled_by_name
from rayrpc._concurrency.outcome import Error, Outcome
from rayrpc._concurrency.reader import release_reader
from rayrpc._concurrency.threads import Slots
from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.messages import Frame, size_of
from rayrpc._protocol.transport import Deferred
from rayrpc._runtime.coroutines import Coroutines
from rayrpc._runtime.hooks import IncomingCall
from rayrpc._runtime.invocation import Invocation, asked_ahead, forwards, user_function
from rayrpc._runtime.iteration import AsyncSteps, Ended, Steps
from rayrpc._runtime.rrefs.cell import Cell
from rayrpc._runtime.serialization.remote_errors import described_as
from rayrpc._runtime.served_call import ServedCall
from rayrpc._runtime.worker import Worker
from rayrpc.errors import CallError
from rayrpc.functions import async_execution

__all__ = ["Ended", "ServedStreams", "ValueRequest", "advance", "close", "open_iterator"]

logger = logging.getLogger(__name__)

# A value of so many bytes is copied; a larger one is sent before the iterator goes on.
SMALL_BYTES = 1 << 16

#: the number of a request that closes the iterator
CLOSE = -1


class ValueRequest(NamedTuple):
    """Request a value of a stream, or its end: the result of ``advance`` and ``close``.

    Args:
        rref_id (GloballyUniqueId): identity of the stream's RRef.
        number (int): number of the value; CLOSE: close the iterator.
    """

    rref_id: GloballyUniqueId
    number: int


@asked_ahead
@profiled_by_name
@async_execution
def advance(created_on: int, name: str, local_id: int, number: int) -> ValueRequest:
    """Make a value of a stream.

    Args:
        created_on, local_id: the identity of its RRef.
        name: the name of its function.
        number: the number of the value.
    """
    return ValueRequest(GloballyUniqueId(created_on, local_id), number)


@profiled_by_name
@async_execution
def close(created_on: int, name: str, local_id: int) -> ValueRequest:
    """Close the iterator of a stream; see ``advance``."""
    return ValueRequest(GloballyUniqueId(created_on, local_id), CLOSE)


@forwards
def open_iterator(func: Callable[..., Any], args: Any, kwargs: Any) -> ServedIterator:
    """Return the iterator that a function returns, for an RRef to keep.

    Raises:
        TypeError: it returns none.
    """
    made = Invocation(func, args, kwargs)()
    if hasattr(made, "__anext__"):
        return ServedIterator(AsyncSteps(made))
    if hasattr(made, "__next__"):
        return ServedIterator(Steps(made, func))
    raise TypeError(
        f"rpc.stream runs generators, async generators and functions that return an iterator, but "
        f"{user_function(func)} has returned {type(made).__module__}.{type(made).__qualname__}"
    )


class ServedIterator:
    """Hold an iterator, which is closed when this is collected.

    Args:
        steps: its steps.
    """

    def __init__(self, steps: Steps | AsyncSteps) -> None:
        self.steps = steps
        self.on_collected: Callable[[Steps | AsyncSteps], object] | None = None

    def __del__(self) -> None:
        if self.on_collected is not None:  # else no call has used it yet
            self.on_collected(self.steps)


class ServedStreams:
    """Serve the streams of one worker.

    Args:
        worker (Worker): the parts of that worker.
        slots (Slots): bounds how many users' functions run at a time.
        coroutines (Coroutines): runs asynchronous iterators.
        run (Callable): runs a user's function, for a call.
        within (Callable): returns the hooks' context for one part of a call.
        reply (Callable): makes the reply to a call.
        settle (Callable): sets a late reply; takes what makes it.
    """

    def __init__(
        self,
        worker: Worker,
        slots: Slots,
        coroutines: Coroutines,
        run: Callable[[ServedCall, Invocation], Any],
        within: Callable[[IncomingCall], AbstractContextManager[Any]],
        reply: Callable[[Frame, ServedCall, Outcome[Any], IncomingCall | None], Frame],
        settle: Callable[[Deferred, Frame, Callable[[], Frame]], None],
    ) -> None:
        self._me = worker.info
        self._rrefs = worker.rrefs
        self._slots = slots
        self._coroutines = coroutines
        self._run = run
        self._within = within
        self._reply = reply
        self._settle = settle
        self._quick = LatencyProfile()
        self._own: weakref.WeakValueDictionary[GloballyUniqueId, Any] = (
            weakref.WeakValueDictionary()
        )

    def add_own(self, rref_id: GloballyUniqueId, handle: Any) -> None:
        """Register the handle of a stream whose caller is this worker itself.

        No fork of it is counted, so the RRef table of this worker does not list it.
        """
        self._own[rref_id] = handle

    def serve(
        self, frame: Frame, entry: ServedCall, wanted: ValueRequest, call: IncomingCall | None
    ) -> Frame | Deferred:
        """Reply to a call that returned a ``ValueRequest``, once that is due.

        This thread has a worker slot.
        """
        try:
            opened = self._find(wanted.rref_id)
        except CallError as exc:  # it was released: not printed here, as other errors are
            text = f"On {self._me}:\n{exc!r}\n"
            opened = Error(exc, described_as(text, exc, pickle.dumps))
        if isinstance(opened, Error):
            return self._reply(frame, entry, opened, call)
        if opened.value.on_collected is None:
            opened.value.on_collected = self._on_collected
        steps = opened.value.steps
        del opened  # so that it is collected with the RRef
        deferred = Deferred()

        def reply(outcome: Outcome[Any]) -> None:
            self._settle(deferred, frame, lambda: self._reply(frame, entry, outcome, call))

        if wanted.number == CLOSE:
            closed = steps.close() if isinstance(steps, AsyncSteps) else self._close(steps)
            closed.on_done(reply)
            return deferred
        if isinstance(steps, AsyncSteps):
            within = None if call is None else lambda: self._within(call)
            steps.take(wanted.number, within, reply, self._coroutines)
            return deferred

        def run(step: Callable[[], Frame]) -> None:
            try:
                self._settle(deferred, frame, step)
            finally:
                steps.end_step()  # not before: the iterator may write to what it has yielded

        def step() -> Frame:
            return self._step(steps, frame, entry, call)

        def begin() -> None:
            try:
                self._slots.submit(lambda: run(step))
            except RuntimeError as exc:  # no thread can be started
                outcome = Error(exc)
                run(lambda: self._reply(frame, entry, outcome, call))

        if not steps.take(wanted.number, begin):
            return deferred
        try:
            made = step()
            if size_of(made) > SMALL_BYTES:
                self._slots.submit_aside(lambda: run(lambda: made))
                return deferred
            made.keep_buffers()
        except BaseException:
            steps.end_step()
            raise
        steps.end_step()
        return made

    def _find(self, rref_id: GloballyUniqueId) -> Outcome[ServedIterator]:
        """Return the iterator of a stream, or the error of the function that was to make it."""
        handle = self._own.get(rref_id) if rref_id.created_on == self._me.id else None
        cell: Cell = self._rrefs.lookup(rref_id) if handle is None else handle._cell
        outcome: Outcome[ServedIterator] | None = cell.value
        if outcome is None:  # a caller requests values when it has the reply to ``open_iterator``
            raise CallError(f"the stream of RRef {rref_id} has not been opened")
        return outcome

    def _step(
        self, steps: Steps, frame: Frame, entry: ServedCall, call: IncomingCall | None
    ) -> Frame:
        """Make a value, and the reply that has it."""
        if not self._quick.is_quick(entry.func):
            release_reader()
        start = perf_counter()
        with nullcontext() if call is None else self._within(call):
            outcome = steps.make(functools.partial(self._run, entry))
        self._quick.record(entry.func, perf_counter() - start, True)
        return self._reply(frame, entry, outcome, call)

    def _close(self, steps: Steps) -> Any:
        return steps.close(self._slots.submit)

    def _on_collected(self, steps: Steps | AsyncSteps) -> None:
        """Close the iterator of a stream without handles; any thread may collect it."""
        self._slots.submit_aside(lambda: self._close_unheld(steps))

    def _close_unheld(self, steps: Steps | AsyncSteps) -> None:
        closed = steps.close() if isinstance(steps, AsyncSteps) else self._close(steps)

        def on_closed(outcome: Outcome[None]) -> None:
            if isinstance(outcome, Error):
                logger.warning(
                    "a generator raised an error as it was closed", exc_info=outcome.error
                )

        closed.on_done(on_closed)
