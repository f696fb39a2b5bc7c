"""Messages on a connection: how they lie there, and how they are read and written.

    number (8) | length of what follows (8) | length of the head (4) | kind and count (4)
    a length (8) for each buffer | where they lie (8), if not here | head | buffers, if here

The number is the call's, the head a packed ``Frame``; an empty one says that the reply comes by
another way.  Beside messages, there are notes on a segment of shared memory, which have no more
than a number: the receiver needs it no longer, or the sender has let go of it.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Any, NamedTuple

from rayrpc._protocol.messages import Frame

__all__ = [
    "DROPPED",
    "Message",
    "MessageReader",
    "Place",
    "UNUSED",
    "message_parts",
    "note_part",
    "prepare",
    "shared_parts",
]

_PREFIX = struct.Struct("<QQII")

# What one connection reads at once; larger messages are read into memory of their own.
CAPACITY = 64 * 1024
# How long a read waits before it looks whether it still should.
TICK_SECONDS = 0.25


# Kinds, in the bits above the count of buffers.
SHARED = 1 << 31  # a message whose buffers lie in shared memory
UNUSED = 1 << 30  # a note: nothing lies in this segment of yours any more
DROPPED = 1 << 29  # a note: this segment of mine will not be used again
_COUNT = DROPPED - 1

NO_BUFFERS: list[Any] = []  # shared; a frame makes a list of its own


class Place(NamedTuple):
    """Where the buffers of a message lie: a segment's number, and their lengths."""

    segment: int
    lengths: tuple[int, ...]


class Message(NamedTuple):
    """What arrived: a message, or (``note`` is set) a note on the segment ``number``."""

    number: int
    head: bytes
    buffers: list[Any]
    place: Place | None = None
    note: int = 0

    def frame(self) -> Frame:
        """Return the frame in it."""
        return Frame.unpack(self.head, self.buffers)


class _Words(dict[int, struct.Struct]):
    """Structs of so many numbers, made when they are needed."""

    def __missing__(self, count: int) -> struct.Struct:
        made = struct.Struct(f"<{count}Q")
        if count < 256:  # more are rare
            self[count] = made
        return made


_WORDS = _Words()


def message_parts(call_id: int, head: bytes, views: list[memoryview]) -> list[Any]:
    """Return what to write for a message with its buffers."""
    if not views:
        return [_PREFIX.pack(call_id, len(head), len(head), 0) + head]
    lengths = [view.nbytes for view in views]
    sizes = _WORDS[len(views)].pack(*lengths)
    rest = len(sizes) + len(head) + sum(lengths)
    front = _PREFIX.pack(call_id, rest, len(head), len(views)) + sizes + head
    return [front, *filter(len, views)]


def shared_parts(call_id: int, head: bytes, place: Place) -> list[Any]:
    """Return what to write for a message whose buffers lie in shared memory."""
    count = len(place.lengths)
    front = _WORDS[count + 1].pack(*place.lengths, place.segment)
    prefix = _PREFIX.pack(call_id, len(front) + len(head), len(head), count | SHARED)
    return [prefix + front + head]


def note_part(number: int, note: int) -> bytes:
    """Return what to write for a note on a segment."""
    return _PREFIX.pack(number, 0, 0, note)


def prepare(connection: socket.socket, tick: float = TICK_SECONDS) -> None:
    """Set a connection's options: reads come back every tick, and nothing waits to be sent."""
    connection.setblocking(True)
    whole = int(tick)
    rest = int((tick - whole) * 1e6)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", whole, rest))
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _words_in(kind: int) -> struct.Struct:
    """Return the numbers that come before the head."""
    return _WORDS[(kind & _COUNT) + bool(kind & SHARED)]


def _read_front(
    data: Any, position: int, head_length: int, kind: int
) -> tuple[bytes, tuple[int, ...], Place | None]:
    """Return the head, the lengths of buffers that follow, and where they lie if they don't."""
    words = _words_in(kind)
    numbers = words.unpack_from(data, position)
    position += words.size
    head = bytes(data[position : position + head_length])
    if kind & SHARED:
        return head, (), Place(numbers[-1], numbers[:-1])
    return head, numbers, None


class _Large:
    """A message on its way into memory of its own."""

    def __init__(self, number: int, head_length: int, kind: int) -> None:
        self.number = number
        self.head_length = head_length
        self.kind = kind
        self.data = bytearray(_words_in(kind).size + head_length)
        self.head = b""
        self.place: Place | None = None
        self.buffers: list[bytearray] | None = None
        self.todo = [memoryview(self.data)]  # the last one first

    def is_whole(self) -> bool:
        """Tell whether all has arrived; make room for the buffers once their lengths have."""
        if self.todo:
            return False
        if self.buffers is None:
            self.head, lengths, self.place = _read_front(self.data, 0, self.head_length, self.kind)
            self.buffers = [bytearray(length) for length in lengths]
            self.todo = [memoryview(buffer) for buffer in reversed(self.buffers) if buffer]
        return not self.todo

    def message(self) -> Message:
        """Return it, whole."""
        return Message(self.number, self.head, self.buffers or [], self.place)


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
        self._large: _Large | None = None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    @property
    def has_more(self) -> bool:
        """Tell whether something arrived that was not read yet."""
        return self._end > self._start

    def wait(self, seconds: float) -> bool:
        """Tell whether something to read comes in time."""
        return self._end > self._start or bool(self._poll.poll(seconds * 1000))

    def read(self) -> Message:
        """Return the next message.

        Raises:
            TimeoutError: it is not there after a tick; call again.
            EOFError: the connection has ended.
        """
        if self._large is None:
            if self._end - self._start < _PREFIX.size:
                self._fill(_PREFIX.size)
            number, rest, head_length, kind = _PREFIX.unpack_from(self._bytes, self._start)
            if _PREFIX.size + rest <= CAPACITY:
                if self._end - self._start < _PREFIX.size + rest:
                    self._fill(_PREFIX.size + rest)
                position = self._start + _PREFIX.size
                self._start = position + rest
                if kind == 0:
                    return Message(number, bytes(self._view[position : self._start]), NO_BUFFERS)
                return self._take(position, number, head_length, kind)
            self._start += _PREFIX.size
            self._large = _Large(number, head_length, kind)
        while not self._large.is_whole():
            self._fill_large(self._large)
        message = self._large.message()
        self._large = None
        return message

    def _take(self, position: int, number: int, head_length: int, kind: int) -> Message:
        if kind in (UNUSED, DROPPED):
            return Message(number, b"", [], None, kind)
        head, lengths, place = _read_front(self._view, position, head_length, kind)
        position = self._start - sum(lengths)
        buffers = []
        for length in lengths:
            buffers.append(self._bytes[position : position + length])
            position += length
        return Message(number, head, buffers, place)

    def _fill(self, needed: int) -> None:
        """Have at least so many bytes of what comes next."""
        have = self._end - self._start
        if have == 0:
            self._start = self._end = 0
        elif self._start + needed > CAPACITY:
            self._bytes[:have] = self._bytes[self._start : self._end]
            self._start, self._end = 0, have
        while self._end - self._start < needed:
            self._end += self._receive(self._view[self._end :])

    def _fill_large(self, large: _Large) -> None:
        view = large.todo[-1]
        have = min(len(view), self._end - self._start)
        if have:
            view[:have] = self._view[self._start : self._start + have]
            self._start += have
        else:
            have = self._receive(view)
        if have == len(view):
            large.todo.pop()
        else:
            large.todo[-1] = view[have:]

    def _receive(self, view: memoryview) -> int:
        try:
            count = self._connection.recv_into(view)
        except BlockingIOError:
            raise TimeoutError from None
        except OSError as exc:
            raise EOFError(str(exc)) from None
        if count == 0:
            raise EOFError("it was closed")
        return count
