"""Who connects to a worker: let members in, and be held up by nobody else.

One thread waits for all that have not proved yet who they are.  A stranger costs a descriptor and
96 bytes, and leaves when it says something wrong or takes too long; when there are too many, the
longest there makes room, but each has a moment.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from rayrpc._transports.direct.auth import AuthenticationError, ServerHandshake

__all__ = ["Acceptor"]

logger = logging.getLogger(__name__)

# How long who connects may take to prove who it is, and how long it has even in a crowd.
GREETING_SECONDS = 5.0
MOMENT_SECONDS = 0.5
STRANGERS = 128


class Acceptor:
    """Accept connections until ``close``.

    Args:
        listeners (list[socket]): bound and listening; closed with the door.
        greet (Callable): returns the ServerHandshake for one that connects.
        welcome (Callable): takes the connection of a member.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        greet: Callable[[], ServerHandshake],
        welcome: Callable[[socket.socket], None],
    ) -> None:
        self._listeners = listeners
        self._greet = greet
        self._welcome = welcome
        # since when, by connection; the first is there longest
        self._strangers: dict[socket.socket, tuple[ServerHandshake, float]] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._woken = socket.socketpair()
        self._closed = False
        self._open = False  # whether we listen
        self._thread = threading.Thread(target=self._run, name="rayrpc-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the listeners, and hang up on strangers."""
        self._closed = True
        self._wakeup.send(b"x")
        self._thread.join()
        self.close_after_fork()

    def close_after_fork(self) -> None:
        """Close all descriptors; in a forked child, where the thread does not run."""
        for each in (*self._listeners, *self._strangers, self._wakeup, self._woken):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        while not self._closed:
            self._set_open(len(self._strangers) < STRANGERS)
            for key, _ in self._selector.select(self._seconds()):
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if ready in self._strangers:
                    self._hear(ready)
                elif ready is not self._woken:
                    self._accept(ready)
            self._send_away()

    def _set_open(self, is_open: bool) -> None:
        if is_open != self._open:
            self._open = is_open
            for listener in self._listeners:
                if is_open:
                    self._selector.register(listener, selectors.EVENT_READ)
                else:
                    self._selector.unregister(listener)

    def _patience(self) -> float:
        return GREETING_SECONDS if len(self._strangers) < STRANGERS else MOMENT_SECONDS

    def _seconds(self) -> float | None:
        """Return how long until somebody has taken too long."""
        for _, since in self._strangers.values():
            return max(0.0, since + self._patience() - time.monotonic())
        return None

    def _send_away(self) -> None:
        for stranger, (_, since) in list(self._strangers.items()):
            if time.monotonic() < since + self._patience():
                return
            self._forget(stranger)
            stranger.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            stranger, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:  # out of descriptors, or it went while it waited
            logger.debug("could not accept a connection: %s", exc)
            time.sleep(0.01)
            return
        stranger.setblocking(False)
        self._strangers[stranger] = (self._greet(), time.monotonic())
        self._selector.register(stranger, selectors.EVENT_READ)

    def _forget(self, stranger: socket.socket) -> None:
        self._selector.unregister(stranger)
        del self._strangers[stranger]

    def _hear(self, stranger: socket.socket) -> None:
        greeting, _ = self._strangers[stranger]
        try:
            data = stranger.recv(greeting.missing)
            if not data:
                raise AuthenticationError("it hung up")
            answer = greeting.receive(data)
            if answer:
                stranger.send(answer)  # it fits into the buffer of any new connection
        except BlockingIOError:
            return
        except (OSError, AuthenticationError) as exc:
            logger.debug("refused a connection: %s", exc)
            self._forget(stranger)
            stranger.close()
            return
        if greeting.done:
            self._forget(stranger)
            self._welcome(stranger)
