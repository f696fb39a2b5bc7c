"""Accept connections and authenticate them, in one thread that no connection can block.

A connection is unauthenticated until its handshake is done.  It costs a descriptor and 96 bytes,
and is closed when it sends a wrong byte or takes too long.  At ``MAX_UNAUTHENTICATED`` the
listeners are not served, and the oldest connection is closed after ``MIN_HANDSHAKE_SECONDS``.
An error closes the connection that it concerns, and never ends the thread.  While there are no
descriptors, peers wait in the listeners' queues.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from rayrpc._transports.direct.auth import AuthenticationError, ServerHandshake

__all__ = ["Acceptor"]

logger = logging.getLogger(__name__)

# How long a handshake may take, and how long it may take at MAX_UNAUTHENTICATED.
HANDSHAKE_SECONDS = 5.0
MIN_HANDSHAKE_SECONDS = 0.5
MAX_UNAUTHENTICATED = 128
# How long to wait after an error that is likely to come again at once.
PAUSE_SECONDS = 0.01


class Acceptor:
    """Accept connections until ``close``.

    Args:
        listeners (list[socket]): bound and listening; closed with the acceptor.
        new_handshake (Callable): returns the ServerHandshake of a new connection.
        on_authenticated (Callable): takes a connection and its completed handshake.
        encrypt (Callable): returns the socket, perhaps encrypted, by which to use a connection.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        new_handshake: Callable[[], ServerHandshake],
        on_authenticated: Callable[[socket.socket, ServerHandshake], None],
        encrypt: Callable[[socket.socket], socket.socket],
    ) -> None:
        self._listeners = listeners
        self._new_handshake = new_handshake
        self._on_authenticated = on_authenticated
        self._encrypt = encrypt
        # the handshake and when it began, by connection; the oldest is the first
        self._unauthenticated: dict[socket.socket, tuple[ServerHandshake, float]] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._woken = socket.socketpair()
        self._closed = False
        self._is_listening = False
        self._has_accepted = True  # at the last try: failures in a row are logged once
        self._thread = threading.Thread(target=self._run, name="rayrpc-acceptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the listeners and the unauthenticated connections."""
        self._closed = True
        self._wakeup.send(b"x")
        self._thread.join()
        self.close_after_fork()

    def close_after_fork(self) -> None:
        """Close all descriptors; in a forked child, where the thread does not run."""
        for each in (*self._listeners, *self._unauthenticated, self._wakeup, self._woken):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        while not self._closed:
            try:
                self._serve_ready()
            except Exception:
                logger.exception("an error while connections were accepted; the acceptor goes on")
                time.sleep(PAUSE_SECONDS)

    def _serve_ready(self) -> None:
        """Wait for connections and bytes, and handle them."""
        self._set_listening(not self._is_full)
        for key, _ in self._selector.select(self._next_timeout()):
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            if ready in self._unauthenticated:
                self._receive(ready)
            elif ready is not self._woken:
                self._accept(ready)
        self._close_overdue()

    @property
    def _is_full(self) -> bool:
        return len(self._unauthenticated) >= MAX_UNAUTHENTICATED

    def _set_listening(self, is_listening: bool) -> None:
        if is_listening != self._is_listening:
            self._is_listening = is_listening
            for listener in self._listeners:
                if is_listening:
                    self._selector.register(listener, selectors.EVENT_READ)
                else:
                    self._selector.unregister(listener)

    def _deadline(self, began: float) -> float:
        return began + (MIN_HANDSHAKE_SECONDS if self._is_full else HANDSHAKE_SECONDS)

    def _next_timeout(self) -> float | None:
        """Return the seconds until the oldest handshake is overdue; None if there is none."""
        for _, began in self._unauthenticated.values():
            return max(0.0, self._deadline(began) - time.monotonic())
        return None

    def _close_overdue(self) -> None:
        for connection, (_, began) in list(self._unauthenticated.items()):
            if time.monotonic() < self._deadline(began):
                return
            self._refuse(connection, "its handshake took too long")

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:  # out of descriptors, or the peer closed it before
            if self._has_accepted:
                logger.warning("could not accept a connection, and try again: %s", exc)
            self._has_accepted = False
            time.sleep(PAUSE_SECONDS)
            return
        self._has_accepted = True
        try:
            connection = self._encrypt(connection)
            connection.setblocking(False)
            self._unauthenticated[connection] = (self._new_handshake(), time.monotonic())
            self._selector.register(connection, selectors.EVENT_READ)
        except Exception as exc:
            logger.exception("could not accept a connection")
            self._refuse(connection, exc)

    def _refuse(self, connection: socket.socket, reason: object) -> None:
        logger.debug("refused a connection: %s", reason)
        self._remove(connection)
        connection.close()

    def _remove(self, connection: socket.socket) -> None:
        self._unauthenticated.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):  # it was not registered yet
            self._selector.unregister(connection)

    def _receive(self, connection: socket.socket) -> None:
        handshake, _ = self._unauthenticated[connection]
        try:
            data = connection.recv(handshake.missing)
            if not data:
                raise AuthenticationError("the peer closed the connection")
            answer = handshake.receive(data)
            if answer:
                connection.send(answer)  # it fits into the buffer of any new connection
        except BlockingIOError:
            return
        except (OSError, AuthenticationError) as exc:
            self._refuse(connection, exc)
            return
        if not handshake.done:
            return
        self._remove(connection)
        try:
            self._on_authenticated(connection, handshake)
        except Exception:
            logger.exception("could not serve a connection, and closed it")
            connection.close()
