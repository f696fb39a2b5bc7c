"""The bytes that connections send."""

from __future__ import annotations

import threading

__all__ = ["Sent", "Traffic"]


class Sent:
    """What one connection has sent.

    Each count is added to by one thread at a time.
    """

    __slots__ = ("connection", "is_final", "shared_memory")

    def __init__(self) -> None:
        #: bytes that were written to the connection
        self.connection = 0
        #: bytes of buffers that were shared instead
        self.shared_memory = 0
        #: the connection has ended
        self.is_final = False


class Traffic:
    """Sum up what connections have sent, those that have ended included; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = Sent()
        self._open: list[Sent] = []

    def open(self) -> Sent:
        """Return the counts for a new connection."""
        sent = Sent()
        with self._lock:
            self._open.append(sent)
        return sent

    def total(self) -> dict[str, int]:
        """Return the bytes by way: ``connection`` and ``shared_memory``."""
        ended = self._ended
        with self._lock:
            final = [sent for sent in self._open if sent.is_final]
            for sent in final:
                ended.connection += sent.connection
                ended.shared_memory += sent.shared_memory
            self._open = [sent for sent in self._open if sent not in final]
            counts = [ended, *self._open]
        return {
            "connection": sum(sent.connection for sent in counts),
            "shared_memory": sum(sent.shared_memory for sent in counts),
        }
