"""Write messages to a connection in batches, from any thread, without blocking it for long."""

from __future__ import annotations

import collections
import contextlib
import functools
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rayrpc._concurrency.threads import ThreadCache
from rayrpc._transports.direct.shared_memory import copy

__all__ = ["SendQueue"]

# How long a sender waits for a peer that does not read, before another thread takes over.
WRITE_SECONDS = 0.02
# How many messages are held back at most while others are likely to follow.
MAX_HELD_BACK = 16
# How many parts go into one system call; systems allow 1024 and more.
MAX_PARTS = 512
NO_CALL = -1
_NO_WAIT = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)


class _Outgoing(NamedTuple):
    """A message to write.

    Args:
        call_id (int): of its call.
        parts (list): its bytes.
        may_change (bool): the memory of its parts is the program's, which may write to it.
    """

    call_id: int
    parts: list[Any]
    may_change: bool = False

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(map(len, self.parts))

    def kept(self, written: int = 0) -> _Outgoing:
        """Return the message in memory of its own, but for what is written."""
        if not self.may_change:
            return self
        parts: list[Any] = []
        for part in self.parts:
            done = min(written, len(part))
            written -= done
            if done:
                parts.append(part[:done])
            if done < len(part):
                parts.append(part[done:] if isinstance(part, bytes) else _copied(part[done:]))
        return _Outgoing(self.call_id, parts)


class SendQueue:
    """Write messages to a connection, from any thread, without blocking that for long.

    Messages that other threads send while one writes are queued, and written together.

    Args:
        connection (socket): prepared.
        threads (ThreadCache): for writes to a peer that does not read.
        on_broken (Callable): called when the connection has ended, with the call ids of the
            messages of which no byte was sent.
    """

    def __init__(
        self,
        connection: socket.socket,
        threads: ThreadCache,
        on_broken: Callable[[list[int]], None],
    ) -> None:
        self._connection = connection
        self._threads = threads
        self._on_broken = on_broken
        self._queue: collections.deque[_Outgoing] = collections.deque()
        self._piggybacked: collections.deque[bytes] = collections.deque()
        self._lock = threading.Lock()
        self._shrunk = threading.Condition(self._lock)
        self._is_writing = False  # a thread writes, or waits until it can
        self._writing_bytes = 0  # of the messages that a thread writes since the peer did not read
        self._is_broken = False
        #: bytes of the messages that the peer kept from being written
        self.pending_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Tell whether all messages were written, and the connection is not broken."""
        return not (self._is_writing or self._queue or self._is_broken)

    def piggyback(self, part: bytes) -> None:
        """Send a part along with the next message; takes no lock."""
        self._piggybacked.append(part)

    def send(
        self, call_id: int, parts: list[Any], more: bool = False, may_change: bool = False
    ) -> bool:
        """Write a message, or queue it for the thread that is writing.

        Args:
            call_id: of its call.
            parts: its bytes.
            more: others are likely to follow at once: hold it back until they are many, or
                until ``flush``.
            may_change: the program may write to the parts after this returns.

        Returns:
            True if it was written; else it may be, or will be.
        """
        message = _Outgoing(call_id, parts, may_change)
        if may_change and (self._is_writing or self._queue or more):
            message = message.kept()  # without the lock
        with self._lock:
            if self._is_writing or self._queue or more:
                message = message.kept()
                self._queue.append(message)
                self.pending_bytes += message.size
                if self._is_writing or (more and len(self._queue) < MAX_HELD_BACK):
                    return False
                parts = []
            self._is_writing = True
        if not parts:
            self._drain()
            return False
        if self._piggybacked:
            message = message._replace(parts=[*self._take_piggybacked(), *message.parts])
        if not self._write([message], WRITE_SECONDS):
            return False
        with self._lock:
            if not self._queue:
                self._is_writing = False
                return True
        self._drain()
        return True

    def flush(self) -> None:
        """Write the messages that were held back."""
        if not self._queue:
            return
        with self._lock:
            if self._is_writing:
                return
            self._is_writing = True
        self._drain()

    def flush_piggybacked(self) -> None:
        """Write the parts that no message has taken along."""
        with self._lock:
            if self._is_writing or not self._piggybacked:
                return
            self._is_writing = True
        if self._write([_Outgoing(NO_CALL, self._take_piggybacked())], WRITE_SECONDS):
            self._drain()

    def wait_shorter(self, limit: int, seconds: float) -> bool:
        """Tell whether ``pending_bytes`` falls to ``limit`` within ``seconds``."""
        with self._shrunk:
            return self._shrunk.wait_for(lambda: self.pending_bytes <= limit, seconds)

    def _take_piggybacked(self) -> list[bytes]:
        parts = []
        while self._piggybacked:
            parts.append(self._piggybacked.popleft())
        return parts

    def _drain(self) -> None:
        while True:
            with self._lock:
                self._forget_written()
                if not self._queue:
                    self._is_writing = False
                    return
                messages = [self._queue.popleft()]
                count = len(messages[0].parts)
                while self._queue and count + len(self._queue[0].parts) <= MAX_PARTS:
                    messages.append(self._queue.popleft())
                    count += len(messages[-1].parts)
                self._writing_bytes = sum(message.size for message in messages)
            parts = self._take_piggybacked()
            if parts:  # first: the peer may reuse the segments that they release
                messages.insert(0, _Outgoing(NO_CALL, parts))
            if not self._write(messages, WRITE_SECONDS):
                return

    def _write(self, messages: list[_Outgoing], timeout: float | None, done: int = 0) -> bool:
        """Write messages from byte ``done`` on.

        Returns:
            False if the peer does not read, and another thread goes on writing after ``timeout``
            seconds, or if the connection is broken.
        """
        if len(messages) == 1:
            parts = messages[0].parts[:]
        else:
            parts = [part for message in messages for part in message.parts]
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
                if len(parts) == 1:
                    skipped = self._connection.send(parts[0], _NO_WAIT)
                else:
                    skipped = self._connection.sendmsg(parts[:MAX_PARTS], (), _NO_WAIT)
            except BlockingIOError:
                if not self._writable(timeout):
                    messages = _kept(messages, done)
                    with self._lock:
                        if not self._writing_bytes:  # these were never queued
                            self._writing_bytes = sum(message.size for message in messages)
                            self.pending_bytes += self._writing_bytes
                    self._threads.submit(functools.partial(self._resume, messages, done))
                    return False
            except OSError:
                self._break(messages, done)
                return False
            done += skipped
        return True

    def _forget_written(self) -> None:
        """Count what is written, with the lock held."""
        if self._writing_bytes:
            self.pending_bytes -= self._writing_bytes
            self._writing_bytes = 0
            self._shrunk.notify_all()

    def _resume(self, messages: list[_Outgoing], done: int) -> None:
        if self._write(messages, None, done):
            self._drain()

    def _writable(self, seconds: float | None) -> bool:
        try:
            poll = select.poll()
            poll.register(self._connection, select.POLLOUT)
            return bool(poll.poll(None if seconds is None else seconds * 1000))
        except (OSError, ValueError):
            return True  # it was closed; the next write fails

    def _break(self, messages: list[_Outgoing], done: int) -> None:
        with self._lock:
            self._is_broken = True
            unsent = []
            position = 0
            for message in messages:
                if position >= done:
                    unsent.append(message.call_id)
                position += sum(map(len, message.parts))
            unsent += [message.call_id for message in self._queue]
            self._queue.clear()
            self._is_writing = False
            self._writing_bytes = self.pending_bytes = 0
            self._shrunk.notify_all()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._on_broken(unsent)


def _kept(messages: list[_Outgoing], written: int) -> list[_Outgoing]:
    """Return messages in memory of their own, but for what is written."""
    kept = []
    for message in messages:
        kept.append(message.kept(max(0, written)))
        written -= message.size
    return kept


def _copied(view: memoryview) -> memoryview:
    source = np.frombuffer(view, np.uint8)
    target = np.empty_like(source)
    copy(target, source)
    return target.data
