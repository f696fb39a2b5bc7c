"""The caller's end of a connection: send requests, match replies with the calls that wait.

    call ──> sent ──> reply: a Message                       the peer replied on the connection
      │        ├────> reply: Pending (owner.expect_reply)    ... and announced it only
      │        └────> reply: Error                           the connection broke, ``fail``
      └─────────────> reply: Pending (owner.reroute)         no byte of it was sent

Which thread reads the replies is the matter of ``reader_schedule``.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from rayrpc._concurrency.outcome import Error, Outcome, Value
from rayrpc._concurrency.promise import OneShot, Promise
from rayrpc._concurrency.reader import ReaderRole, ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Pending
from rayrpc._transports.direct.reader_schedule import (
    BROKEN,
    CALLER_READS,
    NOTHING,
    START_DELAYED,
    START_THREAD,
    THREAD_READS,
    ReaderSchedule,
    Start,
)
from rayrpc._transports.direct.stream import Stream
from rayrpc._transports.direct.wire import TICK_SECONDS, Message

__all__ = ["CallerConnection", "ConnectionCall", "ConnectionOwner"]

# With so many callbacks due, more calls are likely to follow: they are sent together, after this
# time at the latest.
BURST = 8
FLUSH_SECONDS = 0.0002
# Replies whose callbacks are not urgent are read after this time, or along with others.
DELAY_SECONDS = 0.005

# Why a waiting caller was woken; or by the value of its reply.
_READ = object()
_EXPIRED = object()

Reply = Message | Error | Pending


class ConnectionOwner(Protocol):
    """What a connection needs of the transport that opened it."""

    def connect(self, peer: Member) -> socket.socket:
        """Return an authenticated connection; raise OSError or RpcError if there is none."""

    def reroute(self, peer: Member, frame: Frame, reason: str) -> Pending:
        """Send a request of which the connection sent no byte by another transport."""

    def expect_reply(self, call_id: int, peer: Member) -> Pending:
        """Return where a reply will be that the peer sends by another transport."""

    def on_connection_lost(self, connection: CallerConnection, reason: str) -> None:
        """Handle the end of a connection; the calls that were sent on it wait for ``fail``."""


class ConnectionCall(OneShot[Reply], Pending):
    """A call on a connection; its value is the reply.

    Args:
        connection (CallerConnection): sends it.
        frame (Frame): the request.
        lock (Lock): the connection's.
    """

    __slots__ = ("_callback", "_connection", "frame", "id")

    def __init__(self, connection: CallerConnection, frame: Frame, lock: threading.Lock) -> None:
        super().__init__(lock)
        self._connection = connection
        self.id = frame.call_id
        #: the request, until it is sent
        self.frame: Frame | None = frame

    def wait(self, timeout: float | None) -> Frame:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._connection.wait_reply(self, deadline)
        reply = self._value
        if type(reply) is Message:
            return reply.frame()
        if isinstance(reply, Error):
            reply.unwrap()
        assert isinstance(reply, Pending)
        return reply.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def on_done(self, callback: Callable[[Outcome[Frame]], None], urgent: bool = True) -> None:
        start: Start = NOTHING
        with self._lock:
            is_pending = self._add(self._run_callback)
            if is_pending:
                self._callback = callback
                start = self._connection.schedule.add_callback(urgent)
        if start is not NOTHING:
            self._connection.start_reader(start)
        elif not is_pending:
            _report(callback, self._value)

    def _run_callback(self, reply: Reply) -> None:
        with self._lock:
            self._connection.schedule.remove_callback()
        _report(self._callback, reply)


def _report(callback: Callable[[Outcome[Frame]], None], reply: Reply) -> None:
    if type(reply) is Message:
        callback(Value(reply.frame()))
    elif isinstance(reply, Error):
        callback(reply)
    else:
        assert isinstance(reply, Pending)
        reply.on_done(callback)


class CallerConnection:
    """Call one peer.

    A thread of the cache connects; calls are sent when it has.

    Args:
        peer (Member): the callee.
        owner (ConnectionOwner): the transport.
        threads (ThreadCache): for connecting, reading, and sending what would block.
        watchdog (ReaderWatchdog): releases readers that stay in one callback.
    """

    def __init__(
        self, peer: Member, owner: ConnectionOwner, threads: ThreadCache, watchdog: ReaderWatchdog
    ) -> None:
        self.peer = peer
        self._owner = owner
        self._threads = threads
        self._watchdog = watchdog
        self._lock = threading.Lock()
        # Added to under the lock, unless BROKEN.  Readers remove a call without it: ``dict.pop``
        # is atomic, and should ``fail`` take the same call, its reply is set but once.
        self._calls: dict[int, ConnectionCall] = {}
        #: guarded by the lock, which calls share
        self.schedule: ReaderSchedule[Promise[object]] = ReaderSchedule()
        self._is_flush_due = False
        self._stream: Stream | None = None
        threads.submit(self._connect)

    # -- calling ------------------------------------------------------------------------------

    def call(self, frame: Frame) -> ConnectionCall | None:
        """Send a request; return None if the connection is broken."""
        call = ConnectionCall(self, frame, self._lock)
        schedule = self.schedule
        with self._lock:
            if schedule.state == BROKEN:
                return None
            self._calls[call.id] = call
            stream = self._stream
        if stream is not None:
            burst = schedule.callbacks >= BURST
            if stream.send(call.id, frame, burst):
                call.frame = None
            elif burst:
                self._flush_later(stream)
        return call

    def _flush_later(self, stream: Stream) -> None:
        def flush() -> None:
            time.sleep(FLUSH_SECONDS)
            with self._lock:
                self._is_flush_due = False
            stream.flush()

        with self._lock:
            if self._is_flush_due:
                return
            self._is_flush_due = True
        self._threads.submit(flush)

    def fail(self, error: BaseException) -> None:
        """End the connection and its calls."""
        with self._lock:
            self.schedule.break_off()
            calls = list(self._calls.values())
            self._calls.clear()
        if self._stream is not None:
            self._stream.close()
        for call in calls:
            call.set(Error(error))

    def trim(self) -> None:
        """Free memory that was not used for a while, and read what the peer has freed."""
        stream = self._stream
        if stream is None or self.schedule.state == BROKEN:
            return
        stream.trim()
        with self._lock:
            if not self.schedule.claim(THREAD_READS):
                return
        try:
            while stream.wait(0) and (message := self._next(stream)) is not None:
                self._complete(message)
        finally:
            self._release_reader()

    def close_after_fork(self) -> None:
        """Close the descriptors that a forked child inherited."""
        if self._stream is not None:
            self._stream.close_after_fork()

    def _connect(self) -> None:
        connection = None
        try:
            connection = self._owner.connect(self.peer)
            stream = Stream(connection, self._threads, self._on_unsent, opened_here=True)
        except Exception as exc:
            if connection is not None:
                connection.close()
            self._break_off(f"no connection could be made ({exc})", self._calls)
            return
        with self._lock:
            self._stream = stream
            calls = list(self._calls.values())
            is_broken = self.schedule.state == BROKEN
        if is_broken:
            stream.close()
            return
        for call in calls:
            frame = call.frame
            if frame is not None and stream.send(call.id, frame):
                call.frame = None
        self._release_reader()

    # -- waiting and reading ------------------------------------------------------------------

    def wait_reply(self, call: ConnectionCall, deadline: float | None) -> None:
        """Wait for the reply of a call; read the connection if no other thread does.

        Raises:
            TimeoutError: it did not arrive before the deadline.
        """
        while True:
            turn: Promise[object] | None = None
            with self._lock:
                if call.is_done:
                    return
                if not self.schedule.claim(CALLER_READS):
                    turn = Promise(self._lock)
                    self.schedule.add_caller(turn)
            if turn is None or self._wait_turn(call, turn, deadline):
                try:
                    if self._read_until(call, deadline):
                        return
                finally:
                    self._release_reader()

    def _wait_turn(
        self, call: ConnectionCall, turn: Promise[object], deadline: float | None
    ) -> bool:
        """Wait for a reply, or for the turn to read; return True if this thread is to read."""
        call.add_callback(turn.set)
        try:
            turn.wait(None if deadline is None else deadline - time.monotonic())
        except TimeoutError:
            turn.set(_EXPIRED)  # unless another thread was faster, just now
        with self._lock:
            self.schedule.remove_caller(turn)
        woken = turn.value
        if woken is _READ or woken is _EXPIRED:
            call.remove_callback(turn.set)
            if woken is _EXPIRED:
                raise TimeoutError
        return woken is _READ

    def _read_until(self, call: ConnectionCall, deadline: float | None) -> bool:
        """Read until a call is complete; return False if the connection breaks before."""
        stream = self._stream
        assert stream is not None
        while not call.is_done:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left < TICK_SECONDS and not stream.wait(max(0.0, left)):
                    raise TimeoutError
            message = self._next(stream)
            if message is not None:
                self._complete(message)
            elif self.schedule.state == BROKEN:
                return False
        return True

    def _release_reader(self) -> None:
        while True:
            with self._lock:
                following = self.schedule.release()
            if following is NOTHING:
                return
            if following is START_THREAD:
                self._threads.submit(self._read_for_callbacks)
                return
            if following.set(_READ):
                return

    def _read_for_callbacks(self) -> None:
        """Read and complete calls while callbacks are due, or until this thread is released."""
        stream = self._stream
        assert stream is not None
        schedule = self.schedule
        with ReaderRole(self._release_reader, self._watchdog) as role:
            while schedule.callbacks:
                message = self._next(stream)
                if message is not None:
                    role.message_received()
                    self._complete(message)
                    if not role.message_done():
                        return
                elif schedule.state == BROKEN:
                    break
        self._release_reader()

    def _read_delayed(self) -> None:
        time.sleep(DELAY_SECONDS)
        with self._lock:
            reads = self.schedule.end_delay()
        if reads:
            self._read_for_callbacks()

    def start_reader(self, start: Start) -> None:
        """Start a thread that reads, as the schedule says."""
        is_delayed = start is START_DELAYED
        self._threads.submit(self._read_delayed if is_delayed else self._read_for_callbacks)

    def _next(self, stream: Stream) -> Message | None:
        """Return the next message; None after a tick without one, or if the connection broke."""
        try:
            return stream.read()
        except TimeoutError:
            return None
        except EOFError as exc:
            self._break_off(f"its connection was cut ({exc})")
            return None

    def _complete(self, message: Message) -> None:
        call = self._calls.pop(message.number, None)
        if call is not None:
            if message.head:
                call.set(message)
            else:
                call.set(self._owner.expect_reply(call.id, self.peer))

    # -- the end ------------------------------------------------------------------------------

    def _on_unsent(self, call_ids: list[int]) -> None:
        self._break_off("its connection was cut", call_ids)

    def _break_off(self, reason: str, unsent: Iterable[int] = ()) -> None:
        with self._lock:
            is_first = self.schedule.break_off()
            found = [self._calls.pop(call_id, None) for call_id in list(unsent)]
        if is_first:
            self._owner.on_connection_lost(self, reason)
        for call in found:
            if call is not None:
                assert call.frame is not None
                call.set(self._owner.reroute(self.peer, call.frame, reason))
