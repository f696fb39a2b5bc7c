"""The caller's end of a connection: send requests, match replies with the calls that wait.

    call ──> sent ──> reply: a Message                       the peer replied on the connection
      │        ├────> reply: Pending (owner.expect_...)      ... but only announced the reply
      │        └────> reply: Error                           the connection broke, ``fail``
      └─────────────> reply: Pending (owner.reroute)         no byte of it was sent

Large messages have a second connection, so that small ones need not wait for them.  A large request
and its reply go by the second connection.  A large reply to a small request is announced on the
first connection, and arrives on the second.  The two are lost together.  A reply with references to
objects of the cluster's store is announced, too, and arrives by the fallback transport.

``reply_reader`` reads the replies.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Iterable

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.outcome import Error
from rayrpc._concurrency.reader import ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.direct.connection_call import ConnectionCall, Reply, take_unsent
from rayrpc._transports.direct.connection_owner import ConnectionOwner
from rayrpc._transports.direct.peer_process import pid_of_peer
from rayrpc._transports.direct.reader_schedule import BROKEN
from rayrpc._transports.direct.received_memory import ReceivedMemory
from rayrpc._transports.direct.reply_reader import ReplyReader
from rayrpc._transports.direct.stream import Stream
from rayrpc._transports.direct.traffic import Traffic
from rayrpc._transports.direct.wire import Message

__all__ = ["CallerConnection"]

# From this many due callbacks on, more calls are likely to follow: they are sent together.
BURST = 8
# How often ``end`` checks whether the replies are read.
READ_POLL_SECONDS = 0.001


class CallerConnection(ReplyReader):
    """Call one peer.

    A thread of the cache connects, after ``open`` or the first call; calls are sent once it has.

    Args:
        peer (Member): the callee.
        owner (ConnectionOwner): the transport.
        threads (ThreadCache): for connecting, reading, and sending what would block.
        watchdog (ReaderWatchdog): releases readers that stay in one callback.
        memory (ReceivedMemory | None): for large buffers that arrive by TCP; None: its own.
        connected (socket | None): an authenticated connection; None: one is made.
        is_bulk (bool): the connection is for large messages.
        pair (int): number of the pair of connections that it belongs to.
        traffic (Traffic | None): counts the bytes that are sent; None: they are not counted.
    """

    def __init__(
        self,
        peer: Member,
        owner: ConnectionOwner[CallerConnection],
        threads: ThreadCache,
        watchdog: ReaderWatchdog,
        memory: ReceivedMemory | None = None,
        connected: socket.socket | None = None,
        is_bulk: bool = False,
        pair: int = 0,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(threads, watchdog)
        self.peer = peer
        self.is_bulk = is_bulk
        self.pair = pair
        #: the connection for large messages beside this one; the owner makes it
        self.bulk: CallerConnection | None = None
        #: when the owner stops trying to make ``bulk``; None: no try has failed
        self.bulk_deadline: Deadline | None = None
        #: id of the peer's process, if it is on this node; known once connected
        self.peer_pid: int | None = None
        self._owner = owner
        self._memory = memory
        self._traffic = traffic
        # Calls are added under the lock, unless BROKEN.  Readers remove a call without the lock,
        # as ``dict.pop`` is atomic, after setting its reply, which ``fail`` cannot replace.
        self._calls: dict[int, ConnectionCall] = {}
        self._early: dict[int, Message] = {}  # replies that are not expected yet
        self._is_ending = False  # the owner has caused the end, or is notified of it
        self._is_taken = False  # the owner has taken the calls that had no reply
        self._connected = connected
        self._is_opening = False

    def open(self) -> None:
        """Connect, in a thread of the cache; may be called again.

        The constructor does not connect: if an interrupt kept the owner from storing the
        connection, replies would arrive on it that no call expects.
        """
        if not self._is_opening:
            self._threads.submit(self._connect)

    # -- calling ------------------------------------------------------------------------------

    def call(self, frame: Frame) -> ConnectionCall | None:
        """Send a request; return None if the connection is broken."""
        frame.pending = call = ConnectionCall(self, frame.call_id, frame, self._lock)
        if self._stream is None:  # the frame is sent later
            frame.keep_buffers()
        try:
            with self._lock:
                if self.schedule.state == BROKEN:
                    return None
                self._calls[call.id] = call
                stream = self._stream
                call.is_sending = stream is not None
            if stream is None:
                self.open()
            else:
                burst = self.schedule.callbacks >= BURST
                if stream.send(call.id, frame, burst):
                    call.frame = None
                else:
                    call.kept()
                    if burst:
                        stream.flush_later()
        except BaseException:  # an interrupt: nothing waits for the reply
            call.frame = None
            self.repair()  # this thread may not have notified the owner of the end
            raise
        return call

    def expect(self, call_id: int) -> ConnectionCall | None:
        """Expect the reply to a request of another connection; return None if this one has ended.

        If this connection could not be made, its owner makes another one, and takes the calls.
        """
        call = ConnectionCall(self, call_id, None, self._lock)
        with self._lock:
            early = self._early.pop(call_id, None)
            if early is None:
                if self._is_taken or (self.is_broken and self._stream is not None):
                    return None
                self._calls[call_id] = call
        if early is not None:
            call.set(early)
        elif self._stream is None and not self.is_broken:
            self.open()
        return call

    @property
    def is_broken(self) -> bool:
        """Tell whether the connection has ended, or could not be made."""
        return self.schedule.state == BROKEN

    @property
    def may_be_replaced(self) -> bool:
        """Tell whether the connection could not be made, so that nothing was sent on it."""
        return self._stream is None and self.is_broken

    @property
    def connected_socket(self) -> socket.socket | None:
        """The socket; None: it is not connected yet."""
        return None if self._stream is None else self._stream.socket

    @property
    def tcp(self) -> socket.socket | None:
        """The socket, if there is a TCP connection now."""
        return None if self._stream is None or self.is_broken else self._stream.tcp

    def break_off(self, reason: str) -> None:
        """End the connection; its calls wait for ``fail``."""
        self._break_off(reason)
        if self._stream is not None:
            self._stream.shut_down()

    def fail(self, error: BaseException) -> None:
        """End the connection and its calls."""
        calls = self.take_calls()
        if self._stream is not None:
            self._stream.close()
        for call in calls:
            call.set(Error(error))

    def take_calls(self) -> list[ConnectionCall]:
        """End the connection, and return the calls that have no reply."""
        with self._lock:
            self._is_ending = self._is_taken = True
            self.schedule.break_off()
            calls = list(self._calls.values())
            self._calls.clear()
            self._early.clear()
        return calls

    def end(self, error: BaseException, timeout: float) -> None:
        """Complete the calls whose replies have arrived, and fail the others.

        Args:
            error: the error of the calls that fail.
            timeout: how long a reader may take to complete calls, in seconds.
        """
        with self._lock:
            self._is_ending = True
        stream = self._stream
        try:
            if stream is not None:
                stream.stop_receiving()
                deadline = Deadline(timeout)
                while self.schedule.state != BROKEN and not deadline.expired:
                    if not self._read_if_idle(stream):
                        time.sleep(READ_POLL_SECONDS)
        finally:
            self.fail(error)

    def trim(self) -> None:
        """Free memory that was not used for a while, and read the peer's notices about segments."""
        stream = self._stream
        if stream is None or self.schedule.state == BROKEN:
            return
        stream.trim()
        self._read_if_idle(stream)

    def close_after_fork(self) -> None:
        """Close the descriptors that a forked child inherited."""
        if self._stream is not None:
            self._stream.close_after_fork()

    def _connect(self) -> None:
        with self._lock:
            if self._is_opening:
                return
            self._is_opening = True
        connection = self._connected
        try:
            if connection is None:
                connection = self._owner.connect(self.peer, self.is_bulk, self.pair)
            self.peer_pid = pid_of_peer(connection)
            on_broken = functools.partial(self._break_off, "its connection was cut")
            stream = Stream(connection, self._threads, on_broken, True, self._memory, self._traffic)
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
            if (frame := call.frame) is not None and stream.send(call.id, frame):
                call.frame = None
        self._release_reader()

    # -- replies ------------------------------------------------------------------------------

    def _complete(self, message: Message, is_handled: bool = False) -> None:
        number = message.number
        call = self._calls.get(number)
        stream = self._stream
        assert stream
        if not is_handled and (message.content is None or self.is_bulk):
            stream.handle_once()
        if call is None and self.is_bulk:
            with self._lock:
                call = self._calls.get(number)
                if call is None:
                    self._early[number] = message
        if call is None:
            if not is_handled:
                stream.handled()
            return
        reply: Reply = message
        content = message.content
        if content is None:
            reply = self._owner.expect_large(self, number)
        elif content.kind is Kind.ELSEWHERE:
            reply = self._owner.expect_reply(number, self.peer)
        try:
            if not is_handled:
                stream.handled()  # from now on the reply is not lost
            call.set(reply)
        except BaseException:  # an interrupt
            if not is_handled:
                stream.handled()
            self._threads.submit(functools.partial(call.set_again, reply))
            raise
        finally:
            self._calls.pop(number, None)

    # -- the end ------------------------------------------------------------------------------

    def _break_off(self, reason: str, unsent: Iterable[int] = ()) -> None:
        try:
            with self._lock:
                self.schedule.break_off()
        finally:  # in another thread: an interrupt of this one would lose calls
            self._threads.submit(functools.partial(self._on_broken, reason, list(unsent)))

    def _on_broken(self, reason: str, unsent: list[int]) -> None:
        """Notify the owner, once, and reroute the calls of which no byte was sent."""
        with self._lock:
            is_loss = not self._is_ending
            self._is_ending = True
            ready = take_unsent(self._calls, unsent, reason)
        if is_loss:
            self._owner.on_connection_lost(self, reason)
        for call in ready:
            self.reroute(call, reason)

    def reroute(self, call: ConnectionCall, reason: str) -> None:
        """Send a call by another transport, unless an interrupt has ended it."""
        frame = call.frame
        if frame is not None:
            call.set(self._owner.reroute(self.peer, frame, reason))
