"""One end of a connection: frames in and out, large ones by shared memory."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.messages import Frame, FrameError, SharedForks, flat
from rayrpc._transports.direct.descriptors import (
    receive_descriptor,
    receive_socket,
    send_descriptor,
)
from rayrpc._transports.direct.mapped_segments import MappedSegments
from rayrpc._transports.direct.message_reader import MessageReader
from rayrpc._transports.direct.peer_process import has_unread
from rayrpc._transports.direct.received_memory import ReceivedMemory
from rayrpc._transports.direct.send_queue import SendQueue
from rayrpc._transports.direct.shared_memory import SegmentPool, copied, is_supported, offsets
from rayrpc._transports.direct.traffic import Traffic
from rayrpc._transports.direct.wire import (
    DISCARDED,
    FREED,
    RELEASED,
    Message,
    SharedBuffers,
    message_parts,
    notice_part,
    shared_parts,
)

__all__ = ["Stream"]

logger = logging.getLogger(__name__)

_SEGMENT = struct.Struct("<QQ")  # number and capacity of a segment, beside its descriptor

# The buffers of a message are shared, where that is possible, from this many bytes in all.
SHARED_BYTES = 64 << 10
# While the peer has not read this many bytes of replies, no more of its requests are read.
MAX_UNREAD_BYTES = 64 << 20
# How long a reader waits at a time until the peer has read them.
UNREAD_SECONDS = 0.25


class Stream:
    """Read messages (one thread at a time), and send frames (any thread).

    Args:
        connection (socket): authenticated and prepared.
        threads (ThreadCache): for writes to a peer that does not read.
        on_broken (Callable): called when the connection has ended, with the ids of the calls of
            which no byte was sent.
        opened_here (bool): this end made the connection.
        memory (ReceivedMemory | None): for large buffers that arrive by TCP; None: its own.
        traffic (Traffic | None): counts the bytes that are sent; None: they are not counted.
    """

    def __init__(
        self,
        connection: socket.socket,
        threads: ThreadCache,
        on_broken: Callable[[list[int]], None],
        opened_here: bool,
        memory: ReceivedMemory | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.socket = connection
        self._opened_here = opened_here
        self._threads = threads
        # replies are read whatever the peer does: else two peers could wait for one another
        self._max_unread = sys.maxsize if opened_here else MAX_UNREAD_BYTES
        self._held: list[Callable[[], object]] = []  # tasks, until the peer has read
        self._unread_lock = threading.Lock()
        self._shared_bytes = 0  # in segments that were sent since the peer last had read all
        self._traffic = traffic or Traffic()
        self._sent = self._traffic.open()
        self._send_queue = SendQueue(connection, threads, on_broken, self._sent)
        self.flush = self._send_queue.flush
        self.flush_later = self._send_queue.flush_later
        self._reader = MessageReader(connection, (memory or ReceivedMemory()).acquire, self.flush)
        self._mapped = MappedSegments(
            self._send_queue.piggyback,
            lambda number, reusable: notice_part(number, RELEASED if reusable else DISCARDED),
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
        self.handled = self._reader.handled

    @property
    def shares_memory(self) -> bool:
        """Tell whether large buffers are sent by shared memory."""
        return self._pool is not None

    @property
    def tcp(self) -> socket.socket | None:
        """The socket, if this is a TCP connection."""
        is_local = self.socket.family == getattr(socket, "AF_UNIX", None)
        return None if is_local else self.socket

    @property
    def is_idle(self) -> bool:
        """Tell whether all messages were written, and the connection has not ended."""
        return self._send_queue.is_empty

    @property
    def has_more(self) -> bool:
        """Tell whether there are bytes that were not read, or a message that is not handled."""
        return self._reader.has_more

    @property
    def is_between_messages(self) -> bool:
        """Tell whether nothing of the next message was received."""
        return self._reader.is_between_messages

    @property
    def is_intact(self) -> bool:
        """Tell whether reading may go on after an exception; see ``MessageReader``."""
        return self._reader.is_intact

    def handle_once(self) -> None:
        """Note that an exception before ``handled`` loses the message that was read last."""
        self._reader.is_intact = False

    @property
    def has_unread(self) -> bool:
        """Tell whether the peer has so much to read that no more of its requests are read."""
        return self.unread_bytes > self._max_unread

    @property
    def unread_bytes(self) -> int:
        """The number of bytes that the peer has not read, as far as this end knows."""
        return self._send_queue.pending_bytes + self._shared_bytes

    def read(self) -> Message:
        """Return the next message; send what was held back before waiting for it.

        The same message is returned again until ``handled`` is called.

        Raises:
            TimeoutError: it did not arrive within a tick, or the peer has not read what was sent;
                call again.
            EOFError: the connection has ended; also if the peer sent a malformed message, which
                ends it.
        """
        reader = self._reader
        if self._descriptors is None and self._pool is not None:
            self._descriptors = receive_socket(self.socket)
        if self.has_unread:
            self.flush()
            if not (reader.wait(UNREAD_SECONDS) and self.wait_until_read(UNREAD_SECONDS)):
                raise TimeoutError
        try:
            while True:
                message = reader.read()
                if message.notice:
                    self._take_notice(message)
                    reader.handled()
                    continue
                if (shared := message.shared) is not None:
                    frame = message.frame()
                    if not frame.buffers:
                        self.handle_once()
                        frame.buffers = self._buffers(shared)
                        reader.is_intact = True
                elif message.content is None and not self._opened_here:
                    raise FrameError("a request has no frame")
                return message
        except FrameError as exc:
            # as text: a log that keeps the exception keeps its traceback, and with it the memory
            logger.warning("closed a connection whose peer sent what it must not: %s", str(exc))
            self.shut_down()  # so that the peer is notified at once
            raise

    def send(
        self, call_id: int, frame: Frame | None, more: bool = False, release_buffers: bool = False
    ) -> bool:
        """Send a frame; the frame keeps buffers that another transport may have to send.

        Args:
            call_id: the id of the frame's call.
            frame: the frame; None: announce a reply by the connection for large messages.
            more: hold the frame back for a while: others are likely to follow at once.
            release_buffers: empty the frame's buffers as soon as they are copied.

        Returns:
            True if the frame was written; False if another thread may write it.
        """
        head = b"" if frame is None else frame.pack()
        forks = None if frame is None else frame.unsent_forks
        if frame is None or not frame.buffers:
            return self._send_queue.send(call_id, message_parts(call_id, head, []), more, forks)
        views = [flat(buffer) for buffer in frame.buffers]
        lengths = tuple(view.nbytes for view in views)
        length = sum(lengths)
        segment = lease = None
        if self._pool is not None and length >= SHARED_BYTES:
            starts, size = offsets(lengths)
            lease = self._pool.lease()
            with contextlib.suppress(OSError):  # no memory, or too many segments are in use
                segment = self._pool.acquire(size, lease)
        if segment is None:
            return self._send_inline(call_id, head, frame, views, more, forks)
        segment.fill(views, starts)
        if release_buffers:
            frame.buffers = []
            views.clear()
        parts = shared_parts(call_id, head, SharedBuffers(segment.number, lengths))
        is_written = self._send_queue.send(call_id, parts, forks=forks, lease=lease)
        if not is_written and frame.buffers:
            frame.buffers, frame.is_stable = segment.buffers(starts, lengths), True
        with self._unread_lock:
            self._shared_bytes += size
            self._sent.shared_memory += length
        return is_written

    def _send_inline(
        self,
        call_id: int,
        head: bytes,
        frame: Frame,
        views: list[memoryview],
        more: bool,
        forks: SharedForks | None,
    ) -> bool:
        queue = self._send_queue
        if not frame.is_stable and (more or not queue.is_empty):  # without the queue's lock
            views = _kept(frame, views)
        may_change = not frame.is_stable
        parts = message_parts(call_id, head, views)
        is_written = queue.send(call_id, parts, more, forks, may_change)
        if not is_written and may_change and queue.may_be_unsent(call_id):
            _kept(frame, views)
        return is_written

    def trim(self) -> None:
        """Free memory that was not used for a while."""
        if self._pool is not None:
            for number in self._pool.trim():
                self._send_queue.piggyback(notice_part(number, FREED))
            self._send_queue.flush_piggybacked()

    def stop_receiving(self) -> None:
        """Have ``read`` return what has arrived, and then raise EOFError."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RD)

    def shut_down(self) -> None:
        """End the connection for both ends; reads and writes under way end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and free its memory."""
        self._traffic.end(self._sent)
        self.shut_down()
        self._close_received()
        if self._pool is not None:
            self._pool.close()

    def close_after_fork(self) -> None:
        """Free what a forked child inherited, except for the buffers that it may read."""
        self._close_received()
        if self._pool is not None:
            self._pool.close_after_fork()

    def _close_received(self) -> None:
        self._mapped.close()
        self.socket.close()
        if self._descriptors is not None:
            self._descriptors.close()

    # -- a peer that does not read ------------------------------------------------------------

    def hold(self, task: Callable[[], object]) -> bool:
        """Keep a task until the peer has read most of what was sent; return False if it has."""
        with self._unread_lock:
            if not self.has_unread:
                return False
            self._held.append(task)
            is_first = len(self._held) == 1
        if is_first:
            self._threads.submit(self._release_held)
        return True

    def _release_held(self) -> None:
        while not self.wait_until_read(UNREAD_SECONDS):
            pass
        with self._unread_lock:
            held, self._held = self._held, []
        for task in held:
            task()

    def wait_until_read(self, seconds: float) -> bool:
        """Wait until the peer has read most of what was sent; return False if it did not."""
        self.flush()
        deadline = Deadline(seconds)
        pause = 0.0005
        while self.has_unread:
            if not self._send_queue.wait_shorter(self._max_unread // 2, deadline.within(seconds)):
                return False
            with self._unread_lock:
                if self._send_queue.pending_bytes == 0 and not has_unread(self.socket):
                    self._shared_bytes = 0
                    return True
            if self._shared_bytes:
                if deadline.expired:
                    return False
                time.sleep(deadline.within(pause))  # no event tells that a peer has read
                pause = min(2 * pause, 0.02)
        return True

    # -- shared memory ------------------------------------------------------------------------

    def _take_notice(self, message: Message) -> None:
        """Handle the peer's notice about a segment; may be called again after an interrupt."""
        number, pool = message.number, self._pool
        if message.notice == FREED:
            self._unmap(number)
        elif pool is None:
            return
        elif message.notice == DISCARDED:
            pool.discard(number)
        elif not pool.release(number, message):
            self._send_queue.piggyback(notice_part(number, FREED))
            pool.discard(number)

    def _buffers(self, shared: SharedBuffers) -> list[memoryview]:
        if self._descriptors is None:
            raise FrameError("a message has buffers in memory that cannot be shared")
        if not self._map(shared.segment):
            raise FrameError("a message names memory that was not sent")
        try:
            return self._mapped.buffers(shared.segment, shared.lengths)
        except (ValueError, OverflowError, MemoryError) as exc:
            raise FrameError(f"buffers are not where the peer says: {exc}") from None

    def _unmap(self, number: int) -> None:
        """Unmap a segment; map it first if no message used it, as its sender was interrupted."""
        if self._descriptors is not None:
            self._map(number)
        self._mapped.unmap(number)

    def _map(self, number: int) -> bool:
        """Map a segment, and those that were sent before it; return False if it was not sent."""
        while not self._mapped.has(number):
            if not self._receive_segment():
                return False
        return True

    def _send_segment(self, number: int, capacity: int, descriptor: int) -> None:
        if self._descriptors is None:
            raise OSError("the socket for descriptors has not arrived yet")
        send_descriptor(self._descriptors, _SEGMENT.pack(number, capacity), descriptor)

    def _receive_segment(self) -> bool:
        """Map the next segment, whose descriptor was sent before its first message.

        Returns:
            False if none was sent.
        """
        assert self._descriptors is not None
        was_intact = self._reader.is_intact
        self.handle_once()
        try:
            flags = socket.MSG_DONTWAIT
            data, descriptor = receive_descriptor(self._descriptors, _SEGMENT.size, flags)
            number, capacity = _SEGMENT.unpack(data)
            self._mapped.map(number, descriptor, capacity)
            self._reader.is_intact = was_intact
            return True
        except BlockingIOError:
            self._reader.is_intact = was_intact
            return False
        except (OSError, struct.error) as exc:
            raise EOFError(f"no memory could be shared: {exc}") from None


def _kept(frame: Frame, views: list[memoryview]) -> list[memoryview]:
    """Have a frame keep copies of its buffers; return them."""
    frame.buffers, frame.is_stable = [copied(view) for view in views], True
    return frame.buffers
