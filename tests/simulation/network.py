"""What stands in for ``socket`` and ``select``: connections in memory, which break at any byte.

Bytes take a while to arrive; sends and receives may be short; a full connection blocks its sender.
Descriptors are sent along: of simulated sockets, and of files of the system.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import selectors
import socket
import struct
import termios
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from simulation.scheduler import current

__all__ = ["Poll", "Selector", "Socket", "connect", "create_connection", "socketpair"]

# A peer that does not read blocks its sender after so many bytes.
CAPACITY = 4096
MAX_DELAY = 0.0005
_TIMEVAL = struct.Struct("@ll")
_CREDENTIALS = struct.Struct("3i")


class _Descriptor:
    """A descriptor on its way; closed if it is not received."""

    def __init__(self, number: int) -> None:
        self._socket = _sockets().get(number)
        if self._socket is not None:
            self._socket = self._socket.duplicate()
        else:
            self._number = os.dup(number)
            self._close = weakref.finalize(self, os.close, self._number)

    def receive(self) -> int:
        """Return the receiver's descriptor."""
        if self._socket is not None:
            return self._socket.fileno()
        self._close.detach()
        return self._number


class _Chunk(NamedTuple):
    """Bytes on their way, when they arrive, and a descriptor that was sent along."""

    arrives_at: float
    data: memoryview
    descriptor: _Descriptor | None = None


class _Direction:
    """The bytes on their way from one end to the other.

    Args:
        keeps_packets (bool): each send is received by one receive, whole.
    """

    def __init__(self, keeps_packets: bool = False) -> None:
        self.keeps_packets = keeps_packets
        self.is_new = True  # nothing was sent: as in any system, the first send is whole
        self.ends = 1  # how many sockets send, duplicates of one another
        self.chunks: deque[_Chunk] = deque()
        self.size = 0
        self.is_ended = False  # nothing follows
        self.is_refused = False  # nothing more is taken
        self.left = -1  # so many bytes more arrive, then it breaks; -1: all

    def put(self, data: memoryview, descriptor: _Descriptor | None = None) -> int:
        """Take bytes; return how many."""
        me = current().current
        count = min(len(data), CAPACITY - self.size)
        if self.keeps_packets:
            count = count if count == len(data) else 0
        elif count > 1 and not self.is_new and me.random.random() < 0.1:
            count = me.random.randint(1, count)
        self.is_new = False
        if self.left >= 0:
            count = min(count, self.left)
            self.left -= count
            if not self.left:
                self.is_ended = self.is_refused = True
        if count:
            now = current().now
            after = self.chunks[-1].arrives_at if self.chunks else now
            # what was sent on a UNIX socket has arrived: a descriptor is there before the message
            # that is sent next, on another socket
            delays = [0.0] if self.keeps_packets else [0.0, 0.0, 1e-5, MAX_DELAY]
            at = max(after, now + me.random.choice(delays))
            self.chunks.append(_Chunk(at, memoryview(bytes(data[:count])), descriptor))
            self.size += count
        return count

    def take(self, view: memoryview) -> int:
        """Fill memory with bytes that have arrived; return how many."""
        count = 0
        while count < len(view) and self.has_arrived():
            chunk = self.chunks.popleft()
            part = min(len(chunk.data), len(view) - count)
            view[count : count + part] = chunk.data[:part]
            count += part
            if part < len(chunk.data):
                self.chunks.appendleft(chunk._replace(data=chunk.data[part:]))
        self.size -= count
        return count

    def take_with_descriptor(self, size: int) -> tuple[bytes, _Descriptor | None]:
        """Return bytes that were sent at once, and the descriptor that was sent along."""
        if not self.has_arrived():
            return b"", None
        chunk = self.chunks.popleft()
        if size < len(chunk.data) and not self.keeps_packets:
            self.chunks.appendleft(_Chunk(chunk.arrives_at, chunk.data[size:]))
        self.size -= len(chunk.data) if self.keeps_packets else min(size, len(chunk.data))
        return bytes(chunk.data[:size]), chunk.descriptor

    def has_arrived(self) -> bool:
        """Tell whether there are bytes to take."""
        return bool(self.chunks) and self.chunks[0].arrives_at <= current().now

    def arrives_at(self) -> float | None:
        """Return when the next bytes arrive that have not; None if none are on the way."""
        if self.chunks and self.chunks[0].arrives_at > current().now:
            return self.chunks[0].arrives_at
        return None


class Socket:
    """A socket: unconnected, listening, or one end of a connection.

    Args:
        family (int): its address family; memory is not shared over AF_INET.
        kind (int): its type.
        ends (tuple): the directions of a connection, inbound and outbound.
        fileno (int | None): the number of a socket that this one is from now on.
    """

    def __new__(cls, *args: Any, fileno: int | None = None, **options: Any) -> Socket:
        return super().__new__(cls) if fileno is None else _sockets()[fileno]

    def __init__(
        self,
        family: int = socket.AF_INET,
        kind: int = socket.SOCK_STREAM,
        ends: tuple[_Direction, _Direction] | None = None,
        fileno: int | None = None,
    ) -> None:
        if fileno is not None:
            return
        self.family = family
        self.type = kind
        self._in, self._out = ends or (_Direction(), _Direction())
        self._address: Any = ("127.0.0.1", 0) if family == socket.AF_INET else ""
        self._backlog: deque[Socket] | None = None  # of a listener
        self._tick: float | None = None
        self._is_closed = False
        self._number = next(_numbers)
        _sockets()[self._number] = self

    def duplicate(self) -> Socket:
        """Return another socket at the same end of the connection."""
        self._out.ends += 1
        return Socket(self.family, self.type, (self._in, self._out))

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def fileno(self) -> int:
        return -1 if self._is_closed else self._number

    # -- options ------------------------------------------------------------------------------

    def setblocking(self, flag: bool) -> None:
        self._tick = None if flag else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._tick = seconds

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        if (level, name) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO):
            seconds, microseconds = _TIMEVAL.unpack(value)
            self._tick = seconds + microseconds / 1e6

    def getsockopt(self, level: int, name: int, size: int = 0) -> Any:
        if (level, name) == (socket.SOL_SOCKET, socket.SO_PEERCRED):
            return _CREDENTIALS.pack(os.getpid(), 0, 0)
        if level == socket.IPPROTO_TCP:  # some systems tell nothing of a connection
            raise OSError(errno.ENOPROTOOPT, "Protocol not available")
        raise NotImplementedError(f"option {name} of sockets")  # an OSError would be handled

    # -- listening and connecting -------------------------------------------------------------

    def bind(self, address: Any) -> None:
        if self.family == socket.AF_INET:
            host, port = address
            address = (host, port or next(_numbers))
        elif not address:
            address = f"\0{next(_numbers)}"
        if address in _listeners():
            raise OSError(errno.EADDRINUSE, "the address is in use")
        self._address = address

    def getsockname(self) -> Any:
        return self._address

    def listen(self, backlog: int = 0) -> None:
        self._backlog = deque()
        _listeners()[self._address] = self

    def accept(self) -> tuple[Socket, Any]:
        assert self._backlog is not None
        if not _wait("accepts", [(self, select.POLLIN)], self._tick):
            raise BlockingIOError("nobody connects")
        if self._is_closed:
            raise OSError("it is closed")
        return self._backlog.popleft(), ("127.0.0.1", 0)

    def connect(self, address: Any) -> None:
        current().step("connects")
        listener = _listeners().get(address)
        if listener is None or listener._backlog is None:
            raise ConnectionRefusedError("nobody listens there")
        there = Socket(self.family, self.type, (self._out, self._in))
        listener._backlog.append(there)
        current().on_connected(self, there)

    # -- data ---------------------------------------------------------------------------------

    def recv_into(self, view: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(view).cast("B")
        count = self._receive(view)
        while count and flags & socket.MSG_WAITALL and count < len(view):
            try:
                more = self._receive(view[count:])
            except (OSError, KeyboardInterrupt):  # what is there is returned first
                break
            if not more:
                break
            count += more
        return count

    def _receive(self, view: memoryview) -> int:
        if not _wait("receives", [(self, select.POLLIN)], self._tick):
            raise BlockingIOError("nothing has arrived")
        if self._is_closed:
            raise OSError("it is closed")
        me = current().current
        if len(view) > 1 and me.random.random() < 0.2:
            view = view[: me.random.choice([1, 7, 64])]
        return self._in.take(view)

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = bytearray(size)
        return bytes(data[: self.recv_into(data, flags=flags)])

    def send(self, data: Any, flags: int = 0, descriptor: _Descriptor | None = None) -> int:
        view = memoryview(data).cast("B")
        current().step("sends")
        if self._is_closed:
            raise OSError("it is closed")
        if not flags & socket.MSG_DONTWAIT:
            _wait("waits to send", [(self, select.POLLOUT)], self._tick)
        if self._out.is_refused:
            raise BrokenPipeError("it was cut")
        count = self._out.put(view, descriptor)
        if view and not count and not self._out.is_refused:
            raise BlockingIOError("the connection is full")
        return count

    def sendmsg(
        self,
        buffers: Iterable[Any],
        ancillary: Iterable[tuple[int, int, bytes]] = (),
        flags: int = 0,
    ) -> int:
        descriptor = None
        for _, _, rights in ancillary:
            descriptor = _Descriptor(*struct.unpack("i", rights))
        return self.send(b"".join(map(bytes, buffers)), flags, descriptor)

    def recvmsg(self, size: int, ancillary_size: int = 0, flags: int = 0) -> tuple[Any, ...]:
        seconds = 0.0 if flags & socket.MSG_DONTWAIT else self._tick
        if not _wait("receives", [(self, select.POLLIN)], seconds):
            raise BlockingIOError("nothing has arrived")
        if self._is_closed:
            raise OSError("it is closed")
        data, descriptor = self._in.take_with_descriptor(size)
        rights = []
        if descriptor is not None:
            number = struct.pack("i", descriptor.receive())
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, number)]
        return data, rights, 0, None

    def sendall(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self.send(view) :]

    # -- the end ------------------------------------------------------------------------------

    def shutdown(self, how: int) -> None:
        if self._is_closed:
            raise OSError("it is closed")
        if how != socket.SHUT_WR:
            self._in.is_refused = self._in.is_ended = True
        if how != socket.SHUT_RD:
            self._out.is_ended = self._out.is_refused = True
        current().step("shut a connection down")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._backlog is not None:
                _listeners().pop(self._address, None)
                for each in self._backlog:
                    each.close()
            _sockets().pop(self._number, None)
            self._out.ends -= 1
            if not self._out.ends:
                self._in.is_refused = True
                self._in.chunks.clear()  # they count as unread no longer
                self._in.size = 0
                self._out.is_ended = self._out.is_refused = True

    def cut_after(self, size: int) -> None:
        """Break the connection when so many bytes more were sent from this end."""
        self._out.left = size
        if not size:
            self._out.is_ended = self._out.is_refused = True

    @property
    def unread_bytes(self) -> int:
        """The bytes that were sent, and not received."""
        return self._out.size

    @property
    def has_arrived(self) -> bool:
        """Tell whether a receive would return bytes."""
        return self._in.has_arrived()

    def is_ready(self, mask: int) -> bool:
        """Tell whether what a poll waits for has happened."""
        if self._is_closed:
            return True
        if self._backlog is not None:
            return bool(self._backlog)
        if mask & select.POLLIN and (self._in.has_arrived() or self._is_at_end()):
            return True
        if mask & select.POLLOUT and (self._out.size < CAPACITY or self._out.is_refused):
            return True
        return bool(mask & select.POLLRDHUP) and self._in.is_ended

    def next_arrival(self) -> float | None:
        """Return when bytes arrive that have not; None if none are on the way."""
        return self._in.arrives_at()

    def _is_at_end(self) -> bool:
        return self._in.is_ended and not self._in.chunks


class Poll:
    """A poll object, for one thread at a time."""

    def __init__(self) -> None:
        self._sockets: dict[Socket, int] = {}
        self._is_polling = False

    def register(self, connection: Socket, mask: int = select.POLLIN | select.POLLOUT) -> None:
        if connection.fileno() < 0:
            raise ValueError("file descriptor cannot be a negative integer (-1)")
        self._sockets[connection] = mask

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        if self._is_polling:
            raise RuntimeError("concurrent poll() invocation")
        seconds = None if milliseconds is None or milliseconds < 0 else milliseconds / 1000
        self._is_polling = True
        try:
            _wait("polls", list(self._sockets.items()), seconds)
        finally:
            self._is_polling = False
        return [
            (connection.fileno(), mask)
            for connection, mask in self._sockets.items()
            if connection.is_ready(mask)
        ]


def _wait(what: str, sockets: list[tuple[Socket, int]], seconds: float | None) -> bool:
    """Wait until one of the sockets is ready; return False if none is in time."""

    def is_ready() -> bool:
        return any(connection.is_ready(mask) for connection, mask in sockets)

    def next_arrival() -> float | None:
        arrivals = [at for each, _ in sockets if (at := each.next_arrival()) is not None]
        return min(arrivals, default=None)

    current().interrupt_by_chance()
    return current().step(what, is_ready, seconds, next_arrival)


class Selector:
    """A selector."""

    def __init__(self) -> None:
        self._sockets: dict[Socket, int] = {}

    def register(self, fileobj: Socket, events: int) -> selectors.SelectorKey:
        if fileobj.fileno() < 0:
            raise ValueError("Invalid file object")
        self._sockets[fileobj] = events
        return _key(fileobj, events)

    def unregister(self, fileobj: Socket) -> None:
        del self._sockets[fileobj]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        masks = [(each, _MASKS[events]) for each, events in self._sockets.items()]
        _wait("selects", masks, timeout)
        return [
            (_key(each, self._sockets[each]), self._sockets[each])
            for each, mask in masks
            if each in self._sockets and each.is_ready(mask)
        ]

    def close(self) -> None:
        self._sockets.clear()


def _key(fileobj: Socket, events: int) -> selectors.SelectorKey:
    return selectors.SelectorKey(fileobj, fileobj.fileno(), events, None)


def connect(family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> tuple[Socket, Socket]:
    """Return both ends of a new connection."""
    keeps_packets = kind == socket.SOCK_SEQPACKET
    there, back = _Direction(keeps_packets), _Direction(keeps_packets)
    return Socket(family, kind, (back, there)), Socket(family, kind, (there, back))


def create_connection(address: Any, timeout: float | None = None) -> Socket:
    """Return a socket that is connected to an address."""
    connection = Socket()
    connection.settimeout(timeout)
    connection.connect(address)
    return connection


def socketpair(
    family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM
) -> tuple[Socket, Socket]:
    """Return both ends of a new connection within a process."""
    return connect(family, kind)


def ioctl(connection: Socket, request: int, count: bytearray) -> None:
    """Return how many bytes the peer has not received."""
    assert request == termios.TIOCOUTQ
    if connection.fileno() < 0:
        raise ValueError("file descriptor cannot be a negative integer (-1)")
    count[:] = struct.pack("i", connection.unread_bytes)


def _listeners() -> dict[Any, Socket]:
    """Return the listeners of the run, by address."""
    return current().listeners


def _sockets() -> dict[int, Socket]:
    """Return the open sockets of the run, by number."""
    return current().sockets


_numbers = itertools.count(1_000_000)
_MASKS = {selectors.EVENT_READ: select.POLLIN, selectors.EVENT_WRITE: select.POLLOUT}

#: what each module has instead
SELECT: dict[str, Any] = {"poll": Poll}
FCNTL: dict[str, Any] = {"ioctl": ioctl}
SELECTORS: dict[str, Any] = {"DefaultSelector": Selector}
SOCKET: dict[str, Any] = {
    "socket": Socket,
    "create_connection": create_connection,
    "socketpair": socketpair,
}
