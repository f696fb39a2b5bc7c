"""Messages on a connection: their format, and the bytes of those to send.

    number (8) | length of the rest (8) | length of the head (4) | kind and count (4)
    a length (8) for each buffer | number of their segment (8), if SHARED | head | buffers, if not

Sizes in bytes are in parentheses.  The number is the call's id, the head a packed ``Frame``.  An
empty head announces a large reply, which arrives by the connection for large messages.

A notice is about a segment of shared memory; it has the first line only, with the segment's number.
The receiver RELEASED the segment, or DISCARDED it, so that it is not used again, or the sender
FREED it.

All lengths must add up before memory is allocated for them; else the message is malformed, which
ends the connection.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Any, NamedTuple

from rayrpc._protocol.messages import Frame, FrameError
from rayrpc.errors import SerializationError

__all__ = [
    "DISCARDED",
    "FREED",
    "Layout",
    "Message",
    "PREFIX",
    "RELEASED",
    "SharedBuffers",
    "is_writable",
    "message_parts",
    "notice_part",
    "prepare",
    "shared_parts",
    "unpack_frame",
]

PREFIX = struct.Struct("<QQII")

# After this time a read raises TimeoutError, so that its thread checks the connection's state.
TICK_SECONDS = 0.25


# Kinds of messages, in the bits above the count of buffers.
SHARED = 1 << 31  # a message whose buffers are in shared memory
RELEASED = 1 << 30  # a notice: the receiver uses no buffer in this segment any more
FREED = 1 << 29  # a notice: the sender will not use this segment again
DISCARDED = RELEASED | FREED  # a notice: neither the receiver nor the sender shall use it again
_COUNT = FREED - 1

# Bytes of a head; their number has 4 bytes.
MAX_HEAD = (1 << 32) - 1


class SharedBuffers(NamedTuple):
    """The buffers of a message that are in shared memory: their segment's number, and lengths."""

    segment: int
    lengths: tuple[int, ...]


class Message(NamedTuple):
    """A message, or, if ``notice`` is set, a notice about the segment ``number``.

    Args:
        number (int): of the call, or of the segment.
        content (Frame | None): its frame; None: it announces a large reply, or is a notice.
        shared (SharedBuffers | None): where the buffers are that the frame does not have yet.
        notice (int): RELEASED, DISCARDED, FREED or 0.
    """

    number: int
    content: Frame | None
    shared: SharedBuffers | None = None
    notice: int = 0

    @property
    def buffers(self) -> list[Any]:
        """The buffers of the frame in it."""
        return self.frame().buffers

    def frame(self) -> Frame:
        """Return the frame in it; FrameError if there is none."""
        if self.content is None:
            raise FrameError("a message has no frame")
        return self.content


class _NumberStructs(dict[int, struct.Struct]):
    """Structs of 8-byte numbers by their count, made when they are needed."""

    def __missing__(self, count: int) -> struct.Struct:
        made = struct.Struct(f"<{count}Q")
        if count < 256:  # larger counts are rare
            self[count] = made
        return made


_NUMBERS = _NumberStructs()


def message_parts(call_id: int, head: bytes, views: list[memoryview]) -> list[Any]:
    """Return the bytes of a message with its buffers, in parts.

    Raises:
        SerializationError: the head is too long for a message.
    """
    if len(head) > MAX_HEAD:
        raise SerializationError(f"a message of {len(head)} bytes beside its buffers is too long")
    if not views:
        return [PREFIX.pack(call_id, len(head), len(head), 0) + head]
    lengths = [view.nbytes for view in views]
    sizes = _NUMBERS[len(views)].pack(*lengths)
    length = len(sizes) + len(head) + sum(lengths)
    front = PREFIX.pack(call_id, length, len(head), len(views)) + sizes + head
    return [front, *filter(len, views)]


def shared_parts(call_id: int, head: bytes, shared: SharedBuffers) -> list[Any]:
    """Return the bytes of a message whose buffers are in shared memory, in parts."""
    count = len(shared.lengths)
    front = _NUMBERS[count + 1].pack(*shared.lengths, shared.segment)
    prefix = PREFIX.pack(call_id, len(front) + len(head), len(head), count | SHARED)
    return [prefix + front + head]


def notice_part(number: int, notice: int) -> bytes:
    """Return the bytes of a notice about a segment."""
    return PREFIX.pack(number, 0, 0, notice)


def prepare(connection: socket.socket, tick: float = TICK_SECONDS) -> None:
    """Set a connection's options.

    Args:
        connection: a socket; from now on it blocks, and sends small messages at once.
        tick: after how long a read times out, in seconds.
    """
    connection.setblocking(True)
    seconds = int(tick)
    timeval = struct.pack("@ll", seconds, int((tick - seconds) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def is_writable(connection: socket.socket, seconds: float | None) -> bool:
    """Wait until a connection takes more bytes; return False if it does not in time."""
    try:
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        return bool(poll.poll(None if seconds is None else seconds * 1000))
    except (OSError, ValueError):
        return True  # it was closed; the next write fails


class Layout:
    """The parts of a message with buffers, by its first line.

    Args:
        length (int): number of bytes after the first line.
        head_length (int): number of bytes of the head.
        kind (int): kind of the message, and count of its buffers.

    Raises:
        FrameError: the kind is unknown, or the parts are longer than the whole.
    """

    __slots__ = ("_is_shared", "_length", "_numbers", "front_length", "head_length")

    def __init__(self, length: int, head_length: int, kind: int) -> None:
        count = kind & _COUNT
        self._is_shared = kind == count | SHARED
        if kind != count and not (self._is_shared and count):
            raise FrameError(f"a message has the unknown kind {kind:#x}")
        if not head_length:
            raise FrameError("a message has no head")
        self._length = length
        self.head_length = head_length
        numbers = count + self._is_shared
        #: number of bytes of the numbers and the head
        self.front_length = 8 * numbers + head_length
        rest = length - self.front_length
        if rest < 0 or (rest and (self._is_shared or not count)):
            raise FrameError("the lengths in a message do not add up")
        self._numbers = _NUMBERS[numbers]

    def read(self, number: int, data: Any, position: int) -> tuple[Message, tuple[int, ...]]:
        """Return the message at ``position``, without its buffers, and the lengths of its buffers.

        Raises:
            FrameError: its lengths do not add up, or its frame is malformed.
        """
        numbers = self._numbers.unpack_from(data, position)
        start = position + self._numbers.size
        shared = None
        if self._is_shared:
            shared = SharedBuffers(numbers[-1], numbers[:-1])
            numbers = ()
        elif self.front_length + sum(numbers) != self._length:
            raise FrameError("the lengths in a message do not add up")
        content = unpack_frame(number, data[start : start + self.head_length])
        return Message(number, content, shared), numbers


def unpack_frame(number: int, head: Any) -> Frame:
    """Return the frame of a message.

    Raises:
        FrameError: it is malformed, or another message's.
    """
    frame = Frame.unpack(head)
    if frame.call_id != number:
        raise FrameError(f"a message with the number {number} has the frame of another")
    return frame
