"""Write messages to a connection in batches; no sender is blocked for long.

One thread at a time is the writer:

    IDLE ── send, flush ──> WRITING ── all is written ──> IDLE
    WRITING ── the peer does not read, or an exception strikes the writer ──> HANDED_OVER
    HANDED_OVER ── a thread of the cache begins ──> WRITING
    any ── the connection has ended ──> BROKEN

The writer's number is 0 in IDLE, -1 in HANDED_OVER, and positive in WRITING.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from rayrpc._concurrency.threads import ThreadCache
from rayrpc._concurrency.waiting import Notifier
from rayrpc._protocol.messages import SharedForks
from rayrpc._transports.direct.outgoing import (
    MAX_PARTS,
    SEND_BYTES,
    Outgoing,
    first_parts,
    kept_of,
    unsent_of,
)
from rayrpc._transports.direct.shared_memory import Lease
from rayrpc._transports.direct.traffic import Sent
from rayrpc._transports.direct.wire import is_writable

__all__ = ["SendQueue"]

# How long a sender waits for a peer that does not read, before another thread takes over.
WRITE_SECONDS = 0.02
# How many messages are held back at most while others are likely to follow.
MAX_HELD_BACK = 16
# How long messages are held back, unless ``flush`` is called before.
FLUSH_SECONDS = 0.0002
NO_CALL = -1
# No writer has this number: the last one has handed over, and another thread is to begin.
HANDED_OVER = -1
# Arguments of one call of ``send`` or ``sendmsg``, for ``map``.
_NO_WAITS = (socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0),)
_NO_DATA: tuple[tuple[()]] = ((),)


class SendQueue:
    """Write messages to a connection, from any thread, without blocking the thread for long.

    Messages that other threads send while one writes are queued, and written together.

    A writer that an exception ends, such as Ctrl-C, hands over to a thread of the cache.  For this
    the queue, not the writer, holds the messages that are being written, and how far they are.

    Args:
        connection (socket): set up by ``prepare``.
        threads (ThreadCache): for writes to a peer that does not read.
        on_broken (Callable): called when the connection has ended, with the call ids of the
            messages of which no byte was sent.
        sent (Sent | None): counts the bytes; None: they are not counted.
    """

    def __init__(
        self,
        connection: socket.socket,
        threads: ThreadCache,
        on_broken: Callable[[list[int]], None],
        sent: Sent | None = None,
    ) -> None:
        self._connection = connection
        self._sent = sent or Sent()
        # False for a TlsSocket: an interrupt in its code leaves unknown what was written
        self._is_exact = not hasattr(connection, "has_pending")
        self._threads = threads
        self._on_broken = on_broken
        self._queue: collections.deque[Outgoing] = collections.deque()
        self._piggybacked: collections.deque[bytes] = collections.deque()
        #: sends a part along with the next message; takes no lock
        self.piggyback = self._piggybacked.append
        self._lock = threading.Lock()
        self._shrunk = Notifier()
        # number of the writer, which writes or waits until it can; each has a new one; 0: none
        self._writer = 0
        self._writers = itertools.count(1)
        self._interrupted: collections.deque[int] = collections.deque()  # their numbers
        self._writing: list[Outgoing] = []  # the writer's messages
        self._written = 0  # how many of their bytes are written
        self._counts: list[int] = []  # bytes that were written just now; at most one count
        self._is_broken = False
        self._is_flush_due = False
        #: bytes of the messages that wait until the peer reads
        self.pending_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Tell whether all messages were written, and the connection is not broken."""
        return not (self._writer or self._queue or self._is_broken)

    def send(
        self,
        call_id: int,
        parts: list[Any],
        more: bool = False,
        forks: SharedForks | None = None,
        may_change: bool = False,
        lease: Lease | None = None,
    ) -> bool:
        """Write a message, or queue it for the thread that is writing.

        Args:
            call_id: the id of the message's call.
            parts: the message's bytes, in parts.
            more: others are likely to follow at once: hold the message back until they are many,
                or until ``flush``.
            forks: the forks in the message; see ``SharedForks``.
            may_change: the program may write to the parts after this returns.
            lease: the lease of the segment with the message's buffers.

        Returns:
            True if the message was written; False if another thread may write it.
        """
        message = Outgoing(call_id, parts, forks, may_change, False, lease)
        me = next(self._writers)
        is_queued = False
        try:
            with self._lock:
                if self._writer or self._queue or more:
                    is_queued = True
                    message = message.kept()
                    self.pending_bytes += message.size
                    self._queue.append(message)
                    if self._writer or (more and len(self._queue) < MAX_HELD_BACK):
                        return False
                    messages = []
                else:
                    messages = [message]
                self._begin_to_write(me, messages)
            if not is_queued:
                if self._piggybacked:
                    self._take_piggybacked()
                if not self._write(WRITE_SECONDS):
                    return False
                with self._lock:
                    if not self._queue:
                        self._writing = []
                        self._writer = 0
                        return True
            self._drain()
            return not is_queued
        except BaseException:
            self._interrupted.append(me)  # a call in C: before another interrupt comes
            self._on_interrupt(me)
            raise

    def may_be_unsent(self, call_id: int) -> bool:
        """Tell whether a message, for which ``send`` returned False, may be wholly unsent."""
        with self._lock:
            result = (
                self._is_broken
                or call_id in unsent_of(self._writing, self._written)
                # it is the last one, as a rule
                or any(message.call_id == call_id for message in reversed(self._queue))
            )
        return result

    def flush(self) -> None:
        """Write the messages that were held back."""
        if self._queue:
            self._write_queued()

    def flush_later(self) -> None:
        """Write the messages that are held back after a while, unless a thread does before."""
        with self._lock:
            if self._is_flush_due:
                return
            self._is_flush_due = True
        self._threads.submit(self._flush_due)

    def _flush_due(self) -> None:
        time.sleep(FLUSH_SECONDS)
        self._is_flush_due = False
        self.flush()

    def flush_piggybacked(self) -> None:
        """Write parts that still wait for a message, and what interrupted writers left."""
        with contextlib.suppress(IndexError):
            while True:
                self._pass_on(self._interrupted.popleft())
        if self._piggybacked:
            self._write_queued()

    def _write_queued(self) -> None:
        me = next(self._writers)
        try:
            with self._lock:
                if self._writer:
                    return
                self._begin_to_write(me, [])
            self._drain(also_piggybacked=True)
        except BaseException:
            self._interrupted.append(me)
            self._on_interrupt(me)
            raise

    def wait_shorter(self, limit: int, seconds: float) -> bool:
        """Tell whether ``pending_bytes`` falls to ``limit`` within ``seconds``."""
        return self._shrunk.wait_until(lambda: self.pending_bytes <= limit, seconds)

    # -- the writer ---------------------------------------------------------------------------

    def _begin_to_write(self, writer: int, messages: list[Outgoing]) -> None:
        """Become the writer, with the lock held."""
        # no call in between: an interrupt comes before or after all four
        self._written = 0
        self._counts = []
        self._writing = messages
        self._writer = writer

    def _take_piggybacked(self) -> None:
        """Write piggybacked parts first: the peer may reuse the segments that they release."""
        count = len(self._piggybacked)
        if count:
            parts: list[bytes] = []
            self._writing = [Outgoing(NO_CALL, parts), *self._writing]
            # one call in C: an interrupt comes before or after it
            parts.extend(map(collections.deque.popleft, (self._piggybacked,) * count))

    def _drain(self, also_piggybacked: bool = False) -> None:
        """Write what is queued, as the writer, and stop being the writer."""
        while True:
            with self._lock:
                self._forget_written()
                count = self._count_next()
                if not count and not (also_piggybacked and self._piggybacked):
                    self._writing = []
                    self._writer = 0
                    return
                messages: list[Outgoing] = []
                self._begin_to_write(self._writer, messages)
                messages.extend(map(collections.deque.popleft, (self._queue,) * count))
            self._take_piggybacked()
            if not self._write(WRITE_SECONDS):
                return

    def _count_next(self) -> int:
        """Return how many messages of the queue to write together."""
        count = parts = 0
        for message in self._queue:
            parts += len(message.parts)
            if count and parts > MAX_PARTS:
                break
            count += 1
        return count

    def _write(self, timeout: float | None) -> bool:
        """Go on writing the writer's messages.

        Returns:
            False if the peer does not read, and another thread goes on after ``timeout`` seconds,
            or if the connection is broken.
        """
        messages = self._writing
        parts: list[Any] = []
        for message in messages:
            parts += message.parts
            if message.forks is not None:
                message.forks.begin_to_send()
            if message.lease is not None:
                message.lease.begin_to_send()
        skipped = self._written
        counts = self._counts
        while parts:
            if skipped:
                size = len(parts[0])
                if size <= skipped:
                    skipped -= size
                    del parts[0]
                    continue
                parts[0] = memoryview(parts[0])[skipped:]
            is_small = len(parts) == 1 and len(parts[0]) <= SEND_BYTES
            first = parts if is_small else first_parts(parts)
            try:
                # one call in C: an interrupt comes before, or after the count was stored
                if len(first) == 1:
                    counts.extend(map(self._connection.send, first, _NO_WAITS))
                else:
                    counts.extend(map(self._connection.sendmsg, (first,), _NO_DATA, _NO_WAITS))
            except BlockingIOError:
                skipped = 0
                if not is_writable(self._connection, timeout):
                    self._hand_over(self._writer)
                    return False
                continue
            except OSError:
                self._break(messages, self._written)
                return False
            skipped = counts[0]
            self._written += skipped
            self._sent.connection += skipped
            del counts[0]
        return True

    def _hand_over(self, me: int) -> None:
        """Have another thread go on, if this one is the writer."""
        if self._writer != me:
            return
        if self._counts:  # an interrupt came after the count was stored
            self._written += self._counts[0]
            self._sent.connection += self._counts[0]
            self._counts = []
        kept = kept_of(self._writing, self._written)
        with self._lock:
            size = sum(message.size for message in self._writing if not message.is_pending)
            self._writing = kept
            self.pending_bytes += size
            self._writer = HANDED_OVER
        self._threads.submit(self._resume)

    def _on_interrupt(self, me: int) -> None:
        """Have another thread go on after an exception, if this thread was the writer."""
        try:
            try:
                self._interrupted.remove(me)
            except ValueError:  # another thread handles it
                return
            self._pass_on(me)
        except BaseException:  # another interrupt
            self._threads.submit(functools.partial(self._pass_on, me))
            raise

    def _pass_on(self, me: int) -> None:
        if self._writer == me and not self._is_exact:
            self._break([], 0)  # the end of the connection fails the calls of these messages
        elif self._writer == HANDED_OVER:  # handed over just now; the thread may not be started yet
            self._threads.submit(self._resume)
        else:
            self._hand_over(me)

    def _forget_written(self) -> None:
        """Take written messages off ``pending_bytes``; call it with the lock held."""
        size = sum(message.size for message in self._writing if message.is_pending)
        self._writing = []
        self.pending_bytes -= size
        if size:
            self._shrunk.notify_all()

    def _resume(self) -> None:
        with self._lock:
            if self._writer != HANDED_OVER:
                return
            self._writer = next(self._writers)
        try:
            if self._write(None):
                self._drain()
        except BaseException:  # no memory
            self._break(self._writing, self._written)
            raise

    def _break(self, messages: list[Outgoing], done: int) -> None:
        with self._lock:
            self._is_broken = True
            unsent = unsent_of(messages, done)
            unsent += [message.call_id for message in self._queue]
            self._queue.clear()
            self._writing = []
            self._writer = 0
            self.pending_bytes = 0
            self._shrunk.notify_all()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._on_broken(unsent)
