"""Messages on a connection: their format, and how they are read and written.

    number (8) | length of the rest (8) | length of the head (4) | kind and count (4)
    a length (8) for each buffer | number of their segment (8), if SHARED | head | buffers, if not

The number is the call's, the head a packed ``Frame``; an empty head announces that the reply comes
by another transport.  Beside messages there are notices about a segment of shared memory, of the
first line only, with the segment's number: the receiver RELEASED it, or the sender FREED it.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Any, NamedTuple

from rayrpc._protocol.messages import Frame

__all__ = [
    "FREED",
    "Message",
    "MessageReader",
    "RELEASED",
    "SharedBuffers",
    "message_parts",
    "notice_part",
    "prepare",
    "shared_parts",
]

_PREFIX = struct.Struct("<QQII")

# Size of a connection's receive buffer; larger messages are received into memory of their own.
CAPACITY = 64 * 1024
# After this time a read raises TimeoutError, so that its thread checks the connection's state.
TICK_SECONDS = 0.25


# Kinds, in the bits above the count of buffers.
SHARED = 1 << 31  # a message whose buffers are in shared memory
RELEASED = 1 << 30  # a notice: the receiver uses no buffer in this segment any more
FREED = 1 << 29  # a notice: the sender will not use this segment again
_COUNT = FREED - 1

NO_BUFFERS: list[Any] = []  # never changed; a frame makes a list of its own


class SharedBuffers(NamedTuple):
    """The buffers of a message that are in shared memory: their segment's number, and lengths."""

    segment: int
    lengths: tuple[int, ...]


class Message(NamedTuple):
    """A message, or, if ``notice`` is set, a notice about the segment ``number``."""

    number: int
    head: bytes
    buffers: list[Any]
    shared: SharedBuffers | None = None
    notice: int = 0

    def frame(self) -> Frame:
        """Return the frame in it."""
        return Frame.unpack(self.head, self.buffers)


class _NumberStructs(dict[int, struct.Struct]):
    """Structs of 8-byte numbers by their count, made when they are needed."""

    def __missing__(self, count: int) -> struct.Struct:
        made = struct.Struct(f"<{count}Q")
        if count < 256:  # larger counts are rare
            self[count] = made
        return made


_NUMBERS = _NumberStructs()


def message_parts(call_id: int, head: bytes, views: list[memoryview]) -> list[Any]:
    """Return the bytes of a message with its buffers, in parts."""
    if not views:
        return [_PREFIX.pack(call_id, len(head), len(head), 0) + head]
    lengths = [view.nbytes for view in views]
    sizes = _NUMBERS[len(views)].pack(*lengths)
    length = len(sizes) + len(head) + sum(lengths)
    front = _PREFIX.pack(call_id, length, len(head), len(views)) + sizes + head
    return [front, *filter(len, views)]


def shared_parts(call_id: int, head: bytes, shared: SharedBuffers) -> list[Any]:
    """Return the bytes of a message whose buffers are in shared memory, in parts."""
    count = len(shared.lengths)
    front = _NUMBERS[count + 1].pack(*shared.lengths, shared.segment)
    prefix = _PREFIX.pack(call_id, len(front) + len(head), len(head), count | SHARED)
    return [prefix + front + head]


def notice_part(number: int, notice: int) -> bytes:
    """Return the bytes of a notice about a segment."""
    return _PREFIX.pack(number, 0, 0, notice)


def prepare(connection: socket.socket, tick: float = TICK_SECONDS) -> None:
    """Set a connection's options.

    Args:
        connection: blocking from now on; small messages are sent at once.
        tick: after how many seconds a read times out.
    """
    connection.setblocking(True)
    seconds = int(tick)
    timeval = struct.pack("@ll", seconds, int((tick - seconds) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _numbers_of(kind: int) -> struct.Struct:
    """Return the struct of the numbers before the head."""
    return _NUMBERS[(kind & _COUNT) + bool(kind & SHARED)]


def _read_front(
    data: Any, position: int, head_length: int, kind: int
) -> tuple[bytes, tuple[int, ...], SharedBuffers | None]:
    """Return the head, and the lengths of the buffers that follow, or the shared buffers."""
    layout = _numbers_of(kind)
    numbers = layout.unpack_from(data, position)
    position += layout.size
    head = bytes(data[position : position + head_length])
    if kind & SHARED:
        return head, (), SharedBuffers(numbers[-1], numbers[:-1])
    return head, numbers, None


class _LargeMessage:
    """A message that is being received into memory of its own."""

    def __init__(self, number: int, head_length: int, kind: int) -> None:
        self.number = number
        self.head_length = head_length
        self.kind = kind
        self.data = bytearray(_numbers_of(kind).size + head_length)
        self.head = b""
        self.shared: SharedBuffers | None = None
        self.buffers: list[bytearray] | None = None
        self.missing = [memoryview(self.data)]  # in reverse order

    def is_whole(self) -> bool:
        """Tell whether it was received; allocate the buffers once their lengths are known."""
        if self.missing:
            return False
        if self.buffers is None:
            self.head, lengths, self.shared = _read_front(self.data, 0, self.head_length, self.kind)
            self.buffers = [bytearray(length) for length in lengths]
            self.missing = [memoryview(buffer) for buffer in reversed(self.buffers) if buffer]
        return not self.missing

    def message(self) -> Message:
        """Return the message."""
        return Message(self.number, self.head, self.buffers or [], self.shared)


class MessageReader:
    """Read messages from a connection; by one thread at a time.

    Args:
        connection (socket): prepared.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._bytes = bytearray(CAPACITY)
        self._view = memoryview(self._bytes)
        self._start = 0
        self._end = 0
        self._large: _LargeMessage | None = None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    @property
    def has_more(self) -> bool:
        """Tell whether bytes were received that were not read yet."""
        return self._end > self._start

    def wait(self, seconds: float) -> bool:
        """Tell whether there are bytes to read within ``seconds``."""
        return self._end > self._start or bool(self._poll.poll(seconds * 1000))

    def read(self) -> Message:
        """Return the next message.

        Raises:
            TimeoutError: it did not arrive within a tick; call again.
            EOFError: the connection has ended.
        """
        if self._large is None:
            if self._end - self._start < _PREFIX.size:
                self._fill(_PREFIX.size)
            number, length, head_length, kind = _PREFIX.unpack_from(self._bytes, self._start)
            if _PREFIX.size + length <= CAPACITY:
                if self._end - self._start < _PREFIX.size + length:
                    self._fill(_PREFIX.size + length)
                position = self._start + _PREFIX.size
                self._start = position + length
                if kind == 0:
                    return Message(number, bytes(self._view[position : self._start]), NO_BUFFERS)
                return self._take(position, number, head_length, kind)
            self._start += _PREFIX.size
            self._large = _LargeMessage(number, head_length, kind)
        while not self._large.is_whole():
            self._fill_large(self._large)
        message = self._large.message()
        self._large = None
        return message

    def _take(self, position: int, number: int, head_length: int, kind: int) -> Message:
        if kind in (RELEASED, FREED):
            return Message(number, b"", [], None, kind)
        head, lengths, shared = _read_front(self._view, position, head_length, kind)
        position = self._start - sum(lengths)
        buffers = []
        for length in lengths:
            buffers.append(self._bytes[position : position + length])
            position += length
        return Message(number, head, buffers, shared)

    def _fill(self, needed: int) -> None:
        """Receive until ``needed`` bytes are in the receive buffer."""
        have = self._end - self._start
        if have == 0:
            self._start = self._end = 0
        elif self._start + needed > CAPACITY:
            self._bytes[:have] = self._bytes[self._start : self._end]
            self._start, self._end = 0, have
        while self._end - self._start < needed:
            self._end += self._receive(self._view[self._end :])

    def _fill_large(self, large: _LargeMessage) -> None:
        view = large.missing[-1]
        have = min(len(view), self._end - self._start)
        if have:
            view[:have] = self._view[self._start : self._start + have]
            self._start += have
        else:
            have = self._receive(view)
        if have == len(view):
            large.missing.pop()
        else:
            large.missing[-1] = view[have:]

    def _receive(self, view: memoryview) -> int:
        try:
            count = self._connection.recv_into(view)
        except BlockingIOError:
            raise TimeoutError from None
        except OSError as exc:
            raise EOFError(str(exc)) from None
        if count == 0:
            raise EOFError("the peer closed it")
        return count
