"""The callee's end of one connection: read requests, serve them, send the replies.

The thread that reads a connection also serves the request inline.  Before the function blocks, or
when it runs for long, another thread takes over reading (``_concurrency.reader``).  So short calls
need no hand-over, and no call waits for another one's function.

A connection that has been idle for a while is not read until something arrives; one thread waits
for all of these.

    READING ── no request for a while ──> IDLE ── bytes arrive ──> READING
    READING ── the thread is released: another one reads ──> READING
    any ── close, the end of the peer, an error ──> CLOSED

A peer that does not read its replies gets no more of them than fit into ``MAX_UNREAD_BYTES``: its
further requests are not read, and those that wait for a thread do not begin.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import select
import socket
import threading
from collections.abc import Callable

from rayrpc._concurrency.reader import RELEASED, ReaderRole, ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.messages import Frame, Kind, size_of
from rayrpc._protocol.transport import Deferred, Serve, served
from rayrpc._transports.direct.bulk_replies import BULK_BYTES, BulkReplies, Pair
from rayrpc._transports.direct.idle_connections import IdleConnections
from rayrpc._transports.direct.stream import UNREAD_SECONDS, Stream
from rayrpc._transports.serving import ServingThreads
from rayrpc.errors import CallError

__all__ = ["SendReply", "ServerConnection", "send_nowhere"]

logger = logging.getLogger(__name__)


# If a request arrives during a call, others are expected during this many calls after it.
CROWDED_CALLS = 64

SendReply = Callable[[Frame, Frame], None]


def send_nowhere(request: Frame, reply: Frame) -> None:
    """Refuse a reply that no connection can carry."""
    raise CallError("its result has ObjectRefs, which only Ray can send")


class ServerConnection:
    """Serve one peer's calls.

    Args:
        connection (socket): authenticated and prepared.
        pair (Pair): token of the peer's membership, and the number of its pair of connections.
        stream (Stream): reads and writes the connection.
        serve (Serve): answers frames.
        bulk (BulkReplies | None): sends large replies; None: they go by this connection.
        idle (IdleConnections): keeps the connection while it is idle.
        threads (ThreadCache): runs the readers.
        watchdog (ReaderWatchdog): releases readers that stay in one call.
        send_elsewhere (Callable): sends a reply that no connection can carry.
        on_end (Callable): called with this object when the connection has ended.
    """

    def __init__(
        self,
        connection: socket.socket,
        pair: Pair,
        stream: Stream,
        serve: Serve,
        bulk: BulkReplies | None,
        idle: IdleConnections,
        threads: ThreadCache,
        watchdog: ReaderWatchdog,
        send_elsewhere: SendReply = send_nowhere,
        on_end: Callable[[ServerConnection], object] = lambda _: None,
    ) -> None:
        self.socket = connection
        self.pair = pair
        self.peer = pair[0]
        self._serve = serve
        self._bulk = bulk
        self._idle = idle
        self._threads = threads
        self._watchdog = watchdog
        self._elsewhere = send_elsewhere
        self._on_end = on_end
        self._stream = stream
        self._serving = ServingThreads()
        self._closed = False
        self._crowded = 0

    def start(self) -> None:
        """Start a thread that reads the connection.

        Raises:
            RuntimeError: no thread starts; the connection is closed.
        """
        try:
            self._threads.submit(self._read)
        except BaseException:
            self._end()
            raise

    @property
    def is_busy(self) -> bool:
        """Tell whether other threads serve calls, or replies are not written yet."""
        if self._closed:  # no reply can be sent
            return False
        return self._serving.has_others() or not self._stream.is_idle

    @property
    def tcp(self) -> socket.socket | None:
        """The socket, if there is a TCP connection now."""
        return None if self._closed else self._stream.tcp

    @property
    def is_closed(self) -> bool:
        """Tell whether the connection has ended."""
        return self._closed

    def wait_until_read(self) -> bool:
        """Wait a while until the peer has read most of its replies; return False if it has not."""
        if self._closed or not self._stream.has_unread:
            return True
        return self._stream.wait_until_read(UNREAD_SECONDS)

    def wait_for_hang_up(self, seconds: float) -> bool:
        """Wait a while until the peer closes the connection; return False if it does not."""
        poll = select.poll()
        try:
            poll.register(self.socket, getattr(select, "POLLRDHUP", 0))
            return bool(poll.poll(1000 * seconds))
        except (OSError, ValueError):  # closed here
            return True

    def hold(self, task: Callable[[], object]) -> bool:
        """Keep a task until the peer has read most of its replies; return False if it has."""
        return not self._closed and self._stream.hold(task)

    def send_large(self, call_id: int, reply: Frame) -> None:
        """Send the reply to a request that arrived on another connection of the peer."""
        self._stream.send(call_id, reply, release_buffers=True)

    def break_off(self, reason: str) -> None:
        """Close the connection, whose host is silent."""
        logger.info("closed a connection of a peer: %s", reason)
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close_after_fork(self) -> None:
        """Close the descriptors that a forked child inherited."""
        self._stream.close_after_fork()

    def trim(self) -> None:
        """Free memory that was not used for a while."""
        self._stream.trim()

    def _read(self) -> None:
        """Read requests and serve them, until this thread is released or the connection ends."""
        while self._read_until_idle():
            if self._idle.add(self):
                return

    def _read_until_idle(self) -> bool:
        """Read requests and serve them; return True if the connection has become idle."""
        with ReaderRole(self._hand_over, self._watchdog) as role:
            try:
                if self._serve_requests(role):
                    return True
            except EOFError:
                pass
            except BaseException:
                logger.exception("a connection could not be read; it is closed")
                self.close()  # the caller fails its calls under way
            if role.state == RELEASED:
                return False
        self._end()
        return False

    def _end(self) -> None:
        self._closed = True
        self._stream.close()
        self._on_end(self)

    def _serve_requests(self, role: ReaderRole) -> bool:
        """Serve requests until this thread is released; return True once none comes."""
        me = threading.get_ident()
        while not self._closed:
            if self._bulk is not None and not self._bulk.wait_until_read(self):
                continue
            try:
                message = self._stream.read()
            except TimeoutError:
                if self._stream.is_between_messages:
                    return True
                continue
            frame = message.frame()
            self._stream.handled()
            del message  # the request's buffers live no longer than its call
            self._serving.add(me)
            role.message_received()
            try:
                self._answer(frame, role)
            finally:
                self._serving.discard(me)
            del frame  # so that it is freed while this thread waits for the next
            if not role.message_done():
                self._stream.flush()
                return False
        return False

    def _hand_over(self) -> None:
        self._stream.flush()
        self._threads.submit(self._read)

    def _answer(self, frame: Frame, role: ReaderRole) -> None:
        role.one_at_a_time = self._crowded <= 0
        reply = served(self._serve, frame)
        if role.kept and role.look_ahead(self._has_arrived):
            self._crowded = CROWDED_CALLS
        elif self._crowded > 0:
            self._crowded -= 1
        if isinstance(reply, Deferred):
            reply.hold = self._hold
            reply.on_done(lambda late: self._send(frame, late, False))
        else:
            self._send(frame, reply, role.state != RELEASED and self._stream.has_more)

    def _hold(self, task: Callable[[], object]) -> bool:
        """Keep a task until the peer has read most of its replies; return False if it has."""
        if self._stream.hold(task):
            return True
        return self._bulk is not None and self._bulk.hold(self.pair, task)

    def _has_arrived(self) -> bool:
        """Tell whether another message has arrived; only the reader may call it."""
        return self._stream.wait(0)

    def _send(self, frame: Frame, reply: Frame, more: bool) -> None:
        if reply.objects is not None:
            reply.keep_buffers()  # it is sent later
            self._serving.add(~frame.call_id)  # a number that is no thread's ident
            self._threads.submit(functools.partial(self._send_elsewhere, frame, reply))
            return
        try:
            if self._bulk is not None and reply.buffers and size_of(reply) > BULK_BYTES:
                self._stream.send(frame.call_id, None)  # announces the reply
                self._bulk.send(self, frame.call_id, reply)
            else:
                self._stream.send(frame.call_id, reply, more, release_buffers=True)
        except Exception:
            logger.exception("a reply could not be sent; its connection is closed")
            self.close()  # the caller fails its calls under way

    def _send_elsewhere(self, frame: Frame, reply: Frame) -> None:
        """Send a reply by another transport, and announce it here."""

        def send(frame: Frame, may_block: bool = True) -> Frame | Deferred:
            self._elsewhere(frame, reply)
            return Frame(Kind.ELSEWHERE, reply.session, reply.src, reply.call_id)

        try:
            announced = served(send, frame)
            assert isinstance(announced, Frame)
            self._send(frame, announced, False)
        finally:
            self._serving.discard(~frame.call_id)
