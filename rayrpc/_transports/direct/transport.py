"""The direct transport: frames on connections between the workers, with a fallback transport.

    call ─┬─ connection ────────────> the peer's DirectServer
          └─ the fallback's call ───> the peer's fallback transport

Calls to a peer on this node go by its UNIX socket, with large buffers in shared memory.  To a peer
on another node there are two connections, the second for large messages.  Calls to a peer to which
no connection can be made go by the fallback, which is any other ``Transport``.  So do frames with
references to objects of the cluster's store, which only Ray can send.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.outcome import Error
from rayrpc._concurrency.reader import ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._concurrency.waiting import Event
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, size_of
from rayrpc._protocol.transport import Pending, Serve, Transport
from rayrpc._transports.direct import after_fork
from rayrpc._transports.direct.address import DirectAddress, for_fallback
from rayrpc._transports.direct.auth import AuthenticationError, ClientHandshake
from rayrpc._transports.direct.bulk_replies import BULK_BYTES, OPEN_SECONDS
from rayrpc._transports.direct.connection import CallerConnection
from rayrpc._transports.direct.dialing import dial
from rayrpc._transports.direct.listening import Listening
from rayrpc._transports.direct.received_memory import ReceivedMemory
from rayrpc._transports.direct.route import Route
from rayrpc._transports.direct.server import DirectServer
from rayrpc._transports.direct.silence import SilenceWatch
from rayrpc._transports.direct.tls import Tls
from rayrpc._transports.direct.traffic import Traffic
from rayrpc._transports.direct.unconnected_calls import UnconnectedCalls, cut_error
from rayrpc.errors import CallError

__all__ = ["DirectTransport"]

logger = logging.getLogger(__name__)

# Pauses before a broken connection is made again: the first one, and the longest.
REOPEN_SECONDS = 1.0
MAX_REOPEN_SECONDS = 30.0
# How long replies that have arrived may take to be read after the loss of their sender.
READ_SECONDS = 1.0


class DirectTransport(Transport):
    """Call peers on connections, and by another transport where that is impossible or slower.

    Args:
        fallback (Transport): the other transport.
        token (str): token of this worker's membership.
        only (bool): calls fail where a connection is impossible.
        tls (Tls | None): encrypts connections to other nodes.
        near_only (bool): connect only to peers on this node: what crosses the network must be
            encrypted, which the fallback does.
        listening (Listening): where to listen for peers on other nodes.
        worker (str): name of this worker, for messages.
        peer_timeout (float): after so many seconds of silence a host's connections are closed.
    """

    name = "direct"

    def __init__(
        self,
        fallback: Transport,
        token: str,
        only: bool = False,
        tls: Tls | None = None,
        near_only: bool = False,
        listening: Listening | None = None,
        worker: str = "this worker",
        peer_timeout: float = 10.0,
    ) -> None:
        self._fallback = fallback
        self._token = token
        self._tls = tls
        self._near_only = near_only
        self._node_id = fallback.node_id
        # the soft limit has no effect: most of the cache's threads wait for a message
        self._threads = ThreadCache("rayrpc-connection", soft_limit=10_000)
        self._unconnected = UnconnectedCalls(fallback, self._threads, only)
        self._watchdog = ReaderWatchdog(lambda: self._threads.submit(self._trim))
        listener, self._host = None, fallback.node
        if not near_only:
            listener, self._host = (listening or Listening()).open(worker, fallback.node)
        self._memory, self._traffic = ReceivedMemory(), Traffic()
        self._server = DirectServer(
            token, listener, self._threads, self._watchdog, tls, self._memory, self._traffic
        )
        self._silence = SilenceWatch(
            peer_timeout, lambda: [*self.connections(), *self._server.connections]
        )
        self._secret = b""
        self._routes: dict[str, Route] = {}  # by the peer's token
        self._pairs = itertools.count(1)  # numbers of pairs of connections
        self._lock = threading.Lock()
        self._closing = Event()
        after_fork.register(self)

    @property
    def address(self) -> DirectAddress:
        server = self._server
        return DirectAddress(
            self._fallback.address, self._node_id, server.unix, self._host, server.port
        )

    @property
    def node(self) -> str:
        return self._fallback.node

    @property
    def node_id(self) -> str:
        return self._node_id

    @property
    def is_hosted(self) -> bool:
        return self._fallback.is_hosted

    def start(
        self, serve: Serve, find: Callable[[int], Member | None], secret: bytes = b""
    ) -> None:
        self._secret = secret
        self._threads.start()
        self._watchdog.start()
        self._unconnected.start(serve, find, secret)
        self._server.start(secret, serve, self._silence.add, self._fallback.send_reply)

    def call(self, peer: Member, frame: Frame) -> Pending:
        route = self._routes.get(peer.token)
        if route is None:
            route = self._open_route(peer)
        connection = route.connection
        if connection is not None and frame.objects is None:
            if frame.buffers and not route.is_near and size_of(frame) > BULK_BYTES:
                connection = self._bulk_of(connection) or connection
            call = connection.call(frame)
            if call is not None:
                return call
        return self._unconnected.call(route.peer, frame, route.reason)

    def on_interrupted_call(self) -> None:
        self._watchdog.wake()  # its maintenance reads replies that no thread waits for

    def expect_reply(self, call_id: int, peer: Member) -> Pending:
        return self._fallback.expect_reply(call_id, for_fallback(peer))

    def send_reply(self, request: Frame, reply: Frame) -> None:
        self._fallback.send_reply(request, reply)

    def on_peer_lost(self, peer: Member, error: BaseException) -> None:
        with self._lock:
            route = self._routes.pop(peer.token, None)
        if route is not None and route.connection is not None:
            _end(route.connection, error)
        self._server.expel(peer.token)
        self._fallback.on_peer_lost(for_fallback(peer), error)

    def kill(self, peer: Member) -> None:
        self._fallback.kill(for_fallback(peer))

    def sent_bytes(self) -> dict[str, int]:
        return {**self._traffic.total(), **self._fallback.sent_bytes()}

    def flush_replies(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        self._server.flush_replies(timeout)
        self._fallback.flush_replies(deadline.within(timeout))

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        after_fork.unregister(self)
        self._silence.close()
        self._server.close()
        with self._lock:
            connections = self.connections()
            self._routes.clear()
        for connection in connections:
            connection.fail(CallError("RPC was shut down on this worker"))
        self._fallback.close()
        self._watchdog.close()
        self._threads.close()

    # -- routes -------------------------------------------------------------------------------

    def routes(self) -> dict[str, Route]:
        """Return the routes to the peers that were called, by the peer's token."""
        return dict(self._routes)

    def _open_route(self, peer: Member) -> Route:
        with self._lock:
            route = self._routes.get(peer.token)
            if route is None:
                route = self._routes[peer.token] = self._new_route(peer)
                if route.connection is not None:
                    self._watchdog.wake()  # its maintenance frees the connection's unused memory
                    route.connection.open()
            return route

    def _new_route(self, peer: Member) -> Route:
        to = peer.address
        if not isinstance(to, DirectAddress):
            reason = "it accepts no connections: its setting transport is not direct or auto"
            self._log_fallback(peer, reason)
            return Route(peer, None, False, reason)
        is_near = self._is_near(to)
        reason = "" if is_near else self._why_out_of_reach(to)
        if reason:
            self._log_fallback(peer, reason)
            return Route(for_fallback(peer), None, False, reason)
        connection = self._new_connection(peer, next(self._pairs), None)
        return Route(for_fallback(peer), connection, is_near)

    def _new_connection(
        self, peer: Member, pair: int, connected: socket.socket | None, is_bulk: bool = False
    ) -> CallerConnection:
        shared = self._threads, self._watchdog, self._memory
        return CallerConnection(peer, self, *shared, connected, is_bulk, pair, self._traffic)

    def _bulk_of(self, connection: CallerConnection) -> CallerConnection | None:
        """Return the connection for large messages beside another; None if that other is broken."""
        with self._lock:
            if connection.is_broken:
                return None
            bulk = connection.bulk
            if bulk is None or bulk.may_be_replaced:
                bulk = self._new_connection(connection.peer, connection.pair, None, True)
                connection.bulk = bulk
                bulk.open()
            return bulk

    def _why_out_of_reach(self, to: DirectAddress) -> str:
        """Return why no connection to a peer on another node can be made; empty if it can."""
        if self._near_only:
            return "RAY_USE_TLS is set, and its certificates cannot be used for connections"
        if not to.port:
            return "it listens at no port: its node's log says why"
        return ""

    def _is_near(self, to: DirectAddress) -> bool:
        """Tell whether a peer is on this node, and reached by a UNIX socket."""
        return to.node == self._node_id and bool(to.unix and self._server.unix)

    def connections(self) -> list[CallerConnection]:
        """Return the connections to peers, those for large messages included."""
        found = [c for each in list(self._routes.values()) if (c := each.connection) is not None]
        return found + [each.bulk for each in found if each.bulk is not None]

    def _trim(self) -> None:
        """Free the memory that connections have not used for a while."""
        self._server.trim()
        self._memory.trim()
        for connection in self.connections():
            connection.trim()

    def _log_fallback(self, peer: Member, reason: str) -> None:
        logger.info("calls to %s %s: %s", peer.name, self._unconnected.handling, reason)

    # -- the owner of connections (ConnectionOwner) -------------------------------------------

    def connect(self, peer: Member, is_bulk: bool = False, pair: int = 0) -> socket.socket:
        """Return an authenticated connection to a peer.

        Args:
            peer: to connect to.
            is_bulk: the connection is for large messages.
            pair: number of the pair of connections that it belongs to.

        Raises:
            OSError: the peer cannot be reached.
            EOFError: the peer closed the connection.
            AuthenticationError: the callee is not the peer.
        """
        to: DirectAddress = peer.address
        is_near = self._is_near(to)
        connection = dial(
            to,
            is_near,
            lambda: ClientHandshake(self._secret, self._token, peer.token, is_bulk, pair),
            self._tls,
        )
        self._silence.add(connection)
        how = "a UNIX socket" if is_near else f"TCP to {to.host}:{to.port}"
        what = "large messages" if is_bulk else "calls"
        logger.debug("connected to %s for %s by %s", peer.name, what, how)
        return connection

    def reroute(self, peer: Member, frame: Frame, reason: str) -> Pending:
        """Send by the fallback a request of which its connection sent no byte."""
        return self._unconnected.call(for_fallback(peer), frame, reason)

    def expect_large(self, connection: CallerConnection, call_id: int) -> Pending | Error:
        """Expect a large reply that a connection has announced; return an Error if it is lost."""
        bulk = connection.bulk
        while True:
            if bulk is not None and (expected := bulk.expect(call_id)) is not None:
                return expected
            before, bulk = bulk, self._bulk_of(connection)
            if bulk is None or bulk is before:
                return Error(cut_error(connection.peer, "that for large messages was cut"))

    def on_connection_lost(self, connection: CallerConnection, reason: str) -> None:
        """Use the fallback from now on; fail the calls that were sent on the connection.

        A broken connection does not imply that the peer died, so the calls first wait for a report
        of its loss.
        """
        with self._lock:
            route = self._routes.get(connection.peer.token)
            current = None if route is None else route.connection
            if route is not None and current is connection:
                route.reason = reason
        first = current if connection.is_bulk and connection.may_be_replaced else None
        if first is not None and first.pair == connection.pair:
            if first.bulk_deadline is None:
                first.bulk_deadline = Deadline(OPEN_SECONDS)
            self._threads.submit(lambda: self._replace_bulk(first, connection, reason))
            return
        self._threads.submit(lambda: self._fail_calls(connection, reason))
        if self._closing.is_set() or route is None or current is None:
            return
        if current is connection:
            self._log_fallback(connection.peer, reason)
            self._threads.submit(lambda: self._reopen(connection, route))
        elif current.bulk is connection:
            current.break_off(reason)  # the two are lost together

    def _reopen(self, broken: CallerConnection, route: Route) -> None:
        """Connect to a peer again, until this succeeds or the peer is lost."""
        pause = REOPEN_SECONDS
        while not self._closing.wait(pause):
            if self._routes.get(broken.peer.token) is not route:
                return
            pair = next(self._pairs)
            try:
                connected = self.connect(broken.peer, pair=pair)
            except (OSError, EOFError, AuthenticationError):
                pause = min(2 * pause, MAX_REOPEN_SECONDS)
                continue
            with self._lock:
                if self._routes.get(broken.peer.token) is not route or self._closing.is_set():
                    connected.close()
                else:
                    route.reason = ""
                    route.connection = self._new_connection(broken.peer, pair, connected)
                    route.connection.open()
                    logger.info("calls to %s go by a connection again", broken.peer.name)
            return

    def _replace_bulk(self, first: CallerConnection, bulk: CallerConnection, reason: str) -> None:
        """Expect large replies on a new connection, as the one for them could not be made.

        One connection is tried at a time: the peer sends replies on any that it has accepted.

        Args:
            first: the connection that announced them; while it is open, the peer keeps them.
            bulk: the one that could not be made; a large request may have replaced it meanwhile.
            reason: why it could not be made.
        """
        if first.bulk is bulk:
            late = first.bulk_deadline is not None and first.bulk_deadline.expired
            if first.is_broken or late or self._closing.wait(REOPEN_SECONDS):
                first.bulk_deadline = None
                self._fail_calls(bulk, reason)
                return
            self._bulk_of(first)
        for call in bulk.take_calls():
            call.set(self.expect_large(first, call.id))

    def _fail_calls(self, connection: CallerConnection, reason: str) -> None:
        error = self._unconnected.wait_error(connection.peer, connection.peer_pid, reason)
        connection.fail(error)
        if connection.bulk is not None:
            connection.bulk.end(error, READ_SECONDS)

    def close_after_fork(self) -> None:
        """Close the descriptors that a forked child inherited."""
        self._server.close_after_fork()
        for connection in self.connections():
            connection.close_after_fork()


def _end(connection: CallerConnection, error: BaseException) -> None:
    """End a connection, and the one for large messages, whose replies it may have announced."""
    connection.end(error, READ_SECONDS)
    if connection.bulk is not None:
        connection.bulk.end(error, READ_SECONDS)
