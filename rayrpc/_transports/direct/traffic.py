"""The bytes that connections send."""

from __future__ import annotations

import threading

__all__ = ["Sent", "Traffic"]


class Sent:
    """What one connection has sent.

    One thread at a time adds to a count.
    """

    __slots__ = ("connection", "shared_memory")

    def __init__(self) -> None:
        #: bytes that were written to the connection
        self.connection = 0
        #: bytes of buffers that were shared instead
        self.shared_memory = 0


class Traffic:
    """Sum up what connections have sent, those that have ended included; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = Sent()
        self._open: set[Sent] = set()

    def open(self) -> Sent:
        """Return the counts for a new connection."""
        sent = Sent()
        with self._lock:
            self._open.add(sent)
        return sent

    def end(self, sent: Sent) -> None:
        """Add up the counts of a connection that has ended, and drop them; may be called again."""
        with self._lock:
            if sent in self._open:
                self._open.remove(sent)
                self._ended.connection += sent.connection
                self._ended.shared_memory += sent.shared_memory

    def total(self) -> dict[str, int]:
        """Return the bytes that were sent by ``connection`` and by ``shared_memory``."""
        with self._lock:
            counts = [self._ended, *self._open]
            total = {
                "connection": sum(sent.connection for sent in counts),
                "shared_memory": sum(sent.shared_memory for sent in counts),
            }
        return total
