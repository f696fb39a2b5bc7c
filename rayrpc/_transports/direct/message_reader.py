"""Read a connection's messages, whose format is in ``wire``, also after interrupts."""

from __future__ import annotations

import functools
import select
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from rayrpc._protocol.messages import FrameError
from rayrpc._transports.direct.wire import (
    DISCARDED,
    FREED,
    PREFIX,
    RELEASED,
    Layout,
    Message,
    unpack_frame,
)

__all__ = ["CAPACITY", "MessageReader", "RECEIVE_BYTES"]


# Size of a connection's receive buffer; larger messages are received into memory of their own.
CAPACITY = 64 * 1024
# Bytes of a large message that one system call receives: while the system copies them, it takes in
# no packets, nor acknowledges any.
RECEIVE_BYTES = 256 * 1024

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


class _LargeMessage:
    """A message that is being received into memory of its own."""

    def __init__(self, number: int, layout: Layout, allocate: Allocate) -> None:
        self._number = number
        self._layout = layout
        self._allocate = allocate
        front = _allocate(layout.front_length, _new_memory)
        # the front; the message, once the front has arrived; the memory that is filled now: the
        # front's, then that of the message's buffers, in reverse order
        self._parts: tuple[Any, Message | None, list[memoryview]] = front, None, [memoryview(front)]

    @property
    def missing(self) -> list[memoryview]:
        """The memory that is to be filled, in reverse order."""
        return self._parts[-1]

    def message(self) -> Message | None:
        """Return the message; None while some of its memory is to be filled."""
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
    thread, goes on from there.  Python raises an interrupt as a call begins or ends.  So the reader
    changes its state in steps without a call in between, and ``is_intact`` is False during a step.

    Args:
        connection (socket): set up by ``prepare``; ``poll`` does not report all bytes of a
            TlsSocket, so the reader asks its ``has_pending``.
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
        self._current: Message | None = None  # a message that was read, and is not handled
        #: an exception loses nothing now
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
        """Note that the message was handled: ``read`` goes on to the next one."""
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
            EOFError: the connection has ended, or has to end as a message is malformed
                (FrameError): do not call again.
        """
        if self._current is not None:
            return self._current
        if self._received:
            self._add_received()
        if self._large is None:
            if self._end - self._start < PREFIX.size:
                self._fill(PREFIX.size)
            number, length, head_length, kind = PREFIX.unpack_from(self._bytes, self._start)
            if PREFIX.size + length <= CAPACITY:
                if self._end - self._start < PREFIX.size + length:
                    self._fill(PREFIX.size + length)
                position = self._start + PREFIX.size
                end = position + length
                if kind == 0 and length == head_length:
                    head = self._view[position:end]
                    message = Message(number, unpack_frame(number, head) if length else None)
                else:
                    message = self._take(position, number, length, head_length, kind)
                self.is_intact = False
                self._start = end
                self._current = message
                self.is_intact = True
                return message
            large = _LargeMessage(number, Layout(length, head_length, kind), self._allocate)
            self.is_intact = False
            self._start += PREFIX.size
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
        layout = Layout(length, head_length, kind)
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
            missing: the memory of a large message that is to be filled.
            count: the number of bytes that were filled.
            start: where the rest of the receive buffer starts.
            received: the counts that remain to be added.
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
