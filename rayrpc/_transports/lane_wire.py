"""Messages on a stream: how they lie there, and how they are read and written.

    call id (8) | length of what follows (8) | length of the head (4) | number of buffers (4)
    a length (8) for each buffer | head | buffers

The head is a packed ``Frame``; an empty one says that the reply comes by another way.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from rayrpc._runtime.messages import Frame
from rayrpc._runtime.threads import ThreadCache

__all__ = ["Inbox", "Message", "Outbox", "prepare", "to_parts"]

_PREFIX = struct.Struct("<QQII")

# What one connection reads at once; larger messages are read into memory of their own.
CAPACITY = 64 * 1024
# How long a read waits before it looks whether it still should.
TICK_SECONDS = 0.25
# How long a sender waits for a peer that does not read, before it leaves that to another thread.
SEND_PATIENCE = 0.02
# Parts of messages in one system call; the least that POSIX systems have is 1024 in fact.
PARTS_AT_ONCE = 512


class Message(NamedTuple):
    """What arrived."""

    call_id: int
    head: bytes
    buffers: list[Any]

    def frame(self) -> Frame:
        """Return the frame in it."""
        return Frame.unpack(self.head, self.buffers)


def to_parts(call_id: int, frame: Frame | None) -> list[Any]:
    """Return what to write for a frame, or for the note that it comes by another way."""
    head = b"" if frame is None else frame.pack()
    if frame is None or not frame.buffers:
        return [_PREFIX.pack(call_id, len(head), len(head), 0) + head]
    views = [memoryview(buffer).cast("B") for buffer in frame.buffers]
    lengths = [view.nbytes for view in views]
    sizes = struct.pack(f"<{len(views)}Q", *lengths)
    rest = len(sizes) + len(head) + sum(lengths)
    return [_PREFIX.pack(call_id, rest, len(head), len(views)) + sizes + head, *filter(len, views)]


def prepare(connection: socket.socket) -> None:
    """Set a connection's options: reads come back every tick, and nothing waits to be sent."""
    connection.setblocking(True)
    whole = int(TICK_SECONDS)
    rest = int((TICK_SECONDS - whole) * 1e6)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", whole, rest))
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _Large:
    """A message on its way into memory of its own."""

    def __init__(self, call_id: int, head_length: int, count: int) -> None:
        self.call_id = call_id
        self.count = count
        self.front = bytearray(8 * count + head_length)
        self.buffers: list[bytearray] | None = None
        self.todo = [memoryview(self.front)]  # the last one first

    def is_whole(self) -> bool:
        """Tell whether all has arrived; make room for the buffers once their lengths have."""
        if self.todo:
            return False
        if self.buffers is None:
            lengths = struct.unpack_from(f"<{self.count}Q", self.front)
            self.buffers = [bytearray(length) for length in lengths]
            self.todo = [memoryview(buffer) for buffer in reversed(self.buffers) if buffer]
        return not self.todo

    def message(self) -> Message:
        """Return it, whole."""
        return Message(self.call_id, bytes(self.front[8 * self.count :]), self.buffers or [])


class Inbox:
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
            self._fill(_PREFIX.size)
            call_id, rest, head_length, count = _PREFIX.unpack_from(self._bytes, self._start)
            if _PREFIX.size + rest <= CAPACITY:
                self._fill(_PREFIX.size + rest)
                return self._take(call_id, head_length, count)
            self._start += _PREFIX.size
            self._large = _Large(call_id, head_length, count)
        while not self._large.is_whole():
            self._fill_large(self._large)
        message = self._large.message()
        self._large = None
        return message

    def _take(self, call_id: int, head_length: int, count: int) -> Message:
        position = self._start + _PREFIX.size
        if not count:
            self._start = end = position + head_length
            return Message(call_id, bytes(self._view[position:end]), [])
        lengths = struct.unpack_from(f"<{count}Q", self._bytes, position)
        position += 8 * count
        head = bytes(self._view[position : position + head_length])
        position += head_length
        buffers = []
        for length in lengths:
            buffers.append(self._bytes[position : position + length])
            position += length
        self._start = position
        return Message(call_id, head, buffers)

    def _fill(self, needed: int) -> None:
        have = self._end - self._start
        if have >= needed:
            return
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


class Outbox:
    """Write messages to a connection, from any thread, without ever blocking that for long.

    What several threads have to send while one is writing goes out together.

    Args:
        connection (socket): prepared.
        threads (ThreadCache): where what a peer does not read yet waits.
        broken (Callable): called with the call ids of messages that no byte was sent of, once the
            connection has ended.
    """

    def __init__(
        self,
        connection: socket.socket,
        threads: ThreadCache,
        broken: Callable[[list[int]], None],
    ) -> None:
        self._connection = connection
        self._threads = threads
        self._tell_broken = broken
        self._queue: collections.deque[tuple[int, list[Any]]] = collections.deque()
        self._lock = threading.Lock()
        self._busy = False
        self._broken = False

    @property
    def is_empty(self) -> bool:
        """Tell whether all was written."""
        return not (self._busy or self._broken)

    def send(self, call_id: int, parts: list[Any]) -> None:
        """Write a message, or leave it to a thread that is writing."""
        with self._lock:
            self._queue.append((call_id, parts))
            if self._busy:
                return
            self._busy = True
        self._drain()

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    return
                messages = [self._queue.popleft()]
                count = len(messages[0][1])
                while self._queue and count + len(self._queue[0][1]) <= PARTS_AT_ONCE:
                    messages.append(self._queue.popleft())
                    count += len(messages[-1][1])
            if not self._write(messages, 0, SEND_PATIENCE):
                return

    def _write(
        self, messages: list[tuple[int, list[Any]]], done: int, patience: float | None
    ) -> bool:
        """Write messages from byte ``done`` on; return False if that is left to somebody else."""
        parts = [part for _, message in messages for part in message]
        skipped = done
        while parts:
            if skipped:
                size = len(parts[0])
                if size <= skipped:
                    skipped -= size
                    del parts[0]
                    continue
                parts[0] = memoryview(parts[0])[skipped:]
                skipped = 0
            try:
                skipped = self._connection.sendmsg(parts[:PARTS_AT_ONCE], (), _NO_WAIT)
            except BlockingIOError:
                if not self._writable(patience):
                    self._threads.submit(functools.partial(self._go_on, messages, done))
                    return False
            except OSError:
                self._break(messages, done)
                return False
            done += skipped
        return True

    def _go_on(self, messages: list[tuple[int, list[Any]]], done: int) -> None:
        if self._write(messages, done, None):
            self._drain()

    def _writable(self, seconds: float | None) -> bool:
        try:
            poll = select.poll()
            poll.register(self._connection, select.POLLOUT)
            return bool(poll.poll(None if seconds is None else seconds * 1000))
        except (OSError, ValueError):
            return True  # it was closed; the next write says so

    def _break(self, messages: list[tuple[int, list[Any]]], done: int) -> None:
        with self._lock:
            self._broken = True
            unsent = []
            position = 0
            for call_id, parts in messages:
                if position >= done:
                    unsent.append(call_id)
                position += sum(map(len, parts))
            unsent += [call_id for call_id, _ in self._queue]
            self._queue.clear()
            self._busy = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._tell_broken(unsent)


_NO_WAIT = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
