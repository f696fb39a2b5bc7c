"""Send large replies to small requests by the connection that the peer has opened for them.

    announced ──(the peer has a connection)──────────────────────> sent
        └─────> waiting ──(it opens one)─────────────────────────> sent
                   └────(the connection of the request ends)─────> dropped

A peer opens its connection when the first reply is announced to it, if not before.  While more than
``MAX_UNREAD_BYTES`` wait, no more of its requests are read, and those that wait for a thread do not
begin.

The connection for small messages and the one for large messages are a pair, lost together.  When a
pair was lost, the peer opens another one, perhaps before this worker notices the loss.  So a reply
goes by the pair on which its request arrived.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from rayrpc._protocol.messages import Frame, size_of
from rayrpc._transports.direct.stream import MAX_UNREAD_BYTES

__all__ = ["BULK_BYTES", "BulkReplies", "OPEN_SECONDS", "Pair"]

logger = logging.getLogger(__name__)

# Messages with more bytes in their buffers go by a second connection, so that small ones overtake.
BULK_BYTES = 256 << 10

# How long large replies wait for their peer to open a connection for them.
OPEN_SECONDS = 30.0
OPEN_POLL_SECONDS = 0.01

# Token of the peer's membership, and the peer's number of the pair.
Pair = tuple[str, int]


class ReplyConnection(Protocol):
    """What large replies need of the connections of their peer."""

    @property
    def pair(self) -> Pair:
        """The pair of connections that it belongs to."""

    @property
    def is_closed(self) -> bool:
        """Tell whether the connection has ended."""

    def send_large(self, call_id: int, reply: Frame) -> None:
        """Send the reply to a request that arrived on another connection of the peer."""

    def wait_until_read(self) -> bool:
        """Wait a while until the peer has read most of its replies; return False if it has not."""

    def wait_for_hang_up(self, seconds: float) -> bool:
        """Wait a while until the peer closes the connection; return False if it does not."""

    def hold(self, task: Callable[[], object]) -> bool:
        """Keep a task until the peer has read most of its replies; return False if it has."""

    def close(self) -> None:
        """Close the connection."""


class _WaitingReply(NamedTuple):
    """A large reply that waits for a connection.

    Args:
        source (ReplyConnection): the connection on which the request arrived.
        call_id (int): the request's id.
        reply (Frame): the reply to send.
        since (float): when the reply was ready, in seconds of the monotonic clock.
    """

    source: ReplyConnection
    call_id: int
    reply: Frame
    since: float


class BulkReplies:
    """Send large replies on the connections that peers have opened for them; thread-safe."""

    def __init__(self) -> None:
        self._connections: dict[Pair, ReplyConnection] = {}
        self._waiting: dict[Pair, list[_WaitingReply]] = {}  # until there is a connection
        self._held: dict[Pair, list[Callable[[], object]]] = {}  # tasks, while too many bytes wait
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Tell whether no reply waits for a connection."""
        return not self._waiting

    def add(self, connection: ReplyConnection) -> None:
        """Use a connection for its peer's replies."""
        with self._lock:
            self._connections[connection.pair] = connection
            waiting = self._waiting.pop(connection.pair, [])
            held = self._held.pop(connection.pair, [])
        for each in waiting:
            connection.send_large(each.call_id, each.reply)
        for task in held:
            task()
        if connection.is_closed:  # perhaps it ended before it was registered
            self.remove(connection)

    def remove(self, connection: ReplyConnection) -> None:
        """Stop using a connection that has ended: it may hold a part of a large message."""
        with self._lock:
            if self._connections.get(connection.pair) is connection:
                del self._connections[connection.pair]

    def send(self, source: ReplyConnection, call_id: int, reply: Frame) -> None:
        """Send a reply, or keep it until the peer has opened a connection.

        Args:
            source: the connection of the request; if it has ended, the reply is dropped.
            call_id: the request's id.
            reply: the reply to send.
        """
        pair = source.pair
        connection = self._connections.get(pair)
        if connection is None or connection.is_closed:
            reply.keep_buffers()
            with self._lock:
                connection = self._connections.get(pair)
                if connection is None or connection.is_closed:
                    if source.is_closed:
                        return
                    waiting = _WaitingReply(source, call_id, reply, time.monotonic())
                    self._waiting.setdefault(pair, []).append(waiting)
                    return
        connection.send_large(call_id, reply)

    def wait_until_read(self, source: ReplyConnection) -> bool:
        """Wait a while until a peer has read most of its replies; return False if it has not.

        Args:
            source: the peer's connection, on which nothing is read meanwhile.
        """
        pair = source.pair
        with self._lock:
            first = self._waiting[pair][0] if self._is_full(pair) else None
        if first is not None:
            if time.monotonic() - first.since > OPEN_SECONDS:
                logger.warning("closed a connection: its peer opens none for large replies")
                first.source.close()
            if source.wait_for_hang_up(OPEN_POLL_SECONDS):
                source.close()
            return False
        connection = self._connections.get(pair)
        return connection is None or connection.wait_until_read()

    def hold(self, pair: Pair, task: Callable[[], object]) -> bool:
        """Keep a task until a peer has read most of its replies; return False if it has."""
        with self._lock:
            if self._is_full(pair):
                self._held.setdefault(pair, []).append(task)
                return True
            connection = self._connections.get(pair)
        return connection is not None and connection.hold(task)

    def forget(self, source: ReplyConnection) -> None:
        """Drop the replies to requests on a connection that has ended."""
        pair = source.pair
        with self._lock:
            self._waiting.pop(pair, None)
            held = self._held.pop(pair, [])
        for task in held:
            task()

    def _is_full(self, pair: Pair) -> bool:
        """Tell whether too many bytes wait for a peer's connection; call it with the lock held."""
        waiting = self._waiting.get(pair, ())
        return sum(size_of(each.reply) for each in waiting) > MAX_UNREAD_BYTES
