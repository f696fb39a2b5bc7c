"""One end of a lane's connection: frames in and out, large ones by shared memory."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

from rayrpc._runtime.messages import Frame
from rayrpc._runtime.threads import ThreadCache
from rayrpc._transports.lane_memory import MappedSegments, Segment, SegmentPool, is_supported, room
from rayrpc._transports.lane_wire import (
    DROPPED,
    UNUSED,
    Inbox,
    Message,
    Outbox,
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
    """

    def __init__(
        self,
        connection: socket.socket,
        threads: ThreadCache,
        broken: Callable[[list[int]], None],
    ) -> None:
        self.connection = connection
        self._inbox = Inbox(connection)
        self._outbox = Outbox(connection, threads, broken)
        self._mapped = MappedSegments(lambda number: self._outbox.note(note_part(number, UNUSED)))
        self._pool: SegmentPool | None = None
        if connection.family == getattr(socket, "AF_UNIX", None) and is_supported():
            self._pool = SegmentPool()
        self.wait = self._inbox.wait

    @property
    def shares_memory(self) -> bool:
        """Tell whether large buffers go by shared memory."""
        return self._pool is not None

    @property
    def is_idle(self) -> bool:
        """Tell whether all was written, and the connection has not ended."""
        return self._outbox.is_empty

    def read(self) -> Message:
        """Return the next message.

        Raises:
            TimeoutError: it is not there after a tick; call again.
            EOFError: the connection has ended.
        """
        while True:
            message = self._inbox.read()
            if message.place is not None:
                return message._replace(buffers=self._buffers(message.place))
            if message.note == UNUSED:
                self._reuse(message.number)
            elif message.note == DROPPED:
                self._mapped.drop(message.number)
            else:
                return message

    @property
    def has_more(self) -> bool:
        """Tell whether something arrived that was not read yet."""
        return self._inbox.has_more

    def send(self, call_id: int, frame: Frame | None, more: bool = False) -> None:
        """Send a frame.

        Args:
            call_id: of its call.
            frame: None: the note that the reply comes by another way.
            more: others are likely to follow at once.
        """
        if frame is None or not frame.buffers:
            head = b"" if frame is None else frame.pack()
            self._outbox.send(call_id, message_parts(call_id, head, []), more=more)
            return
        head = frame.pack()
        views = [memoryview(buffer).cast("B") for buffer in frame.buffers]
        lengths = tuple(view.nbytes for view in views)
        segment = self._segment(lengths)
        if segment is None:
            self._outbox.send(call_id, message_parts(call_id, head, views), more=more)
            return
        segment.fill(views)
        parts = shared_parts(call_id, head, Place(segment.number, segment.capacity, lengths))
        self._outbox.send(call_id, parts, segment.descriptor)

    def close(self) -> None:
        """End the connection, and let go of its memory."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        if self._pool is not None:
            self._pool.close()
        while self._inbox.descriptors:
            os.close(self._inbox.descriptors.popleft())

    def _segment(self, lengths: tuple[int, ...]) -> Segment | None:
        if self._pool is None or sum(lengths) < SHARED_BYTES:
            return None
        try:
            return self._pool.take(room(lengths))
        except OSError:  # no memory or no descriptor for one more
            return None

    def _reuse(self, number: int) -> None:
        if self._pool is not None and not self._pool.give_back(number):
            self._outbox.note(note_part(number, DROPPED))

    def _buffers(self, place: Place) -> list[memoryview]:
        if not self._mapped.has(place.segment):
            descriptor = self._inbox.descriptors.popleft()
            self._mapped.add(place.segment, descriptor, place.capacity)
        return self._mapped.buffers(place.segment, place.lengths)
