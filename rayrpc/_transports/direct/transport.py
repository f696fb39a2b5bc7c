"""The direct transport: small frames on connections between the workers, large ones by Ray.

Ray stays in control: the directory gives addresses and the group's secret, the watch of every
stand-in tells who died, and what cannot go directly goes by the ``RayTransport`` inside.

    call ─┬─ connection ────> the peer's DirectServer   (on one node: UNIX socket, shared memory)
          └─ RayTransport ──> the peer's endpoint       (no connection, or large and far)
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
from dataclasses import dataclass

from rayrpc._concurrency.outcome import Error
from rayrpc._concurrency.reader import ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, flat
from rayrpc._protocol.transport import Pending, PendingReply, Serve, Transport
from rayrpc._transports.direct.auth import CHALLENGE_SIZE, AuthenticationError, ClientHandshake
from rayrpc._transports.direct.connection import CallerConnection, ConnectionCall
from rayrpc._transports.direct.server import DirectServer
from rayrpc._transports.direct.wire import prepare
from rayrpc._transports.ray.endpoint import Address, DirectAddress
from rayrpc._transports.ray.transport import CLOSE_SECONDS, RayTransport
from rayrpc.errors import CallError, CallLostError, WorkerDiedError

__all__ = ["DirectTransport"]

logger = logging.getLogger(__name__)

# How long connecting to a peer may take, and how often it is tried.
CONNECT_SECONDS = 5.0
CONNECT_TRIES = 3
# How long a connection that was cut waits for the news that its peer died.
NEWS_SECONDS = 1.0
# Frames to other nodes with more bytes in their buffers go by the object store: it copies faster.
BULK_BYTES = 1 << 20


@dataclass
class _Peer:
    """The way to a peer.

    Args:
        connection (CallerConnection | None): if it accepts any.
        reason (str): why that is none, or has ended.
    """

    connection: CallerConnection | None
    reason: str = ""


class DirectTransport(Transport):
    """Call peers on connections, and by Ray where that is not possible or not better.

    Args:
        ray_transport (RayTransport): the other way.
        token (str): of this worker's membership.
        only (bool): calls that cannot go on a connection fail; large ones go by Ray all the same.
    """

    name = "direct"

    def __init__(self, ray_transport: RayTransport, token: str, only: bool = False) -> None:
        self._ray = ray_transport
        self._token = token
        self._only = only
        self._node = ray_transport.node_id
        self._threads = ThreadCache(
            "rayrpc-connection", soft_limit=10_000
        )  # most wait for a message
        self._watch = ReaderWatchdog(lambda: self._threads.submit(self._trim))
        self._server = DirectServer(token, ray_transport.node, self._threads, self._watch)
        self._secret = b""
        self._find: Callable[[int], Member | None] = lambda _: None
        self._peers: dict[str, _Peer] = {}
        self._lock = threading.Lock()
        self._closed = False
        _alive.add(self)

    @property
    def address(self) -> Address:
        connection = DirectAddress(self._node, self._server.unix, self.node, self._server.port)
        return self._ray.address._replace(connection=connection)

    @property
    def node(self) -> str:
        return self._ray.node

    def start(
        self, serve: Serve, find: Callable[[int], Member | None], secret: bytes = b""
    ) -> None:
        self._find = find
        self._secret = secret
        self._ray.start(serve, find)
        self._server.start(secret, serve, self._large_reply)

    def call(self, peer: Member, frame: Frame) -> Pending:
        way = self._peers.get(peer.token)
        if way is None:
            way = self._open(peer)
        if way.connection is not None:
            if frame.buffers and not self._is_near(peer) and _size(frame) > BULK_BYTES:
                return self._ray.call(peer, frame)
            call = way.connection.call(frame)
            if call is not None:
                return call
        return self._call_by_fallback(peer, frame, way.reason)

    def on_peer_lost(self, peer: Member, error: BaseException) -> None:
        with self._lock:
            way = self._peers.pop(peer.token, None)
        if way is not None and way.connection is not None:
            way.connection.fail(error)
        self._ray.on_peer_lost(peer, error)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _alive.discard(self)
        self._server.close(CLOSE_SECONDS)
        with self._lock:
            connections = self._connections()
            self._peers.clear()
        for connection in connections:
            connection.fail(CallError("RPC was shut down on this worker"))
        self._ray.close()
        self._watch.close()
        self._threads.close()

    # -- calling ------------------------------------------------------------------------------

    def _open(self, peer: Member) -> _Peer:
        with self._lock:
            way = self._peers.get(peer.token)
            if way is None:
                if peer.address.connection is None:
                    way = _Peer(None, "it accepts no connections: its setting transport is ray")
                    logger.info("calls to %s go by Ray: %s", peer.name, way.reason)
                else:
                    way = _Peer(CallerConnection(peer, self, self._threads, self._watch))
                self._peers[peer.token] = way
            return way

    def _call_by_fallback(self, peer: Member, frame: Frame, reason: str) -> Pending:
        if not self._only:
            return self._ray.call(peer, frame)
        pending = PendingReply()
        self._threads.submit(lambda: self._refuse(peer, pending, reason))
        return pending

    def _refuse(self, peer: Member, pending: PendingReply, reason: str) -> None:
        error: CallError = CallError(
            f"RPC worker {peer.name!r} on node {peer.node} cannot be called directly: {reason}. "
            "The setting transport is direct; with auto, calls go by Ray then."
        )
        if self._news_of(peer):
            error = WorkerDiedError(peer.name, reason, peer.node)
        pending.complete(Error(error))

    def _news_of(self, peer: Member) -> bool:
        """Tell whether the peer turns out to be gone; such news may take a moment."""
        end = time.monotonic() + NEWS_SECONDS
        while time.monotonic() < end:
            now = self._find(peer.id)
            if now is None or now.token != peer.token:
                return True
            time.sleep(0.01)
        return False

    def _trim(self) -> None:
        """Let go of memory that connections have not used for a while."""
        self._server.trim()
        for connection in self._connections():
            connection.trim()

    def _connections(self) -> list[CallerConnection]:
        return [way.connection for way in list(self._peers.values()) if way.connection is not None]

    # -- what connections need ----------------------------------------------------------------

    def connect(self, peer: Member) -> socket.socket:
        """Return a connection to a peer that has proved who it is."""
        to: DirectAddress = peer.address.connection
        near = self._is_near(peer)
        deadline = time.monotonic() + CONNECT_SECONDS
        tries = 0
        while True:
            try:
                return self._connect_once(to, near, peer.token, deadline)
            except BlockingIOError:  # many are at the door
                if time.monotonic() > deadline:
                    raise
            except (OSError, EOFError, AuthenticationError):
                tries += 1
                if tries == CONNECT_TRIES or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)

    def _connect_once(
        self, to: DirectAddress, near: bool, token: str, deadline: float
    ) -> socket.socket:
        if near:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            address: object = "\0" + to.unix
        else:
            family = socket.AF_INET6 if ":" in to.host else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM)
            address = (to.host, to.port)
        try:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.connect(address)  # type: ignore[arg-type]
            answer = ClientHandshake(self._secret, self._token, token)
            connection.sendall(answer.hello)
            challenge = b""
            while len(challenge) < CHALLENGE_SIZE:
                data = connection.recv(CHALLENGE_SIZE - len(challenge))
                if not data:
                    raise EOFError("it hung up")
                challenge += data
            connection.sendall(answer.receive(challenge))
            prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def reroute(self, call: ConnectionCall, reason: str) -> None:
        """Send a call that its connection did not send by Ray."""
        frame = call.frame
        assert frame is not None
        call.go_by(self._call_by_fallback(call.peer, frame, reason))

    def on_connection_lost(self, connection: CallerConnection, reason: str) -> None:
        """Note that a connection ended, and fail its calls unless the peer turns out to be dead."""
        with self._lock:
            way = self._peers.get(connection.peer.token)
            if way is not None:
                way.reason = reason
        if not self._closed:
            logger.info("calls to %s go %s: %s", connection.peer.name, self._else(), reason)
        self._threads.submit(lambda: self._fail_without_news(connection, reason))

    def _is_near(self, peer: Member) -> bool:
        """Tell whether a peer is on this node, and reached by a UNIX socket."""
        to: DirectAddress = peer.address.connection
        return to.node == self._node and bool(to.unix and self._server.unix)

    def _else(self) -> str:
        return "nowhere" if self._only else "by Ray"

    def _fail_without_news(self, connection: CallerConnection, reason: str) -> None:
        peer = connection.peer
        error: CallError = CallLostError(
            f"The connection to RPC worker {peer.name!r} on node {peer.node} was cut during a "
            f"call: whether the function ran is not known ({reason}). Call again if it may run "
            "twice."
        )
        if self._news_of(peer):
            time.sleep(NEWS_SECONDS)  # ``lost`` comes with the cause
            error = WorkerDiedError(peer.name, reason, peer.node)
        connection.fail(error)

    def other_way(self, call: ConnectionCall) -> Pending:
        """Return where the reply that was announced on a connection comes."""
        return self._ray.late(call.id, call.peer)

    # -- serving ------------------------------------------------------------------------------

    def _large_reply(self, frame: Frame, reply: Frame) -> bool:
        """Send a reply by Ray, if it is large."""
        if not reply.buffers or _size(reply) <= BULK_BYTES:
            return False
        self._threads.submit(lambda: self._ray.deliver(frame, reply))
        return True

    def close_after_fork(self) -> None:
        """Let go of connections that this child of the worker's process inherited."""
        self._server.close_after_fork()
        for connection in self._connections():
            connection.close_after_fork()


def _size(frame: Frame) -> int:
    return sum(flat(buffer).nbytes for buffer in frame.buffers)


_alive: weakref.WeakSet[DirectTransport] = weakref.WeakSet()


def _after_fork() -> None:
    for transport in list(_alive):
        with contextlib.suppress(Exception):
            transport.close_after_fork()
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork)
