"""Messages on a connection: their format, and how they are read and written.

    number (8) | length of the rest (8) | length of the head (4) | kind and count (4)
    a length (8) for each buffer | number of their segment (8), if SHARED | head | buffers, if not

The number is the call's, the head a packed ``Frame``; an empty head announces that the reply comes
by another transport.  Beside messages there are notices about a segment of shared memory, of the
first line only, with the segment's number: the receiver RELEASED it, or DISCARDED it, so that it is
not used again, or the sender FREED it.

All lengths must add up before memory is allocated for them; else the message is malformed, which
ends the connection.
"""

from __future__ import annotations

import functools
import select
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rayrpc._protocol.messages import Frame, FrameError
from rayrpc.errors import SerializationError

__all__ = [
    "DISCARDED",
    "FREED",
    "Message",
    "MessageReader",
    "RELEASED",
    "SharedBuffers",
    "is_writable",
    "message_parts",
    "notice_part",
    "prepare",
    "shared_parts",
]

_PREFIX = struct.Struct("<QQII")

# Size of a connection's receive buffer; larger messages are received into memory of their own.
CAPACITY = 64 * 1024
# Bytes of a large message that one system call receives: while the system copies them, it takes in
# no packets, nor acknowledges any.
RECEIVE_BYTES = 256 * 1024
# After this time a read raises TimeoutError, so that its thread checks the connection's state.
TICK_SECONDS = 0.25


# Kinds, in the bits above the count of buffers.
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
        content (Frame | None): None: the reply comes by another transport, or it is a notice.
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


def is_writable(connection: socket.socket, seconds: float | None) -> bool:
    """Wait until a connection takes more bytes; return False if it does not in time."""
    try:
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        return bool(poll.poll(None if seconds is None else seconds * 1000))
    except (OSError, ValueError):
        return True  # it was closed; the next write fails


Allocate = Callable[[int], Any]


def _new_memory(size: int) -> Any:
    """Return memory for ``size`` bytes; the system provides large memory as it is filled."""
    return np.empty(size, np.uint8).data


def _allocate(size: int, allocate: Allocate) -> Any:
    """Return memory for a part of a large message."""
    if size < CAPACITY:
        return bytearray(size)
    try:
        return allocate(size)
    except (MemoryError, ValueError, OverflowError) as exc:
        raise FrameError(f"a message needs {size} bytes of memory: {exc}") from None


class _Layout:
    """The parts of a message with buffers, by its first line.

    Args:
        length (int): of all after the first line.
        head_length (int): of the head.
        kind (int): kind and count of buffers.

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
        #: length of the numbers and the head
        self.front_length = 8 * numbers + head_length
        rest = length - self.front_length
        if rest < 0 or (rest and (self._is_shared or not count)):
            raise FrameError("the lengths in a message do not add up")
        self._numbers = _NUMBERS[numbers]

    def read(self, number: int, data: Any, position: int) -> tuple[Message, tuple[int, ...]]:
        """Return the message at ``position``, without buffers, and the lengths of these.

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
        content = _unpack(number, data[start : start + self.head_length])
        return Message(number, content, shared), numbers


def _unpack(number: int, head: Any) -> Frame:
    frame = Frame.unpack(head)
    if frame.call_id != number:
        raise FrameError(f"a message with the number {number} has the frame of another")
    return frame


class _LargeMessage:
    """A message that is being received into memory of its own."""

    def __init__(self, number: int, layout: _Layout, allocate: Allocate) -> None:
        self._number = number
        self._layout = layout
        self._allocate = allocate
        front = _allocate(layout.front_length, _new_memory)
        # what is received now: the front, and then the buffers of the message; memory that is not
        # filled yet, in reverse order
        self._parts: tuple[Any, Message | None, list[memoryview]] = front, None, [memoryview(front)]

    @property
    def missing(self) -> list[memoryview]:
        """The memory that is to be filled, in reverse order."""
        return self._parts[-1]

    def message(self) -> Message | None:
        """Return the message; None while there is memory to be filled for it."""
        front, message, missing = self._parts
        if missing:
            return None
        if message is None:
            message, lengths = self._layout.read(self._number, memoryview(front), 0)
            buffers = [_allocate(length, self._allocate) for length in lengths]
            message.frame().buffers = buffers
            missing = [memoryview(buffer) for buffer in reversed(buffers) if len(buffer)]
            self._parts = b"", message, missing
        return None if missing else message


def _has_none() -> bool:
    return False


def _do_nothing() -> None:
    pass


class MessageReader:
    """Read messages from a connection; by one thread at a time.

    An interrupt, such as Ctrl-C, may strike the thread at any point: the next ``read``, in another
    thread, goes on where it came.  Python raises it after a call, or as one begins: so what is read
    changes without a call in between, and ``is_intact`` is False meanwhile.

    Args:
        connection (socket): prepared; ``poll`` does not report all bytes of a TlsSocket.
        allocate (Callable): returns the memory of a large buffer, by its size in bytes.
        before_wait (Callable): called before each wait for bytes.
    """

    def __init__(
        self,
        connection: socket.socket,
        allocate: Allocate = _new_memory,
        before_wait: Callable[[], object] = _do_nothing,
    ) -> None:
        self._allocate = allocate
        self._before_wait = before_wait
        self._receive_into: Callable[[Any], int] = connection.recv_into
        self._receive_all: Callable[[Any], int] = connection.recv_into
        if type(connection) is socket.socket:
            self._receive_all = functools.partial(connection.recv_into, flags=socket.MSG_WAITALL)
        self._has_pending: Callable[[], bool] = getattr(connection, "has_pending", _has_none)
        self._bytes = bytearray(CAPACITY)
        self._view = memoryview(self._bytes)
        self._start = 0
        self._end = 0
        self._large: _LargeMessage | None = None
        self._received: list[int] = []  # counts of bytes that were not added yet; at most one
        self._current: Message | None = None  # was read, and is not handled
        #: nothing is lost by an exception now
        self.is_intact = True
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    @property
    def has_more(self) -> bool:
        """Tell whether there are bytes that were not read, or a message that is not handled."""
        return self._end > self._start or bool(self._received) or self._current is not None

    @property
    def is_between_messages(self) -> bool:
        """Tell whether nothing of the next message was received."""
        return self._large is None and not self.has_more and not self._has_pending()

    def handled(self) -> None:
        """Go on to the next message."""
        self._current = None
        self.is_intact = True

    def wait(self, seconds: float) -> bool:
        """Tell whether there are bytes to read within ``seconds``."""
        if self.has_more or self._has_pending():
            return True
        return bool(self._poll.poll(seconds * 1000))

    def read(self) -> Message:
        """Return the next message; the same one until ``handled`` is called.

        Raises:
            TimeoutError: it did not arrive within a tick; call again.
            EOFError: the connection has ended, or must (FrameError): do not call again.
        """
        if self._current is not None:
            return self._current
        if self._received:
            self._add_received()
        if self._large is None:
            if self._end - self._start < _PREFIX.size:
                self._fill(_PREFIX.size)
            number, length, head_length, kind = _PREFIX.unpack_from(self._bytes, self._start)
            if _PREFIX.size + length <= CAPACITY:
                if self._end - self._start < _PREFIX.size + length:
                    self._fill(_PREFIX.size + length)
                position = self._start + _PREFIX.size
                end = position + length
                if kind == 0 and length == head_length:
                    head = self._view[position:end]
                    message = Message(number, _unpack(number, head) if length else None)
                else:
                    message = self._take(position, number, length, head_length, kind)
                self.is_intact = False
                self._start = end
                self._current = message
                self.is_intact = True
                return message
            large = _LargeMessage(number, _Layout(length, head_length, kind), self._allocate)
            self.is_intact = False
            self._start += _PREFIX.size
            self._large = large
            self.is_intact = True
        while (whole := self._large.message()) is None:
            self._fill_large(self._large.missing)
        self.is_intact = False
        self._large = None
        self._current = whole
        self.is_intact = True
        return whole

    def _take(
        self, position: int, number: int, length: int, head_length: int, kind: int
    ) -> Message:
        if kind in (RELEASED, FREED, DISCARDED) and length == head_length == 0:
            return Message(number, None, None, kind)
        layout = _Layout(length, head_length, kind)
        message, lengths = layout.read(number, self._view, position)
        position += layout.front_length
        buffers = message.frame().buffers
        for length in lengths:
            buffers.append(self._bytes[position : position + length])
            position += length
        return message

    def _fill(self, needed: int) -> None:
        """Receive until ``needed`` bytes are in the receive buffer."""
        have = self._end - self._start
        self.is_intact = False
        if have == 0:
            self._start = self._end = 0
        elif self._start + needed > CAPACITY:
            self._bytes[:have] = self._bytes[self._start : self._end]
            self._start, self._end = 0, have
        self.is_intact = True
        while self._end - self._start < needed:
            self._receive(self._receive_into, self._view[self._end :])
            self._add_received()

    def _fill_large(self, missing: list[memoryview]) -> None:
        view = missing[-1]
        have = min(len(view), self._end - self._start)
        if have:
            start = self._start + have
            view[:have] = self._view[self._start : start]
            self._note_filled(missing, have, start, self._received)
        else:
            self._receive(self._receive_all, view[:RECEIVE_BYTES])
            self._add_received()

    def _receive(self, receive: Callable[[Any], int], view: memoryview) -> None:
        """Receive bytes; ``_add_received`` follows."""
        self._before_wait()
        try:
            # One call in C: an interrupt comes while it waits, or after it stored the count.
            self._received.extend(map(receive, (view,)))
        except BlockingIOError:
            raise TimeoutError from None
        except OSError as exc:
            raise EOFError(str(exc)) from None

    def _add_received(self) -> None:
        """Note that the bytes are in the receive buffer, or in the large message."""
        count = self._received[0]
        if count == 0:
            raise EOFError("the peer closed it")
        if self._large is not None:
            self._note_filled(self._large.missing, count, self._start, [])
            return
        self.is_intact = False
        self._end += count
        self._received = []
        self.is_intact = True

    def _note_filled(
        self, missing: list[memoryview], count: int, start: int, received: list[int]
    ) -> None:
        """Note that missing memory was filled, from the receive buffer or by the connection.

        Args:
            missing: of a large message.
            count: of the bytes.
            start: of the rest of the receive buffer.
            received: what was received, and not added.
        """
        rest = missing[-1][count:]
        is_full = len(rest) == 0
        self.is_intact = False
        self._start, self._received = start, received
        if is_full:
            del missing[-1]
        else:
            missing[-1] = rest
        self.is_intact = True
