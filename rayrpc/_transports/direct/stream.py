"""One end of a connection's connection: frames in and out, large ones by shared memory."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable

from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.messages import Frame, flat
from rayrpc._transports.direct.send_queue import SendQueue
from rayrpc._transports.direct.shared_memory import (
    MappedSegments,
    SegmentPool,
    is_supported,
    offsets,
    receive_descriptor,
    send_descriptor,
)
from rayrpc._transports.direct.wire import (
    DROPPED,
    UNUSED,
    Message,
    MessageReader,
    Place,
    message_parts,
    note_part,
    shared_parts,
)

__all__ = ["Stream"]

# Buffers of this many bytes in all are shared where that is possible.
SHARED_BYTES = 64 << 10


class Stream:
    """Read messages (one thread at a time), and send frames (any thread).

    Args:
        connection (socket): authenticated and prepared.
        threads (ThreadCache): where what a peer does not read yet waits.
        broken (Callable): called with the ids of calls that no byte was sent of, once the
            connection has ended.
        opened_here (bool): this end made the connection.
    """

    def __init__(
        self,
        connection: socket.socket,
        threads: ThreadCache,
        broken: Callable[[list[int]], None],
        opened_here: bool,
    ) -> None:
        self._connection = connection
        self._reader = MessageReader(connection)
        self._send_queue = SendQueue(connection, threads, broken)
        self._mapped = MappedSegments(
            lambda number: self._send_queue.note(note_part(number, UNUSED))
        )
        self._pool: SegmentPool | None = None
        self._side: socket.socket | None = None  # where descriptors of segments come and go
        if connection.family == getattr(socket, "AF_UNIX", None) and is_supported():
            self._pool = SegmentPool(self._pass_on)
            if opened_here:
                self._side, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with other, contextlib.suppress(OSError):  # the first read tells
                    send_descriptor(connection, b"\0", other.fileno())
        self.wait = self._reader.wait
        self.flush = self._send_queue.flush

    @property
    def shares_memory(self) -> bool:
        """Tell whether large buffers go by shared memory."""
        return self._pool is not None

    @property
    def is_idle(self) -> bool:
        """Tell whether all was written, and the connection has not ended."""
        return self._send_queue.is_empty

    @property
    def has_more(self) -> bool:
        """Tell whether something arrived that was not read yet."""
        return self._reader.has_more

    def read(self) -> Message:
        """Return the next message; before it waits for one, send what was kept back.

        Raises:
            TimeoutError: it is not there after a tick; call again.
            EOFError: the connection has ended.
        """
        inbox = self._reader
        if self._side is None and self._pool is not None:
            self._side = self._receive_side()
        if not inbox.has_more:
            self.flush()
        while True:
            message = inbox.read()
            if message.note == UNUSED:
                self._reuse(message.number)
            elif message.note == DROPPED:
                self._mapped.drop(message.number)
            elif (place := message.place) is None:
                return message
            else:
                return Message(message.number, message.head, self._buffers(place), place)

    def send(
        self, call_id: int, frame: Frame | None, more: bool = False, give_up: bool = False
    ) -> bool:
        """Send a frame.

        Args:
            call_id: of its call.
            frame: None: the note that the reply comes by another way.
            more: keep it back for a while: others are likely to follow at once.
            give_up: let go of the frame's buffers as soon as they are copied.

        Returns:
            It was written; else it may be, or will be.
        """
        head = b"" if frame is None else frame.pack()
        if frame is None or not frame.buffers:
            return self._send_queue.send(call_id, message_parts(call_id, head, []), more)
        views = [flat(buffer) for buffer in frame.buffers]
        lengths = tuple(view.nbytes for view in views)
        segment = None
        if self._pool is not None and sum(lengths) >= SHARED_BYTES:
            starts, size = offsets(lengths)
            with contextlib.suppress(OSError):  # no memory for one more, or many are on their way
                segment = self._pool.take(size)
        if segment is None:
            return self._send_queue.send(call_id, message_parts(call_id, head, views), more)
        segment.fill(views, starts)
        if give_up:
            frame.buffers = []
            views.clear()
        return self._send_queue.send(
            call_id, shared_parts(call_id, head, Place(segment.number, lengths))
        )

    def trim(self) -> None:
        """Let go of memory that was not used for a while."""
        if self._pool is not None:
            for number in self._pool.trim():
                self._send_queue.note(note_part(number, DROPPED))
            self._send_queue.flush_notes()

    def close(self) -> None:
        """End the connection, and let go of its memory."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self.close_after_fork()
        if self._pool is not None:
            self._pool.close()

    def close_after_fork(self) -> None:
        """Close the descriptors, which may be a forked child's copies."""
        self._connection.close()
        if self._side is not None:
            self._side.close()

    # -- shared memory ------------------------------------------------------------------------

    def _reuse(self, number: int) -> None:
        if self._pool is not None and not self._pool.give_back(number):
            self._send_queue.note(note_part(number, DROPPED))

    def _buffers(self, place: Place) -> list[memoryview]:
        while not self._mapped.has(place.segment):
            self._receive_segment()
        return self._mapped.buffers(place.segment, place.lengths)

    def _receive_side(self) -> socket.socket:
        """Take the end of the side channel that comes before the first message."""
        try:
            _, descriptor = receive_descriptor(self._connection, 1)
        except BlockingIOError:
            raise TimeoutError from None
        except OSError as exc:
            raise EOFError(str(exc)) from None
        return socket.socket(fileno=descriptor)

    def _pass_on(self, number: int, capacity: int, descriptor: int) -> None:
        if self._side is None:
            raise OSError("no side channel yet")
        send_descriptor(self._side, _SEGMENT.pack(number, capacity), descriptor)

    def _receive_segment(self) -> None:
        """Map a segment; who uses one has passed its descriptor on before."""
        assert self._side is not None
        try:
            flags = socket.MSG_DONTWAIT
            data, descriptor = receive_descriptor(self._side, _SEGMENT.size, flags)
            number, capacity = _SEGMENT.unpack(data)
            self._mapped.add(number, descriptor, capacity)
        except (OSError, struct.error) as exc:
            raise EOFError(f"no memory could be shared: {exc}") from None


_SEGMENT = struct.Struct("<QQ")
