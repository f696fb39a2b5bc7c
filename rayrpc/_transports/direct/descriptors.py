"""Send and receive the descriptors of segments, by a second socket beside a connection.

The end that opened the connection makes a pair of such sockets, keeps one, and sends the other with
the first byte of the connection.
"""

from __future__ import annotations

import os
import socket
import struct

from rayrpc._protocol.messages import FrameError

__all__ = ["receive_descriptor", "receive_socket", "send_descriptor"]


def send_descriptor(connection: socket.socket, data: bytes, descriptor: int) -> None:
    """Send a descriptor along with a packet; OSError if that would block."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))
    connection.sendmsg([data], [rights], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive_descriptor(connection: socket.socket, size: int, flags: int = 0) -> tuple[bytes, int]:
    """Return the next packet and its descriptor.

    Raises:
        BlockingIOError: no packet has arrived.
        OSError: the peer closed the connection, or sent no descriptor.
    """
    flags |= socket.MSG_CMSG_CLOEXEC
    data, extra, _, _ = connection.recvmsg(size, socket.CMSG_SPACE(struct.calcsize("i")), flags)
    for level, kind, rights in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return data, struct.unpack("i", rights)[0]
    raise OSError("the packet has no descriptor" if data else "the peer closed it")


def receive_socket(connection: socket.socket) -> socket.socket:
    """Receive the socket for descriptors, which precedes the first message.

    Raises:
        TimeoutError: it has not arrived.
        EOFError: the connection has ended, or the peer sent no socket (FrameError).
    """
    try:
        _, descriptor = receive_descriptor(connection, 1)
    except BlockingIOError:
        raise TimeoutError from None
    except (OSError, struct.error) as exc:
        raise EOFError(str(exc)) from None
    try:
        return socket.socket(fileno=descriptor)
    except OSError as exc:
        os.close(descriptor)
        raise FrameError(f"it began with a descriptor that is no socket: {exc}") from None
