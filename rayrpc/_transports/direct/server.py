"""The callee's end of connections: listen, and accept members.

Peers of other nodes have a second connection for large requests and their replies.  A large reply
to a small request is announced on the request's connection, and sent on the second one.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Callable

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.reader import ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.transport import Serve
from rayrpc._transports.direct.acceptor import Acceptor
from rayrpc._transports.direct.auth import ServerHandshake
from rayrpc._transports.direct.bulk_replies import BulkReplies
from rayrpc._transports.direct.idle_connections import IdleConnections
from rayrpc._transports.direct.listening import listen_at
from rayrpc._transports.direct.received_memory import ReceivedMemory
from rayrpc._transports.direct.server_connection import (
    SendReply,
    ServerConnection,
    send_nowhere,
)
from rayrpc._transports.direct.stream import Stream
from rayrpc._transports.direct.tls import Tls
from rayrpc._transports.direct.traffic import Traffic
from rayrpc._transports.direct.wire import prepare

__all__ = ["DirectServer"]

# How long a thread waits for the next message of a connection.
IDLE_SECONDS = 2.0


class DirectServer:
    """Accept connections of members of the group.

    Args:
        token (str): token of this worker's membership.
        listener (socket | None): listens for workers of other nodes; closed with the server.
        threads (ThreadCache): runs the connections.
        watchdog (ReaderWatchdog): releases readers that stay in one call.
        tls (Tls | None): encrypts connections of other nodes.
        memory (ReceivedMemory | None): for large buffers that arrive by TCP; None: one each.
        traffic (Traffic | None): counts the bytes that are sent; None: they are not counted.
    """

    def __init__(
        self,
        token: str,
        listener: socket.socket | None,
        threads: ThreadCache,
        watchdog: ReaderWatchdog,
        tls: Tls | None = None,
        memory: ReceivedMemory | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self._token = token
        self._memory = memory
        self._traffic = traffic
        self._threads = threads
        self._watchdog = watchdog
        self._tls = tls
        self._secret = b""
        self._serve: Serve | None = None
        self._bulk = BulkReplies()
        self._idle = IdleConnections()
        self._on_connected: Callable[[socket.socket], None] = lambda connection: None
        self._send_elsewhere: SendReply = send_nowhere
        self._expelled: set[str] = set()  # tokens of members that the group declared lost
        #: sockets that listen for peers
        self.listeners: list[socket.socket] = []
        self._connections: weakref.WeakSet[ServerConnection] = weakref.WeakSet()
        self._acceptor: Acceptor | None = None
        #: name of the UNIX socket (in Linux's abstract namespace), empty if there is none
        self.unix = ""
        #: port of the listener, 0 if there is none
        self.port = 0
        if hasattr(socket, "AF_UNIX") and _has_abstract_names():
            self.unix = f"rayrpc-{token}"
            self.listeners.append(listen_at(socket.AF_UNIX, "\0" + self.unix))
        if listener is not None:
            self.listeners.append(listener)
            self.port = listener.getsockname()[1]

    def start(
        self,
        secret: bytes,
        serve: Serve,
        on_connected: Callable[[socket.socket], None],
        send_elsewhere: SendReply = send_nowhere,
    ) -> None:
        """Accept peers that know the secret, and serve their calls.

        Args:
            secret: the group's secret.
            serve: answers frames.
            on_connected: called with each authenticated connection.
            send_elsewhere: sends a reply that no connection can carry.
        """
        self._secret = secret
        self._serve = serve
        self._on_connected = on_connected
        self._send_elsewhere = send_elsewhere
        self._acceptor = Acceptor(
            self.listeners,
            lambda: ServerHandshake(self._secret, self._token, self._expelled.__contains__),
            self._add,
            self._encrypt,
        )

    @property
    def connections(self) -> list[ServerConnection]:
        """The connections of peers."""
        return list(self._connections)

    def expel(self, token: str) -> None:
        """Close a peer's connections, and refuse new ones from it."""
        self._expelled.add(token)
        for connection in self.connections:
            if connection.peer == token:
                connection.close()

    def flush_replies(self, timeout: float) -> None:
        """Wait until replies to the calls that other threads serve are written.

        Args:
            timeout: how long to wait at most, in seconds.
        """
        deadline = Deadline(timeout)
        while self._is_busy() and not deadline.expired:
            time.sleep(0.002)

    def _is_busy(self) -> bool:
        return not self._bulk.is_empty or any(c.is_busy for c in list(self._connections))

    def close(self) -> None:
        """Stop accepting and serving."""
        self._close_listeners(Acceptor.close)
        for connection in list(self._connections):
            connection.close()
        self._idle.close()

    def trim(self) -> None:
        """Free memory that was not used for a while."""
        for connection in list(self._connections):
            connection.trim()

    def close_after_fork(self) -> None:
        """Close the descriptors that a forked child inherited: else connections stay open."""
        for connection in list(self._connections):
            connection.close_after_fork()
        self._idle.close_after_fork()
        self._close_listeners(Acceptor.close_after_fork)

    def _close_listeners(self, close_acceptor: Callable[[Acceptor], None]) -> None:
        if self._acceptor is not None:
            close_acceptor(self._acceptor)
        for listener in self.listeners:
            listener.close()

    def _encrypt(self, connection: socket.socket) -> socket.socket:
        if self._tls is None or connection.family == getattr(socket, "AF_UNIX", None):
            return connection
        return self._tls.of_server(connection)

    def _add(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        assert self._serve is not None
        prepare(connection, IDLE_SECONDS)
        self._on_connected(connection)
        peer, pair = handshake.peer, (handshake.peer, handshake.pair)
        stream = Stream(
            connection, self._threads, lambda unsent: None, False, self._memory, self._traffic
        )
        bulk = None if handshake.is_bulk or stream.shares_memory else self._bulk
        on_end = self._bulk.remove if handshake.is_bulk else self._bulk.forget
        served = ServerConnection(
            connection,
            pair,
            stream,
            self._serve,
            bulk,
            self._idle,
            self._threads,
            self._watchdog,
            self._send_elsewhere,
            on_end,
        )
        self._connections.add(served)
        if handshake.is_bulk:
            self._bulk.add(served)
        served.start()  # last: a call that it serves may look for the connection
        if peer in self._expelled:  # the peer was expelled meanwhile
            self.expel(peer)


def _has_abstract_names() -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.bind("")  # Linux picks an abstract name
        except OSError:
            return False
        return bool(probe.getsockname())
