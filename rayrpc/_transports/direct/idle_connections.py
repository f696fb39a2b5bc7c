"""Wait for messages on connections that have been idle for a while: one thread for all of them.

The thread only waits.  A connection on which something arrives, or which ends, is read by a thread
of its own again.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from typing import Protocol

from rayrpc._concurrency.threads import SingleThread

__all__ = ["IdleConnections"]

logger = logging.getLogger(__name__)

# How long to wait after an error that is likely to come again at once.
PAUSE_SECONDS = 0.01


class Idle(Protocol):
    """A connection that no thread reads, and on which no part of a message has arrived."""

    @property
    def socket(self) -> socket.socket:
        """The socket; open until the connection is read again."""

    def start(self) -> None:
        """Start a thread that reads the connection."""


class IdleConnections:
    """Keep idle connections until there is something to read; the thread starts with the first."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._woken = socket.socketpair()
        for each in (self._wakeup, self._woken):
            each.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._added: deque[Idle] = deque()  # the thread has not seen them
        self._kept: dict[int, Idle] = {}  # by descriptor
        self._lock = threading.Lock()  # nothing is added once it is closed
        self._closed = False
        self._thread = SingleThread(self._run, "rayrpc-idle", "idle connections keep their threads")

    @property
    def count(self) -> int:
        """The number of connections."""
        return len(self._kept) + len(self._added)

    def add(self, connection: Idle) -> bool:
        """Keep a connection.

        Returns:
            False if that is impossible: the connection's thread has to read on.
        """
        self._thread.start()
        with self._lock:
            if self._closed or not self._thread.is_running:
                return False
            self._added.append(connection)
        self._wake()
        return True

    def close(self) -> None:
        """Have all connections read again; keep none from now on."""
        with self._lock:
            self._closed = True
        if self._thread.is_running:
            self._wake()
        else:
            self.close_after_fork()

    def close_after_fork(self) -> None:
        """Close the descriptors; in a forked child, where the thread does not run."""
        for each in (self._wakeup, self._woken):
            each.close()
        self._selector.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # enough wake-ups are pending, or the thread has ended
            self._wakeup.send(b"x")

    def _run(self) -> None:
        while not self._closed:
            try:
                # a function, so that no variable keeps a connection alive while the thread waits
                self._wait()
            except Exception:
                logger.exception("an error in the wait for idle connections, which goes on")
                time.sleep(PAUSE_SECONDS)
        while self._kept:
            _read(self._kept.popitem()[1])
        while self._added:
            _read(self._added.popleft())
        self.close_after_fork()

    def _wait(self) -> None:
        """Wait until connections are added or ready, and handle them."""
        for key, _ in self._selector.select():
            if key.fileobj is not self._woken:
                self._selector.unregister(key.fileobj)
                _read(self._kept.pop(key.fd))
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(64)
        while self._added:
            connection = self._added.popleft()
            try:
                key = self._selector.register(connection.socket, selectors.EVENT_READ)
                self._kept[key.fd] = connection
            except Exception as exc:  # the system can wait for no more connections
                logger.debug("an idle connection keeps its thread: %s", exc)
                _read(connection)


def _read(connection: Idle) -> None:
    try:
        connection.start()
    except Exception:
        logger.exception("a connection could not be read again; it is closed")
