"""One end of a connection: frames in and out, large ones by shared memory."""

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
    FREED,
    RELEASED,
    Message,
    MessageReader,
    SharedBuffers,
    message_parts,
    notice_part,
    shared_parts,
)

__all__ = ["Stream"]

# The buffers of a message are shared, where that is possible, from this many bytes in all.
SHARED_BYTES = 64 << 10


class Stream:
    """Read messages (one thread at a time), and send frames (any thread).

    Args:
        connection (socket): authenticated and prepared.
        threads (ThreadCache): for writes to a peer that does not read.
        on_broken (Callable): called when the connection has ended, with the ids of the calls of
            which no byte was sent.
        opened_here (bool): this end made the connection.
    """

    def __init__(
        self,
        connection: socket.socket,
        threads: ThreadCache,
        on_broken: Callable[[list[int]], None],
        opened_here: bool,
    ) -> None:
        self._connection = connection
        self._reader = MessageReader(connection)
        self._send_queue = SendQueue(connection, threads, on_broken)
        self._mapped = MappedSegments(
            lambda number: self._send_queue.piggyback(notice_part(number, RELEASED))
        )
        self._pool: SegmentPool | None = None
        self._descriptors: socket.socket | None = None  # a socket for the segments' descriptors
        if connection.family == getattr(socket, "AF_UNIX", None) and is_supported():
            self._pool = SegmentPool(self._send_segment)
            if opened_here:
                self._descriptors, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with other, contextlib.suppress(OSError):  # then the first read fails
                    send_descriptor(connection, b"\0", other.fileno())
        self.wait = self._reader.wait
        self.flush = self._send_queue.flush

    @property
    def shares_memory(self) -> bool:
        """Tell whether large buffers are sent by shared memory."""
        return self._pool is not None

    @property
    def is_idle(self) -> bool:
        """Tell whether all messages were written, and the connection has not ended."""
        return self._send_queue.is_empty

    @property
    def has_more(self) -> bool:
        """Tell whether bytes were received that were not read yet."""
        return self._reader.has_more

    def read(self) -> Message:
        """Return the next message; send what was held back before waiting for it.

        Raises:
            TimeoutError: it did not arrive within a tick; call again.
            EOFError: the connection has ended.
        """
        reader = self._reader
        if self._descriptors is None and self._pool is not None:
            self._descriptors = self._receive_descriptor_socket()
        if not reader.has_more:
            self.flush()
        while True:
            message = reader.read()
            if message.notice == RELEASED:
                self._reuse(message.number)
            elif message.notice == FREED:
                self._mapped.unmap(message.number)
            elif (shared := message.shared) is None:
                return message
            else:
                return Message(message.number, message.head, self._buffers(shared), shared)

    def send(
        self, call_id: int, frame: Frame | None, more: bool = False, release_buffers: bool = False
    ) -> bool:
        """Send a frame.

        Args:
            call_id: of its call.
            frame: None: announce that the reply comes by another transport.
            more: hold it back for a while: others are likely to follow at once.
            release_buffers: empty the frame's buffers as soon as they are copied.

        Returns:
            True if it was written; else it may be, or will be.
        """
        head = b"" if frame is None else frame.pack()
        if frame is None or not frame.buffers:
            return self._send_queue.send(call_id, message_parts(call_id, head, []), more)
        views = [flat(buffer) for buffer in frame.buffers]
        lengths = tuple(view.nbytes for view in views)
        segment = None
        if self._pool is not None and sum(lengths) >= SHARED_BYTES:
            starts, size = offsets(lengths)
            with contextlib.suppress(OSError):  # no memory, or too many are in use
                segment = self._pool.acquire(size)
        if segment is None:
            return self._send_queue.send(call_id, message_parts(call_id, head, views), more)
        segment.fill(views, starts)
        if release_buffers:
            frame.buffers = []
            views.clear()
        return self._send_queue.send(
            call_id, shared_parts(call_id, head, SharedBuffers(segment.number, lengths))
        )

    def trim(self) -> None:
        """Free memory that was not used for a while."""
        if self._pool is not None:
            for number in self._pool.trim():
                self._send_queue.piggyback(notice_part(number, FREED))
            self._send_queue.flush_piggybacked()

    def close(self) -> None:
        """End the connection, and free its memory."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self.close_after_fork()
        if self._pool is not None:
            self._pool.close()

    def close_after_fork(self) -> None:
        """Close the descriptors, which may be a forked child's copies."""
        self._connection.close()
        if self._descriptors is not None:
            self._descriptors.close()

    # -- shared memory ------------------------------------------------------------------------

    def _reuse(self, number: int) -> None:
        if self._pool is not None and not self._pool.release(number):
            self._send_queue.piggyback(notice_part(number, FREED))

    def _buffers(self, shared: SharedBuffers) -> list[memoryview]:
        while not self._mapped.has(shared.segment):
            self._receive_segment()
        return self._mapped.buffers(shared.segment, shared.lengths)

    def _receive_descriptor_socket(self) -> socket.socket:
        """Receive the socket for descriptors, which precedes the first message."""
        try:
            _, descriptor = receive_descriptor(self._connection, 1)
        except BlockingIOError:
            raise TimeoutError from None
        except OSError as exc:
            raise EOFError(str(exc)) from None
        return socket.socket(fileno=descriptor)

    def _send_segment(self, number: int, capacity: int, descriptor: int) -> None:
        if self._descriptors is None:
            raise OSError("the socket for descriptors has not arrived yet")
        send_descriptor(self._descriptors, _SEGMENT.pack(number, capacity), descriptor)

    def _receive_segment(self) -> None:
        """Map a segment; its descriptor was sent before the message that uses it."""
        assert self._descriptors is not None
        try:
            flags = socket.MSG_DONTWAIT
            data, descriptor = receive_descriptor(self._descriptors, _SEGMENT.size, flags)
            number, capacity = _SEGMENT.unpack(data)
            self._mapped.map(number, descriptor, capacity)
        except (OSError, struct.error) as exc:
            raise EOFError(f"no memory could be shared: {exc}") from None


_SEGMENT = struct.Struct("<QQ")
