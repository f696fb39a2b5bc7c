"""The direct transport: frames on connections between the workers, with a fallback transport.

    call ─┬─ connection ────────────> the peer's DirectServer
          └─ the fallback's call ───> the peer's fallback transport

Calls to a peer on this node go by its UNIX socket, with large buffers in shared memory.  Frames
with large buffers to other nodes, and all calls to a peer that cannot be connected to, go by the
fallback, which is any other ``Transport``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.outcome import Error
from rayrpc._concurrency.reader import ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, flat
from rayrpc._protocol.transport import Pending, PendingReply, Serve, Transport
from rayrpc._transports.direct.address import DirectAddress
from rayrpc._transports.direct.auth import CHALLENGE_SIZE, AuthenticationError, ClientHandshake
from rayrpc._transports.direct.connection import CallerConnection
from rayrpc._transports.direct.server import DirectServer
from rayrpc._transports.direct.wire import prepare
from rayrpc.errors import CallError, CallLostError, WorkerDiedError

__all__ = ["DirectTransport"]

logger = logging.getLogger(__name__)

# How long connecting to a peer may take, and how often it is tried.
CONNECT_SECONDS = 5.0
CONNECT_TRIES = 3
# How long a call whose connection broke waits until the directory reports that the peer died.
LOSS_SECONDS = 1.0
# How long a closing worker waits until its last replies are sent.
CLOSE_SECONDS = 1.0
# Frames to other nodes with more bytes in their buffers go by the fallback: Ray copies faster.
BULK_BYTES = 1 << 20


@dataclass(slots=True)
class _Route:
    """How calls reach a peer.

        DIRECT ── the connection breaks ──> FALLBACK     a route never becomes DIRECT again
                                            FALLBACK     from the start: it accepts no connections

    Args:
        peer (Member): with its address on the fallback.
        connection (CallerConnection | None): in the state FALLBACK, broken or None.
        is_near (bool): the peer is on this node, and reached by a UNIX socket.
        reason (str): of the state FALLBACK; empty in the state DIRECT.
    """

    peer: Member
    connection: CallerConnection | None
    is_near: bool
    reason: str = ""


class DirectTransport(Transport):
    """Call peers on connections, and by another transport where that is impossible or slower.

    Args:
        fallback (Transport): the other transport.
        token (str): of this worker's membership.
        only (bool): calls fail where a connection is impossible; bulk goes by the fallback still.
    """

    name = "direct"

    def __init__(self, fallback: Transport, token: str, only: bool = False) -> None:
        self._fallback = fallback
        self._token = token
        self._only = only
        self._node_id = fallback.node_id
        # without a soft limit in effect: most of its threads wait for a message
        self._threads = ThreadCache("rayrpc-connection", soft_limit=10_000)
        self._watchdog = ReaderWatchdog(lambda: self._threads.submit(self._trim))
        self._server = DirectServer(token, fallback.node, self._threads, self._watchdog)
        self._secret = b""
        self._find: Callable[[int], Member | None] = lambda _: None
        self._routes: dict[str, _Route] = {}  # by the peer's token
        self._lock = threading.Lock()
        self._closed = False
        _close_after_fork(self)

    @property
    def address(self) -> DirectAddress:
        server = self._server
        return DirectAddress(
            self._fallback.address, self._node_id, server.unix, self.node, server.port
        )

    @property
    def node(self) -> str:
        return self._fallback.node

    @property
    def node_id(self) -> str:
        return self._node_id

    def start(
        self, serve: Serve, find: Callable[[int], Member | None], secret: bytes = b""
    ) -> None:
        self._find = find
        self._secret = secret
        self._fallback.start(serve, self._find_for_fallback, secret)
        self._server.start(secret, serve, self._send_large_reply)

    def call(self, peer: Member, frame: Frame) -> Pending:
        route = self._routes.get(peer.token)
        if route is None:
            route = self._open_route(peer)
        if route.connection is not None:
            if frame.buffers and not route.is_near and _size(frame) > BULK_BYTES:
                return self._fallback.call(route.peer, frame)
            call = route.connection.call(frame)
            if call is not None:
                return call
        return self._call_by_fallback(route.peer, frame, route.reason)

    def expect_reply(self, call_id: int, peer: Member) -> Pending:
        return self._fallback.expect_reply(call_id, _for_fallback(peer))

    def send_reply(self, request: Frame, reply: Frame) -> None:
        self._fallback.send_reply(request, reply)

    def on_peer_lost(self, peer: Member, error: BaseException) -> None:
        with self._lock:
            route = self._routes.pop(peer.token, None)
        if route is not None and route.connection is not None:
            route.connection.fail(error)
        self._fallback.on_peer_lost(_for_fallback(peer), error)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _transports.discard(self)
        self._server.close(CLOSE_SECONDS)
        with self._lock:
            connections = self._connections()
            self._routes.clear()
        for connection in connections:
            connection.fail(CallError("RPC was shut down on this worker"))
        self._fallback.close()
        self._watchdog.close()
        self._threads.close()

    # -- routes -------------------------------------------------------------------------------

    def _open_route(self, peer: Member) -> _Route:
        with self._lock:
            route = self._routes.get(peer.token)
            if route is None:
                route = self._routes[peer.token] = self._new_route(peer)
            return route

    def _new_route(self, peer: Member) -> _Route:
        to = peer.address
        if not isinstance(to, DirectAddress):
            reason = "it accepts no connections: its setting transport is not direct or auto"
            self._log_fallback(peer, reason)
            return _Route(peer, None, False, reason)
        connection = CallerConnection(peer, self, self._threads, self._watchdog)
        return _Route(_for_fallback(peer), connection, self._is_near(to))

    def _is_near(self, to: DirectAddress) -> bool:
        """Tell whether a peer is on this node, and reached by a UNIX socket."""
        return to.node == self._node_id and bool(to.unix and self._server.unix)

    def _connections(self) -> list[CallerConnection]:
        routes = list(self._routes.values())
        return [route.connection for route in routes if route.connection is not None]

    def _trim(self) -> None:
        """Free the memory that connections have not used for a while."""
        self._server.trim()
        for connection in self._connections():
            connection.trim()

    # -- the fallback -------------------------------------------------------------------------

    def _find_for_fallback(self, worker_id: int) -> Member | None:
        member = self._find(worker_id)
        return None if member is None else _for_fallback(member)

    def _call_by_fallback(self, peer: Member, frame: Frame, reason: str) -> Pending:
        if not self._only:
            return self._fallback.call(peer, frame)
        pending = PendingReply()
        self._threads.submit(lambda: self._refuse(peer, pending, reason))
        return pending

    def _refuse(self, peer: Member, pending: PendingReply, reason: str) -> None:
        error: CallError = CallError(
            f"RPC worker {peer.name!r} on node {peer.node} cannot be called directly: {reason}. "
            "The setting transport is direct; with auto, such calls go by the "
            f"{self._fallback.name} transport."
        )
        if self._wait_loss(peer):
            error = WorkerDiedError(peer.name, reason, peer.node)
        pending.complete(Error(error))

    def _wait_loss(self, peer: Member) -> bool:
        """Wait whether the directory reports the loss of a peer; return True if it does."""
        deadline = Deadline(LOSS_SECONDS)
        while not deadline.expired:
            now = self._find(peer.id)
            if now is None or now.token != peer.token:
                return True
            time.sleep(0.01)
        return False

    def _log_fallback(self, peer: Member, reason: str) -> None:
        how = "fail" if self._only else f"go by the {self._fallback.name} transport"
        logger.info("calls to %s %s: %s", peer.name, how, reason)

    # -- the owner of connections (ConnectionOwner) -------------------------------------------

    def connect(self, peer: Member) -> socket.socket:
        """Return an authenticated connection to a peer.

        Raises:
            OSError: it cannot be reached.
            EOFError: it closed the connection.
            AuthenticationError: the callee is not the peer.
        """
        deadline = Deadline(CONNECT_SECONDS)
        tries = 0
        while True:
            try:
                return self._connect_once(peer, deadline)
            except BlockingIOError:  # the listener's queue is full
                if deadline.expired:
                    raise
            except (OSError, EOFError, AuthenticationError):
                tries += 1
                if tries == CONNECT_TRIES or deadline.expired:
                    raise
            time.sleep(0.02)

    def _connect_once(self, peer: Member, deadline: Deadline) -> socket.socket:
        to: DirectAddress = peer.address
        if self._is_near(to):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            address: object = "\0" + to.unix
        else:
            family = socket.AF_INET6 if ":" in to.host else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM)
            address = (to.host, to.port)
        try:
            connection.settimeout(max(0.001, deadline.within(CONNECT_SECONDS)))
            connection.connect(address)  # type: ignore[arg-type]
            handshake = ClientHandshake(self._secret, self._token, peer.token)
            connection.sendall(handshake.hello)
            challenge = b""
            while len(challenge) < CHALLENGE_SIZE:
                data = connection.recv(CHALLENGE_SIZE - len(challenge))
                if not data:
                    raise EOFError("the peer closed the connection")
                challenge += data
            connection.sendall(handshake.receive(challenge))
            prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def reroute(self, peer: Member, frame: Frame, reason: str) -> Pending:
        """Send a request, of which its connection sent no byte, by the fallback."""
        return self._call_by_fallback(_for_fallback(peer), frame, reason)

    def on_connection_lost(self, connection: CallerConnection, reason: str) -> None:
        """Use the fallback from now on; fail the calls that were sent on the connection.

        A broken connection does not imply that the peer died, so they wait for its loss first.
        """
        with self._lock:
            route = self._routes.get(connection.peer.token)
            if route is not None:
                route.reason = reason
        if not self._closed:
            self._log_fallback(connection.peer, reason)
        self._threads.submit(lambda: self._fail_calls(connection, reason))

    def _fail_calls(self, connection: CallerConnection, reason: str) -> None:
        peer = connection.peer
        error: CallError = CallLostError(
            f"The connection to RPC worker {peer.name!r} on node {peer.node} was cut during a "
            f"call: whether the function ran is not known ({reason}). Call again if it may run "
            "twice."
        )
        if self._wait_loss(peer):
            time.sleep(LOSS_SECONDS)  # ``on_peer_lost`` follows, and knows the cause
            error = WorkerDiedError(peer.name, reason, peer.node)
        connection.fail(error)

    # -- serving ------------------------------------------------------------------------------

    def _send_large_reply(self, request: Frame, reply: Frame) -> bool:
        """Send a reply by the fallback if it is large; return False if it is not."""
        if not reply.buffers or _size(reply) <= BULK_BYTES:
            return False
        self._threads.submit(lambda: self._fallback.send_reply(request, reply))
        return True

    def close_after_fork(self) -> None:
        """Close the descriptors that a forked child inherited."""
        self._server.close_after_fork()
        for connection in self._connections():
            connection.close_after_fork()


def _for_fallback(peer: Member) -> Member:
    """Return a member with its address on the fallback."""
    if isinstance(peer.address, DirectAddress):
        return replace(peer, address=peer.address.fallback)
    return peer


def _size(frame: Frame) -> int:
    return sum(flat(buffer).nbytes for buffer in frame.buffers)


_transports: weakref.WeakSet[DirectTransport] = weakref.WeakSet()
_fork_lock = threading.Lock()
_handles_forks = False


def _close_after_fork(transport: DirectTransport) -> None:
    """Have forked children close a transport's descriptors: else peers see no end of them."""
    global _handles_forks
    with _fork_lock:
        _transports.add(transport)
        if not _handles_forks:
            _handles_forks = True
            os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for transport in list(_transports):
        with contextlib.suppress(Exception):
            transport.close_after_fork()
    _transports.clear()
