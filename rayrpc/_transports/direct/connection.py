"""The caller's end of a connection: a connection to a peer on which this worker calls it.

Nobody reads without a reason.  A thread that waits for its reply reads the connection itself if
nobody else does (it *leads*), and gives the replies of others to them; when it has its own, one of
those others leads.  Calls that complete by callback are read by a thread of the cache, while
there are any.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from rayrpc._concurrency.outcome import Error, Outcome, Value
from rayrpc._concurrency.reader import ReaderRole, ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Pending
from rayrpc._transports.direct.stream import Stream
from rayrpc._transports.direct.wire import TICK_SECONDS, Message

# With so many calls under way that nobody waits for, others are likely to follow: they go out
# together, after this time at the latest.
BURST = 8
FLUSH_SECONDS = 0.0002
# Replies that nobody waits for are read after this time, or along with others.
PATIENCE_SECONDS = 0.005

__all__ = ["CallerConnection", "ConnectionCall", "ConnectionOwner"]


class ConnectionOwner(Protocol):
    """What a connection needs of the transport that opened it."""

    def connect(self, peer: Member) -> socket.socket:
        """Return an authenticated connection; raise OSError or RpcError if there is none."""

    def reroute(self, call: ConnectionCall, reason: str) -> None:
        """Take a call that certainly was not sent."""

    def on_connection_lost(self, connection: CallerConnection, reason: str) -> None:
        """Note that a connection broke; calls that were sent on it wait for ``fail``."""

    def other_way(self, call: ConnectionCall) -> Pending:
        """Return where the reply comes that the connection only announced."""


class ConnectionCall(Pending):
    """A call on a connection."""

    __slots__ = ("_callback", "_gate", "_lane", "_other", "_promoted", "_reply", "frame", "id")

    def __init__(self, connection: CallerConnection, frame: Frame) -> None:
        self._lane = connection
        self.id = frame.call_id
        self.frame: Frame | None = frame  # until it is sent
        self._reply: Message | Error | None = None
        self._other: Pending | None = None
        self._callback: Callable[[Outcome[Frame]], None] | None = None
        self._gate: threading.Lock | None = None  # what a thread that waits is held by
        self._promoted = False

    @property
    def peer(self) -> Member:
        """Whom it is for."""
        return self._lane.peer

    def go_by(self, other: Pending) -> None:
        """Let the reply come from another pending call."""
        self._lane._complete(self, None, other)

    def wait(self, timeout: float | None) -> Frame:
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._reply is None and self._other is None:
            self._lane._wait(self, deadline)
        reply = self._reply
        if type(reply) is Message and reply.head:
            return reply.frame()
        if isinstance(reply, Error):
            reply.unwrap()
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return self._elsewhere().wait(left)

    def on_done(self, callback: Callable[[Outcome[Frame]], None], urgent: bool = True) -> None:
        if self._lane._call_back(self, callback, urgent):
            self._report(callback)

    def _elsewhere(self) -> Pending:
        if self._other is None:
            self._other = self._lane._owner.other_way(self)
        return self._other

    def _report(self, callback: Callable[[Outcome[Frame]], None]) -> None:
        reply = self._reply
        if isinstance(reply, Error):
            callback(reply)
        elif reply is not None and reply.head:
            callback(Value(reply.frame()))
        else:
            self._elsewhere().on_done(callback)


class CallerConnection:
    """Call one peer.

    The connection is made in a thread of the cache; calls wait for it.

    Args:
        peer (Member): the callee.
        owner (ConnectionOwner): the transport.
        threads (ThreadCache): for connecting, reading, and what cannot be sent at once.
        watch (ReaderWatchdog): ends the turns of threads that are busy with callbacks for long.
    """

    def __init__(
        self, peer: Member, owner: ConnectionOwner, threads: ThreadCache, watch: ReaderWatchdog
    ) -> None:
        self.peer = peer
        self._owner = owner
        self._threads = threads
        self._watch = watch
        self._lock = threading.Lock()
        self._calls: dict[int, ConnectionCall] = {}
        self._followers: dict[ConnectionCall, None] = {}
        self._callbacks = 0  # how many calls complete by callback
        self._leading = True  # the thread that connects
        self._broken = False
        self._lazy = False  # a thread will lead soon
        self._flushing = False  # a thread is about to
        self._stream: Stream | None = None
        threads.submit(self._connect)

    # -- calling ------------------------------------------------------------------------------

    def call(self, frame: Frame) -> ConnectionCall | None:
        """Send a frame; return None if the connection has ended."""
        call = ConnectionCall(self, frame)
        with self._lock:
            if self._broken:
                return None
            self._calls[call.id] = call
            stream = self._stream
        if stream is not None:
            burst = self._callbacks >= BURST
            if stream.send(call.id, frame, burst):
                call.frame = None
            elif burst and not self._flushing:
                self._flushing = True
                self._threads.submit(self._flush)
        return call

    def _flush(self) -> None:
        time.sleep(FLUSH_SECONDS)
        self._flushing = False
        if self._stream is not None:
            self._stream.flush()

    def fail(self, error: BaseException) -> None:
        """End the connection and its calls."""
        with self._lock:
            self._broken = True
            calls = list(self._calls.values())
            self._calls.clear()
        if self._stream is not None:
            self._stream.close()
        for call in calls:
            self._complete(call, Error(error), None)

    def trim(self) -> None:
        """Let go of memory that was not used for a while, and hear what the peer lets go of."""
        stream = self._stream
        if stream is None or self._broken:
            return
        stream.trim()
        with self._lock:
            if self._leading or self._broken:
                return
            self._leading = True
        try:
            while stream.wait(0) and (message := self._next(stream)) is not None:
                self._take(message)
        finally:
            self._step_down()

    def close_after_fork(self) -> None:
        """Close the descriptor that a forked child inherited."""
        if self._stream is not None:
            self._stream.close_after_fork()

    def _connect(self) -> None:
        connection = None
        try:
            connection = self._owner.connect(self.peer)
            stream = Stream(connection, self._threads, self._unsent, opened_here=True)
        except Exception as exc:
            if connection is not None:
                connection.close()
            self._end(f"no connection could be made ({exc})", self._calls)
            return
        with self._lock:
            self._stream = stream
            waiting = list(self._calls.values())
            broken = self._broken
        if broken:
            stream.close()
            return
        for call in waiting:
            frame = call.frame
            if frame is not None:
                stream.send(call.id, frame)
        self._step_down()

    # -- waiting ------------------------------------------------------------------------------

    def _wait(self, call: ConnectionCall, deadline: float | None) -> None:
        while True:
            with self._lock:
                if call._reply is not None or call._other is not None:
                    return
                lead = not (self._leading or self._broken)
                if lead:
                    self._leading = True
                else:
                    gate = call._gate = threading.Lock()
                    gate.acquire()
                    self._followers[call] = None
            if not lead:
                lead = self._follow(call, gate, deadline)
            if lead:
                try:
                    self._lead(call, deadline)
                finally:
                    self._step_down()

    def _follow(self, call: ConnectionCall, gate: threading.Lock, deadline: float | None) -> bool:
        """Wait until the reply is there, or it is our turn to lead: then return True."""
        left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        opened = gate.acquire(timeout=left)
        with self._lock:
            self._followers.pop(call, None)
            call._gate = None
            promoted, call._promoted = call._promoted, False
            if not opened and not promoted and call._reply is None and call._other is None:
                raise TimeoutError
        return promoted

    def _lead(self, call: ConnectionCall, deadline: float | None) -> None:
        """Read until the reply of ``call`` is there, or the connection ends."""
        stream = self._stream
        assert stream is not None
        while call._reply is None and call._other is None:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left < TICK_SECONDS and not stream.wait(max(0.0, left)):
                    raise TimeoutError
            message = self._next(stream)
            if message is None:
                if self._broken:
                    return
            elif message.number == call.id:  # as nearly always: nobody else waits for it
                if self._calls.pop(call.id, None) is not None:
                    call._reply = message
            else:
                self._take(message)

    def _step_down(self) -> None:
        with self._lock:
            if not self._followers and not self._callbacks:
                self._leading = False
                return
            for follower in self._followers:
                if follower._reply is None and not follower._promoted and not self._broken:
                    follower._promoted = True
                    assert follower._gate is not None
                    follower._gate.release()
                    return
            if not self._callbacks or self._broken:
                self._leading = False
                return
        self._threads.submit(self._lead_for_callbacks)

    def _lead_for_callbacks(self) -> None:
        """Read replies, and complete their calls here, until this thread is released."""
        stream = self._stream
        assert stream is not None
        with ReaderRole(self._step_down, self._watch) as role:
            while self._callbacks:
                message = self._next(stream)
                if message is not None:
                    role.message_received()
                    self._take(message)
                    if not role.message_done():
                        return
                elif self._broken:
                    break
        self._step_down()

    def _lead_later(self) -> None:
        """Read the replies that nobody waits for, unless somebody reads anyway."""
        time.sleep(PATIENCE_SECONDS)
        with self._lock:
            self._lazy = False
            if self._leading or self._broken or not self._callbacks:
                return
            self._leading = True
        self._lead_for_callbacks()

    def _call_back(
        self, call: ConnectionCall, callback: Callable[[Outcome[Frame]], None], urgent: bool
    ) -> bool:
        """Note a callback; return True if it may run at once."""
        with self._lock:
            if call._reply is not None or call._other is not None:
                return True
            call._callback = callback
            self._callbacks += 1
            if self._leading or self._broken:
                return False
            if urgent:
                self._leading = True
            elif self._lazy:
                return False
            else:
                self._lazy = True
        self._threads.submit(self._lead_for_callbacks if urgent else self._lead_later)
        return False

    def _next(self, stream: Stream) -> Message | None:
        """Return the next message; None after a tick without one, or if the connection broke."""
        try:
            return stream.read()
        except TimeoutError:
            return None
        except EOFError as exc:
            self._end(f"its connection was cut ({exc})")
            return None

    def _take(self, message: Message) -> None:
        call = self._calls.pop(message.number, None)
        if call is not None:
            self._complete(call, message, None)

    def _complete(
        self, call: ConnectionCall, reply: Message | Error | None, other: Pending | None
    ) -> None:
        with self._lock:
            call._reply = reply
            call._other = other
            callback, call._callback = call._callback, None
            if callback is not None:
                self._callbacks -= 1
            if call._gate is not None and not call._promoted:
                call._gate.release()
                call._gate = None
        if callback is not None:
            call._report(callback)

    # -- the end ------------------------------------------------------------------------------

    def _unsent(self, call_ids: list[int]) -> None:
        self._end("its connection was cut", call_ids)

    def _end(self, reason: str, unsent: Iterable[int] = ()) -> None:
        with self._lock:
            first = not self._broken
            self._broken = True
            calls = [self._calls.pop(i) for i in list(unsent) if i in self._calls]
        if first:
            self._owner.on_connection_lost(self, reason)
        for call in calls:
            self._owner.reroute(call, reason)
