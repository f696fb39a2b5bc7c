"""Write messages to a connection: in batches, from any thread, never blocked for long."""

from __future__ import annotations

import collections
import contextlib
import functools
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from rayrpc._concurrency.threads import ThreadCache

__all__ = ["SendQueue"]

# How long a sender waits for a peer that does not read, before it leaves that to another thread.
SEND_PATIENCE = 0.02
# So many messages are kept back at most while others are likely to follow.
MOST_KEPT_BACK = 16
# Parts of messages in one system call; the least that POSIX systems have is 1024 in fact.
PARTS_AT_ONCE = 512
NO_CALL = -1
_NO_WAIT = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)


class _Outgoing(NamedTuple):
    """A message to write."""

    call_id: int
    parts: list[Any]


class SendQueue:
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
        self._queue: collections.deque[_Outgoing] = collections.deque()
        self._notes: collections.deque[bytes] = collections.deque()
        self._lock = threading.Lock()
        self._busy = False
        self._broken = False

    @property
    def is_empty(self) -> bool:
        """Tell whether all was written."""
        return not (self._busy or self._queue or self._broken)

    def note(self, part: bytes) -> None:
        """Let a note go along with the next message; takes no lock."""
        self._notes.append(part)

    def send(self, call_id: int, parts: list[Any], more: bool = False) -> bool:
        """Write a message, or leave it to a thread that is writing.

        Args:
            call_id: of its call.
            parts: what to write.
            more: others are likely to follow at once: keep it back until they are many, or
                until ``flush``.

        Returns:
            It was written; else it may be, or will be.
        """
        with self._lock:
            if self._busy or self._queue or more:
                self._queue.append(_Outgoing(call_id, parts))
                if self._busy or (more and len(self._queue) < MOST_KEPT_BACK):
                    return False
                parts = []
            self._busy = True
        if not parts:
            self._drain()
            return False
        message = _Outgoing(call_id, [*self._take_notes(), *parts])
        if not self._write([message], SEND_PATIENCE):
            return False
        with self._lock:
            if not self._queue:
                self._busy = False
                return True
        self._drain()
        return True

    def flush(self) -> None:
        """Write what was kept back."""
        if not self._queue:
            return
        with self._lock:
            if self._busy:
                return
            self._busy = True
        self._drain()

    def flush_notes(self) -> None:
        """Write the notes that no message has taken along."""
        with self._lock:
            if self._busy or not self._notes:
                return
            self._busy = True
        if self._write([_Outgoing(NO_CALL, self._take_notes())], SEND_PATIENCE):
            self._drain()

    def _take_notes(self) -> list[bytes]:
        notes = []
        while self._notes:
            notes.append(self._notes.popleft())
        return notes

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    return
                messages = [self._queue.popleft()]
                count = len(messages[0].parts)
                while self._queue and count + len(self._queue[0].parts) <= PARTS_AT_ONCE:
                    messages.append(self._queue.popleft())
                    count += len(messages[-1].parts)
            notes = self._take_notes()
            if notes:  # first: what they give back may be of use for the rest
                messages.insert(0, _Outgoing(NO_CALL, notes))
            if not self._write(messages, SEND_PATIENCE):
                return

    def _write(self, messages: list[_Outgoing], patience: float | None, done: int = 0) -> bool:
        """Write messages from byte ``done`` on; return False if that is left to somebody else."""
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

    def _go_on(self, messages: list[_Outgoing], done: int) -> None:
        if self._write(messages, None, done):
            self._drain()

    def _writable(self, seconds: float | None) -> bool:
        try:
            poll = select.poll()
            poll.register(self._connection, select.POLLOUT)
            return bool(poll.poll(None if seconds is None else seconds * 1000))
        except (OSError, ValueError):
            return True  # it was closed; the next write says so

    def _break(self, messages: list[_Outgoing], done: int) -> None:
        with self._lock:
            self._broken = True
            unsent = []
            position = 0
            for message in messages:
                if position >= done:
                    unsent.append(message.call_id)
                position += sum(map(len, message.parts))
            unsent += [message.call_id for message in self._queue]
            self._queue.clear()
            self._busy = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._tell_broken(unsent)
