"""The callee's end of connections: listen, accept members, serve their calls.

The thread that reads a connection also serves the request inline.  Before the function blocks, or
when it runs for long, another thread takes over reading (``_concurrency.reader``).  So short calls
need no hand-over, and no call waits for another one's function.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.reader import RELEASED, ReaderRole, ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Deferred, Serve, served
from rayrpc._transports.direct.acceptor import Acceptor
from rayrpc._transports.direct.auth import ServerHandshake
from rayrpc._transports.direct.stream import Stream
from rayrpc._transports.direct.wire import prepare

__all__ = ["DirectServer"]

logger = logging.getLogger(__name__)

# How long a read waits; nothing depends on it, because closing a connection ends its reads.
IDLE_SECONDS = 60.0

# After a request arrived during a short call, others are expected during so many calls.
CROWDED_CALLS = 64

# Takes a request and its reply; returns True if it sends the reply by another transport.
SendElsewhere = Callable[[Frame, Frame], bool]


class DirectServer:
    """Accept connections of members of the group.

    Args:
        token (str): of this worker's membership.
        host (str): address of this node, to listen at for other nodes; empty: for none.
        threads (ThreadCache): runs the connections.
        watchdog (ReaderWatchdog): releases readers that stay in one call.
    """

    def __init__(
        self, token: str, host: str, threads: ThreadCache, watchdog: ReaderWatchdog
    ) -> None:
        self._token = token
        self._threads = threads
        self._watchdog = watchdog
        self._secret = b""
        self._serve: Serve | None = None
        self._send_elsewhere: SendElsewhere = lambda request, reply: False
        self._listeners: list[socket.socket] = []
        self._connections: weakref.WeakSet[ServerConnection] = weakref.WeakSet()
        self._acceptor: Acceptor | None = None
        #: name of the UNIX socket (in Linux's abstract namespace), empty if there is none
        self.unix = ""
        #: port on ``host``, 0 if there is none
        self.port = 0
        if hasattr(socket, "AF_UNIX") and _has_abstract_names():
            self.unix = f"rayrpc-{token}"
            self._listen(socket.AF_UNIX, "\0" + self.unix)
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.port = self._listen(family, (host, 0)).getsockname()[1]

    def _listen(self, family: int, address: object) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        self._listeners.append(listener)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(1024)
        listener.setblocking(False)
        return listener

    def start(self, secret: bytes, serve: Serve, send_elsewhere: SendElsewhere) -> None:
        """Accept peers that know the secret, and serve their calls."""
        self._secret = secret
        self._serve = serve
        self._send_elsewhere = send_elsewhere
        self._acceptor = Acceptor(
            self._listeners, lambda: ServerHandshake(self._secret, self._token), self._add
        )

    def close(self, timeout: float) -> None:
        """Stop accepting and serving.

        Args:
            timeout: how long to wait until the calls under way are replied to, in seconds.
        """
        self._close_listeners(Acceptor.close)
        deadline = Deadline(timeout)
        connections = list(self._connections)
        while any(c.is_busy for c in connections) and not deadline.expired:
            time.sleep(0.002)
        for connection in connections:
            connection.close()

    def trim(self) -> None:
        """Free memory that was not used for a while."""
        for connection in list(self._connections):
            connection.trim()

    def close_after_fork(self) -> None:
        """Close the descriptors that a forked child inherited: else peers see no end of them."""
        for connection in list(self._connections):
            connection.close_after_fork()
        self._close_listeners(Acceptor.close_after_fork)

    def _close_listeners(self, close_acceptor: Callable[[Acceptor], None]) -> None:
        if self._acceptor is not None:
            close_acceptor(self._acceptor)
        for listener in self._listeners:
            listener.close()

    def _add(self, connection: socket.socket) -> None:
        assert self._serve is not None
        prepare(connection, IDLE_SECONDS)
        self._connections.add(
            ServerConnection(
                connection, self._serve, self._send_elsewhere, self._threads, self._watchdog
            )
        )


def _has_abstract_names() -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.bind("")  # Linux picks an abstract name
        except OSError:
            return False
        return bool(probe.getsockname())


class ServerConnection:
    """Serve one peer's calls.

    Args:
        connection (socket): authenticated and prepared.
        serve (Serve): answers frames.
        send_elsewhere (SendElsewhere): takes replies that are too large for a connection.
        threads (ThreadCache): runs the readers.
        watchdog (ReaderWatchdog): releases readers that stay in one call.
    """

    def __init__(
        self,
        connection: socket.socket,
        serve: Serve,
        send_elsewhere: SendElsewhere,
        threads: ThreadCache,
        watchdog: ReaderWatchdog,
    ) -> None:
        self.socket = connection
        self._serve = serve
        self._send_elsewhere = send_elsewhere
        self._threads = threads
        self._watchdog = watchdog
        self._stream = Stream(connection, threads, lambda unsent: None, opened_here=False)
        self._serving: set[int] = set()  # idents of threads that serve a call
        self._closed = False
        self._crowded = 0
        threads.submit(self._read)

    @property
    def is_busy(self) -> bool:
        """Tell whether other threads serve calls, or replies are not written yet."""
        others = self._serving - {threading.get_ident()}
        return bool(others) or not self._stream.is_idle

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
        """Read requests and serve them, until this thread is released."""
        me = threading.get_ident()
        with ReaderRole(self._hand_over, self._watchdog) as role:
            while not self._closed:
                try:
                    message = self._stream.read()
                except TimeoutError:
                    continue
                except EOFError:
                    break
                frame = message.frame()
                del message  # the request's buffers live no longer than its call
                self._serving.add(me)
                role.message_received()
                try:
                    self._answer(frame, role)
                finally:
                    self._serving.discard(me)
                if not role.message_done():
                    self._stream.flush()
                    return
        self._closed = True
        self._stream.close()

    def _hand_over(self) -> None:
        self._stream.flush()
        self._threads.submit(self._read)

    def _answer(self, frame: Frame, role: ReaderRole) -> None:
        role.one_at_a_time = self._crowded == 0
        reply = served(self._serve, frame)
        if role.kept and role.state != RELEASED and self._stream.wait(0):
            self._crowded = CROWDED_CALLS
        elif self._crowded:
            self._crowded -= 1
        if isinstance(reply, Deferred):
            reply.on_done(lambda late: self._send(frame, late, False))
        else:
            self._send(frame, reply, role.state != RELEASED and self._stream.has_more)

    def _send(self, frame: Frame, reply: Frame, more: bool) -> None:
        try:
            if not self._stream.shares_memory and self._send_elsewhere(frame, reply):
                self._stream.send(frame.call_id, None, more)
            else:
                self._stream.send(frame.call_id, reply, more, release_buffers=True)
        except Exception:
            logger.exception("a reply could not be sent; its connection is closed")
            self.close()  # it fails the calls under way at the caller
