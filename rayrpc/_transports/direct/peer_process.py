"""The process at the other end of a UNIX socket: its id, what it has read, whether it has ended."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios

import psutil

__all__ = ["has_ended", "has_unread", "pid_of_peer"]

_CREDENTIALS = struct.Struct("3i")  # Linux's struct ucred: process, user, group


def pid_of_peer(connection: socket.socket) -> int | None:
    """Return the id of the process that listens at the other end of a connected socket.

    Returns:
        None if the kernel does not know it: the socket is no UNIX socket, the system is not Linux,
        or the process is in a PID namespace that this one does not see.
    """
    if connection.family != getattr(socket, "AF_UNIX", None) or not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid or None


def has_unread(connection: socket.socket) -> bool:
    """Tell whether a UNIX socket's peer has not read all that was written."""
    count = bytearray(4)
    try:
        fcntl.ioctl(connection, termios.TIOCOUTQ, count)
    except (OSError, ValueError):
        return False  # it was closed
    return any(count)


def has_ended(pid: int) -> bool:
    """Tell whether a process has ended; a zombie has, too."""
    with contextlib.suppress(psutil.AccessDenied):
        try:
            return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True
    return False
