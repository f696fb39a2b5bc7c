"""Detect that a host has gone silent: it acknowledges nothing of a connection, not even probes.

The hosts' kernels exchange probes on idle connections (TCP keep-alive) and acknowledge data on
busy ones, whatever the processes do: one that is stopped, or computes, is not silent.  A connection
whose host was silent for ``peer_timeout`` is closed; TCP alone takes minutes.

Source: tcp(7), ``TCP_INFO``.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Protocol

from rayrpc._concurrency.threads import SingleThread
from rayrpc._concurrency.waiting import Event

__all__ = ["SilenceWatch", "keep_alive", "silent_seconds"]

CHECKS = 8  # for each peer_timeout
PROBES = 4
# A field of tcp_info: milliseconds since the last acknowledgement was received
_LAST_ACK = struct.Struct("@56xI")


class Watched(Protocol):
    """A connection to another host."""

    @property
    def tcp(self) -> socket.socket | None:
        """The socket, if there is a TCP connection now."""

    def break_off(self, reason: str) -> None:
        """Close the connection; its calls fail."""


def keep_alive(connection: socket.socket, timeout: float) -> None:
    """Have the kernel send probes while a connection is idle.

    Args:
        connection: a TCP socket.
        timeout: the silence to detect, in seconds.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, int(timeout / PROBES))
    for name, value in (
        ("TCP_KEEPIDLE", seconds),
        ("TCP_KEEPINTVL", seconds),
        ("TCP_KEEPCNT", 4 * PROBES),  # `SilenceWatch` closes the connection earlier
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def silent_seconds(connection: socket.socket) -> float:
    """Return for how many seconds the other host has acknowledged nothing; 0 if it is not known."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size)
        milliseconds: int = _LAST_ACK.unpack(info)[0]
    except (AttributeError, OSError, struct.error):  # not Linux, or it was closed
        return 0.0
    return milliseconds / 1000


class SilenceWatch:
    """Close the connections whose host is silent, in a thread that starts with the first one.

    Args:
        timeout: how long a host may be silent, in seconds.
        connections: returns the connections that are open now.
    """

    def __init__(self, timeout: float, connections: Callable[[], Iterable[Watched]]) -> None:
        self._timeout = timeout
        self._connections = connections
        self._closed = Event()
        otherwise = "silent hosts are not noticed"  # the next connection tries again
        self._thread = SingleThread(self._run, "rayrpc-silence", otherwise)

    def add(self, connection: socket.socket) -> None:
        """Probe a connection from now on, and watch it; nothing happens if it is not of TCP."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        keep_alive(connection, self._timeout)
        if not self._closed.is_set():
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._timeout / CHECKS):
            # a function, so that no variable keeps a connection alive while the thread waits
            self._check()

    def _check(self) -> None:
        for connection in self._connections():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                tcp = connection.tcp
                seconds = silent_seconds(tcp) if tcp is not None else 0.0
                if seconds > self._timeout:
                    connection.break_off(f"its host has not answered for {seconds:.0f} s")
