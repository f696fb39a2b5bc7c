"""The callee's end of connections: listen, let members in, serve their calls.

The thread that reads a connection also runs what was read, as long as that takes no time; before
it blocks, or if it is busy for long, another thread reads on (see ``turns``).  So no call waits
for a hand-over, and none for another call that takes its time.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable

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

# How long a read waits; nothing depends on it, for who closes a connection ends its reads.
IDLE_SECONDS = 60.0

# After a message came in the middle of a short call, others are expected during so many calls.
CROWDED = 64

# Called with a frame and its reply; returns True if it sends the reply by another way.
OtherWay = Callable[[Frame, Frame], bool]


class DirectServer:
    """Accept connections of members of the group.

    Args:
        token (str): of this worker's membership.
        host (str): address of this node, to listen at for other nodes; empty: for none.
        threads (ThreadCache): runs the connections.
        watch (ReaderWatchdog): ends the turns of threads that are busy for long.
    """

    def __init__(self, token: str, host: str, threads: ThreadCache, watch: ReaderWatchdog) -> None:
        self._token = token
        self._threads = threads
        self._watch = watch
        self._secret = b""
        self._serve: Serve | None = None
        self._other_way: OtherWay = lambda frame, reply: False
        self._listeners: list[socket.socket] = []
        self._connections: weakref.WeakSet[ServerConnection] = weakref.WeakSet()
        self._door: Acceptor | None = None
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

    def start(self, secret: bytes, serve: Serve, other_way: OtherWay) -> None:
        """Let in who knows the secret, and serve its calls."""
        self._secret = secret
        self._serve = serve
        self._other_way = other_way
        self._door = Acceptor(
            self._listeners, lambda: ServerHandshake(self._secret, self._token), self._welcome
        )

    def close(self, patience: float) -> None:
        """Stop; let replies that are under way go out, for ``patience`` seconds at most."""
        self._close_listeners(Acceptor.close)
        end = time.monotonic() + patience
        connections = list(self._connections)
        while any(c.is_busy for c in connections) and time.monotonic() < end:
            time.sleep(0.002)
        for connection in connections:
            connection.close()

    def trim(self) -> None:
        """Let go of memory that was not used for a while."""
        for connection in list(self._connections):
            connection.trim()

    def close_after_fork(self) -> None:
        """Close the descriptors that a forked child inherited: else peers see no end of them."""
        for connection in list(self._connections):
            connection.close_after_fork()
        self._close_listeners(Acceptor.close_after_fork)

    def _close_listeners(self, close_door: Callable[[Acceptor], None]) -> None:
        if self._door is not None:
            close_door(self._door)
        for listener in self._listeners:
            listener.close()

    def _welcome(self, member: socket.socket) -> None:
        assert self._serve is not None
        prepare(member, IDLE_SECONDS)
        self._connections.add(
            ServerConnection(member, self._serve, self._other_way, self._threads, self._watch)
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
        other_way (OtherWay): takes replies that are too large for a connection.
        threads (ThreadCache): where the threads come from.
        watch (ReaderWatchdog): ends the turns of threads that are busy for long.
    """

    def __init__(
        self,
        connection: socket.socket,
        serve: Serve,
        other_way: OtherWay,
        threads: ThreadCache,
        watch: ReaderWatchdog,
    ) -> None:
        self.socket = connection
        self._serve = serve
        self._other_way = other_way
        self._threads = threads
        self._watch = watch
        self._stream = Stream(connection, threads, lambda unsent: None, opened_here=False)
        self._busy: set[int] = set()  # threads that answer a call
        self._over = False
        self._crowd = 0
        threads.submit(self._read)

    @property
    def is_busy(self) -> bool:
        """Tell whether calls run that are not this thread's own, or replies are not written."""
        others = self._busy - {threading.get_ident()}
        return bool(others) or not self._stream.is_idle

    def close(self) -> None:
        """End it."""
        self._over = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close_after_fork(self) -> None:
        """Close the descriptors that a forked child inherited."""
        self._stream.close_after_fork()

    def trim(self) -> None:
        """Let go of memory that was not used for a while."""
        self._stream.trim()

    def _read(self) -> None:
        """Read calls and answer them, until this thread is released."""
        me = threading.get_ident()
        with ReaderRole(self._hand_over, self._watch) as role:
            while not self._over:
                try:
                    message = self._stream.read()
                except TimeoutError:
                    continue
                except EOFError:
                    break
                frame = message.frame()
                del message  # what was sent lives no longer than its call
                self._busy.add(me)
                role.message_received()
                try:
                    self._answer(frame, role)
                finally:
                    self._busy.discard(me)
                if not role.message_done():
                    self._stream.flush()
                    return
        self._over = True
        self._stream.close()

    def _hand_over(self) -> None:
        self._stream.flush()
        self._threads.submit(self._read)

    def _answer(self, frame: Frame, role: ReaderRole) -> None:
        role.one_at_a_time = self._crowd == 0
        reply = served(self._serve, frame)
        if role.kept and role.state != RELEASED and self._stream.wait(0):
            self._crowd = CROWDED
        elif self._crowd:
            self._crowd -= 1
        if isinstance(reply, Deferred):
            reply.on_done(lambda late: self._send(frame, late, False))
        else:
            self._send(frame, reply, role.state != RELEASED and self._stream.has_more)

    def _send(self, frame: Frame, reply: Frame, more: bool) -> None:
        try:
            elsewhere = not self._stream.shares_memory and self._other_way(frame, reply)
            sent = None if elsewhere else reply
            self._stream.send(frame.call_id, sent, more, give_up=not elsewhere)
        except Exception:
            logger.exception("a reply could not be sent; its connection is closed")
            self.close()  # so that the caller learns of it
