"""A call on a connection, and its reply."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.outcome import Error, Outcome, Value
from rayrpc._concurrency.promise import PENDING, OneShot, Promise
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Pending
from rayrpc._transports.direct.reader_schedule import NOTHING, ReaderSchedule, Start
from rayrpc._transports.direct.wire import Message

__all__ = ["ConnectionCall", "READ", "Reply", "take_unsent"]

logger = logging.getLogger(__name__)

Reply = Message | Error | Pending

#: a waiter with this value is to read; with any other, it has the reply, or stops waiting
READ = object()
_EXPIRED = object()


class ReadConnection(Protocol):
    """What a call needs of its connection."""

    schedule: ReaderSchedule[Any]

    def wait_reply(self, call: ConnectionCall, deadline: Deadline) -> None:
        """Wait for the reply to a call; TimeoutError after the deadline."""

    def start_reader(self, start: Start) -> None:
        """Start a thread that reads, as the schedule says."""

    def repair(self) -> None:
        """Complete the steps of the schedule that an interrupt has prevented."""

    def reroute(self, call: ConnectionCall, reason: str) -> None:
        """Send a call by another transport."""


class ConnectionCall(OneShot[Reply], Pending):
    """A call on a connection; its value is the reply.

    Args:
        connection (ReadConnection): receives the reply.
        call_id (int): the request's id.
        frame (Frame | None): the request; None: another connection sends it.
        lock (Lock): the connection's lock.
    """

    __slots__ = ("_callback", "_connection", "frame", "id", "is_sending", "unsent", "waiter")

    def __init__(
        self,
        connection: ReadConnection,
        call_id: int,
        frame: Frame | None,
        lock: threading.Lock,
    ) -> None:
        super().__init__(lock)
        self._connection = connection
        self.id = call_id
        #: the request, until it is sent
        self.frame = frame
        #: a thread is sending the frame; when it is done, the program may write to the buffers
        self.is_sending = False
        #: why no byte of the frame was sent, if the thread that sends it is to reroute it
        self.unsent: str | None = None
        #: notifies the thread that waits for the reply, or to be the reader; None: the thread reads
        self.waiter: Promise[object] | None = None
        self._callback: Callable[[Outcome[Frame]], None] | None = None

    def wait(self, timeout: float | None) -> Frame:
        deadline = Deadline(timeout)
        self._connection.wait_reply(self, deadline)
        reply = self._value
        if type(reply) is Message:
            return reply.frame()
        if isinstance(reply, Error):
            reply.unwrap()
        assert isinstance(reply, Pending)
        return reply.wait(deadline.remaining())

    def kept(self) -> None:
        """Note that the frame has buffers of its own: the call can be rerouted, now or later."""
        with self._lock:
            self.is_sending = False
            reason = self.unsent
        if reason is not None:
            self._connection.reroute(self, reason)

    def new_waiter(self) -> Promise[object]:
        """Begin a wait, with the lock held; ``wait_notified`` and perhaps ``end_wait`` follow."""
        self.waiter = Promise(self._lock)
        return self.waiter

    def wait_notified(self, deadline: Deadline) -> bool:
        """Wait for the reply, or to be the reader; return True if this thread is to read.

        Raises:
            TimeoutError: neither happened before the deadline; call ``end_wait``.
        """
        waiter = self.waiter
        assert waiter is not None
        self._add_callback(waiter.set)
        waiter.wait(deadline.remaining())
        if waiter.value is not READ:
            return False
        self._remove_callback(waiter.set)
        return True

    def end_wait(self) -> None:
        """End the wait, unless it has ended; may be called again."""
        waiter = self.waiter
        if waiter is not None:
            waiter.set(_EXPIRED)
            self._remove_callback(waiter.set)

    def on_done(self, callback: Callable[[Outcome[Frame]], None], urgent: bool = True) -> None:
        start: Start = NOTHING
        try:
            with self._lock:
                is_pending = self._value is PENDING
                if is_pending:
                    schedule = self._connection.schedule
                    schedule.callbacks += 1  # no interrupt comes between this line and the next
                    self._callback = callback
                    start = schedule.due_start(urgent)
            if start is not NOTHING:
                self._connection.start_reader(start)
            elif not is_pending:
                self._report(callback, self._value)
        except BaseException:
            self._connection.repair()
            raise

    def on_orphaned(self, callback: Callable[[Outcome[Frame]], None]) -> None:
        self._add_callback(functools.partial(self._report, callback))

    def set(self, value: Reply) -> bool:
        with self._lock:
            if self._value is not PENDING:
                return False
            self._value = value
            self.frame = None  # the frame references this call
            if self._callback is not None:
                self._connection.schedule.callbacks -= 1
        self._run_callbacks()
        return True

    def set_again(self, value: Reply) -> None:
        if not self.set(value):
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        if self._callbacks is not None:  # of a thread that waits
            super()._run_callbacks()
        callback = self._callback
        if callback is not None:
            self._report(callback, self._value)
            self._callback = None

    def _report(self, callback: Callable[[Outcome[Frame]], None], reply: Reply) -> None:
        """Call back; an exception is logged, as this thread may be the reader."""
        try:
            if type(reply) is Message:
                callback(Value(reply.frame()))
            elif isinstance(reply, Error):
                callback(reply)
            else:
                assert isinstance(reply, Pending)
                reply.on_done(callback)
        except Exception:
            logger.exception("error in a callback")


def take_unsent(
    calls: dict[int, ConnectionCall], unsent: Iterable[int], reason: str
) -> list[ConnectionCall]:
    """Take calls of which no byte was sent, with the lock held; return those to be rerouted now.

    Calls without a frame were sent on another connection: they stay in ``calls``.

    Args:
        calls: the calls of the connection, by id.
        unsent: the ids of the calls to take.
        reason: why no byte of them was sent.
    """
    ready = []
    for call_id in unsent:
        call = calls.get(call_id)
        if call is not None and call.frame is not None:
            calls.pop(call_id, None)
            if call.is_sending:
                call.unsent = reason
            else:
                ready.append(call)
    return ready
