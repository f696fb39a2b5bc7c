"""Memory that both ends of a connection map: the sender copies buffers in, the receiver uses them.

The sender makes segments (files without a name), and passes their descriptors along with the
messages that use them first.  A segment holds the buffers of one message.  The receiver's tensors
lie in it; when the last of them is gone, the receiver says so, and the sender uses the segment
again.  Nothing has a name, so nothing is left when a process dies.
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

# Segments that are not in use are kept up to this many bytes in all, and for this long.
KEPT_BYTES = 1 << 30
KEPT_SECONDS = 10.0
SMALLEST = 256 << 10
# A process may have so many mappings, which is 65,530 by default, for all of its connections.
MOST_SEGMENTS = 1024
ALIGNMENT = 64
# Copies of so many bytes are worth letting other threads of Python run ...
LARGE_BYTES = 256 << 10
# ... and of so many, using them.
PARALLEL_BYTES = 4 << 20


def is_supported() -> bool:
    """Tell whether this system has files without a name that can be mapped."""
    return hasattr(os, "memfd_create")


def offsets(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return where buffers lie in a segment, and how much of it they need."""
    padded = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
    starts = list(itertools.accumulate(padded, initial=0))
    return starts, starts.pop()


def capacity_for(size: int) -> int:
    """Return the size of the segment to make for ``size`` bytes: up to an eighth more.

    So segments fit messages that are nearly alike, and little memory lies idle.
    """
    step = max(SMALLEST, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def copy(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copy bytes; many of them by torch, on all cores."""
    if len(source) >= PARALLEL_BYTES and source.flags.writeable:  # else torch warns
        torch.from_numpy(target).copy_(torch.from_numpy(source))
    else:
        np.copyto(target, source)


def _map(descriptor: int, capacity: int) -> Any:
    """Return a file's memory as an array of bytes; it is unmapped when the array is gone.

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


def send_descriptor(side: socket.socket, data: bytes, descriptor: int) -> None:
    """Send a descriptor along with a packet; OSError if it cannot go at once."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))
    side.sendmsg([data], [rights], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive_descriptor(side: socket.socket, size: int, flags: int = 0) -> tuple[bytes, int]:
    """Return the next packet and its descriptor.

    Raises:
        BlockingIOError: nothing is there.
        OSError: the other end is gone, or sent no descriptor.
    """
    flags |= socket.MSG_CMSG_CLOEXEC
    data, extra, _, _ = side.recvmsg(size, socket.CMSG_SPACE(struct.calcsize("i")), flags)
    for level, kind, rights in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return data, struct.unpack("i", rights)[0]
    raise OSError("it brought no descriptor" if data else "it was closed")


class Segment:
    """A piece of memory of the sender's.

    Args:
        number (int): names it on its connection.
        capacity (int): in bytes.
        pass_on (Callable): called with a descriptor, to give it to the receiver.
    """

    def __init__(self, number: int, capacity: int, pass_on: Callable[[int], None]) -> None:
        self.number = number
        self.capacity = capacity
        #: when it was given back last
        self.free_since = 0.0
        descriptor = os.memfd_create("rayrpc", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, capacity)
            self._memory = _map(descriptor, capacity)
            self._view = memoryview(self._memory).cast("B")
            pass_on(descriptor)
        finally:
            os.close(descriptor)

    def fill(self, views: Sequence[memoryview], starts: Sequence[int]) -> None:
        """Copy buffers in, each to its start."""
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
        pass_on (Callable): called with a segment's number, capacity and descriptor, to give it
            to the receiver; OSError if that cannot be done now.
    """

    def __init__(self, pass_on: Callable[[int, int, int], None]) -> None:
        self._pass_on = pass_on
        self._numbers = itertools.count(1)
        self._used: dict[int, Segment] = {}
        self._free: dict[int, list[Segment]] = collections.defaultdict(list)
        self._kept = 0
        self._lock = threading.Lock()
        self._closed = False

    def take(self, size: int) -> Segment:
        """Return a segment that holds ``size`` bytes.

        Raises:
            OSError: there is no memory, or no descriptor, for another.
        """
        capacity = capacity_for(size)
        with self._lock:
            segment = self._free[capacity].pop() if self._free[capacity] else None
            if segment is not None:
                self._kept -= capacity
        if segment is None:
            if len(self._used) >= MOST_SEGMENTS:
                raise OSError("too many segments are in use")
            number = next(self._numbers)
            segment = Segment(number, capacity, lambda fd: self._pass_on(number, capacity, fd))
        with self._lock:
            self._used[segment.number] = segment
        return segment

    def give_back(self, number: int) -> bool:
        """Take back a segment; return True if it is kept, False if its memory is let go."""
        with self._lock:
            segment = self._used.pop(number, None)
            if segment is None:
                return True
            if self._closed or self._kept + segment.capacity > KEPT_BYTES:
                return False
            self._kept += segment.capacity
            segment.free_since = time.monotonic()
            self._free[segment.capacity].append(segment)
            return True

    def trim(self) -> list[int]:
        """Let go of segments that were not used for a while; return their numbers."""
        limit = time.monotonic() - KEPT_SECONDS
        dropped = []
        with self._lock:
            for segments in self._free.values():
                while segments and segments[0].free_since < limit:
                    segment = segments.pop(0)
                    self._kept -= segment.capacity
                    dropped.append(segment.number)
        return dropped

    def close(self) -> None:
        """Let go of all memory; what receivers have mapped stays theirs."""
        with self._lock:
            self._closed = True
            self._used.clear()
            self._free.clear()


class MappedSegments:
    """The receiver's view of a peer's segments.

    Args:
        unused (Callable): told the number of a segment when nothing lies in it any more; it may
            be called at any moment, by any thread, and must not take a lock.
    """

    def __init__(self, unused: Callable[[int], None]) -> None:
        self._unused = unused
        self._maps: dict[int, Any] = {}
        self._blocks: dict[int, Any] = {}

    def has(self, number: int) -> bool:
        """Tell whether a segment is mapped."""
        return number in self._maps

    def add(self, number: int, descriptor: int, capacity: int) -> None:
        """Map a segment; the descriptor is closed."""
        try:
            self._maps[number] = _map(descriptor, capacity)
        finally:
            os.close(descriptor)

    def drop(self, number: int) -> None:
        """Forget a segment."""
        self._maps.pop(number, None)

    def buffers(self, number: int, lengths: Sequence[int]) -> list[memoryview]:
        """Return the buffers in a segment: writable, and this process's until they are gone."""
        starts, size = offsets(lengths)
        block = (ctypes.c_ubyte * size).from_buffer(self._maps[number])

        def gone(_: object) -> None:
            self._blocks.pop(number, None)
            self._unused(number)

        self._blocks[number] = weakref.ref(block, gone)
        view = np.frombuffer(memoryview(block), np.uint8).data
        return [view[a : a + length] for a, length in zip(starts, lengths, strict=True)]
