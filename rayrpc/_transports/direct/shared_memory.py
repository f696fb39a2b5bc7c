"""Memory that both ends of a connection map: the sender copies buffers in, the receiver uses them.

The sender makes segments (files without a name), and sends the descriptor of each before the first
message that uses it.  A segment holds the buffers of one message.  The receiver's tensors use its
memory; when the last of them is deleted, the receiver releases the segment, and the sender reuses
it.  Segments have no name, so none is left when a process dies.

    sender:    acquire ──> in use ── release ──> free ── acquire, trim ──> in use, FREED
    receiver:  map ──> buffers ── all deleted ──> RELEASED is sent ── FREED arrives ──> unmap
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

__all__ = [
    "MappedSegments",
    "Segment",
    "SegmentPool",
    "is_supported",
    "offsets",
    "receive_descriptor",
    "send_descriptor",
]

# A connection's free segments are kept up to this many bytes in all, and for this long.
MAX_FREE_BYTES = 1 << 30
MAX_FREE_SECONDS = 10.0
MIN_SEGMENT_BYTES = 256 << 10
# Segments in use on a connection; Linux allows a process 65,530 mappings by default.
MAX_SEGMENTS = 1024
ALIGNMENT = 64
# From this size on, copy with the GIL released.
LARGE_BYTES = 256 << 10
# From this size on, copy on all cores.
PARALLEL_BYTES = 4 << 20


def is_supported() -> bool:
    """Tell whether this system has files without a name that can be mapped."""
    return hasattr(os, "memfd_create")


def offsets(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of buffers in a segment, and their size in all, in bytes."""
    padded = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
    starts = list(itertools.accumulate(padded, initial=0))
    return starts, starts.pop()


def capacity_for(size: int) -> int:
    """Return the size of the segment to make for ``size`` bytes: up to an eighth more.

    So a segment is reused by messages of nearly its size, and little memory is wasted.
    """
    step = max(MIN_SEGMENT_BYTES, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def copy(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copy bytes; large arrays by torch, on all cores."""
    if len(source) >= PARALLEL_BYTES and source.flags.writeable:  # torch warns of others
        torch.from_numpy(target).copy_(torch.from_numpy(source))
    else:
        np.copyto(target, source)


def _map(descriptor: int, capacity: int) -> Any:
    """Return a file's memory as an array of bytes; it is unmapped when the array is deleted.

    Python's own ``mmap`` keeps a descriptor for as long as the memory is mapped.
    """
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    address = _libc.mmap(None, capacity, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_ubyte * capacity).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, capacity).atexit = False
    return memory


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def send_descriptor(connection: socket.socket, data: bytes, descriptor: int) -> None:
    """Send a descriptor along with a packet; OSError if that would block."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))
    connection.sendmsg([data], [rights], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive_descriptor(connection: socket.socket, size: int, flags: int = 0) -> tuple[bytes, int]:
    """Return the next packet and its descriptor.

    Raises:
        BlockingIOError: no packet has arrived.
        OSError: the peer closed the connection, or sent no descriptor.
    """
    flags |= socket.MSG_CMSG_CLOEXEC
    data, extra, _, _ = connection.recvmsg(size, socket.CMSG_SPACE(struct.calcsize("i")), flags)
    for level, kind, rights in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return data, struct.unpack("i", rights)[0]
    raise OSError("the packet has no descriptor" if data else "the peer closed it")


class Segment:
    """A file without a name in the sender's memory.

    Args:
        number (int): identifies it on its connection.
        capacity (int): in bytes.
        send (Callable): sends a descriptor to the receiver.
    """

    def __init__(self, number: int, capacity: int, send: Callable[[int], None]) -> None:
        self.number = number
        self.capacity = capacity
        #: when the receiver released it last
        self.free_since = 0.0
        descriptor = os.memfd_create("rayrpc", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, capacity)
            self._memory = _map(descriptor, capacity)
            self._view = memoryview(self._memory).cast("B")
            send(descriptor)
        finally:
            os.close(descriptor)

    def fill(self, views: Sequence[memoryview], starts: Sequence[int]) -> None:
        """Copy buffers in, each to its offset."""
        for start, view in zip(starts, views, strict=True):
            length = view.nbytes
            if length < LARGE_BYTES:
                self._view[start : start + length] = view
            else:
                target = np.frombuffer(self._memory, np.uint8, length, start)
                copy(target, np.frombuffer(view, np.uint8))


class SegmentPool:
    """The sender's segments on one connection.

    Args:
        send (Callable): sends a segment's number, capacity and descriptor to the receiver;
            OSError if that is impossible now.
    """

    def __init__(self, send: Callable[[int, int, int], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._used: dict[int, Segment] = {}
        self._free: dict[int, list[Segment]] = collections.defaultdict(list)
        self._free_bytes = 0
        self._lock = threading.Lock()
        self._closed = False

    def acquire(self, size: int) -> Segment:
        """Return a segment that holds ``size`` bytes.

        Raises:
            OSError: there is no memory, or no descriptor, for another.
        """
        capacity = capacity_for(size)
        with self._lock:
            segment = self._free[capacity].pop() if self._free[capacity] else None
            if segment is not None:
                self._free_bytes -= capacity
        if segment is None:
            if len(self._used) >= MAX_SEGMENTS:
                raise OSError("too many segments are in use")
            number = next(self._numbers)
            segment = Segment(number, capacity, lambda fd: self._send(number, capacity, fd))
        with self._lock:
            self._used[segment.number] = segment
        return segment

    def release(self, number: int) -> bool:
        """End the use of a segment; return True if it is kept, False if its memory is freed."""
        with self._lock:
            segment = self._used.pop(number, None)
            if segment is None:
                return True
            if self._closed or self._free_bytes + segment.capacity > MAX_FREE_BYTES:
                return False
            self._free_bytes += segment.capacity
            segment.free_since = time.monotonic()
            self._free[segment.capacity].append(segment)
            return True

    def trim(self) -> list[int]:
        """Free the segments that were not used for a while; return their numbers."""
        limit = time.monotonic() - MAX_FREE_SECONDS
        freed = []
        with self._lock:
            for segments in self._free.values():
                while segments and segments[0].free_since < limit:
                    segment = segments.pop(0)
                    self._free_bytes -= segment.capacity
                    freed.append(segment.number)
        return freed

    def close(self) -> None:
        """Free all segments; the receiver's mappings stay valid."""
        with self._lock:
            self._closed = True
            self._used.clear()
            self._free.clear()


class MappedSegments:
    """The receiver's view of a peer's segments.

    Args:
        on_released (Callable): called with the number of a segment when none of its buffers is
            left; by the garbage collector, in any thread, so it must not take a lock.
    """

    def __init__(self, on_released: Callable[[int], None]) -> None:
        self._on_released = on_released
        self._maps: dict[int, Any] = {}
        self._blocks: dict[int, Any] = {}

    def has(self, number: int) -> bool:
        """Tell whether a segment is mapped."""
        return number in self._maps

    def map(self, number: int, descriptor: int, capacity: int) -> None:
        """Map a segment; the descriptor is closed."""
        try:
            self._maps[number] = _map(descriptor, capacity)
        finally:
            os.close(descriptor)

    def unmap(self, number: int) -> None:
        """Unmap a segment, as soon as none of its buffers is left."""
        self._maps.pop(number, None)

    def buffers(self, number: int, lengths: Sequence[int]) -> list[memoryview]:
        """Return the buffers in a segment: writable, and valid as long as they are referenced."""
        starts, size = offsets(lengths)
        block = (ctypes.c_ubyte * size).from_buffer(self._maps[number])

        def on_deleted(_: object) -> None:
            self._blocks.pop(number, None)
            self._on_released(number)

        self._blocks[number] = weakref.ref(block, on_deleted)
        view = np.frombuffer(memoryview(block), np.uint8).data
        return [view[a : a + length] for a, length in zip(starts, lengths, strict=True)]
