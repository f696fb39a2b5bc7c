"""The sender's half of shared memory: segments, in which the receiver's buffers lie.

The sender makes segments (files without a name), and sends the descriptor of each before the first
message that uses it.  A segment holds the buffers of one message.  The receiver's tensors use its
memory; when the last of them is deleted, the receiver releases the segment, and the sender reuses
it.  Segments have no name, so none is left when a process dies, and a fixed size: if the sender
could shorten a segment, reading beyond the new end would kill the receiver.

    acquire ──> IN USE ── RELEASED arrives ──> FREE ── acquire ──> IN USE
                  │                             └── trim ──> freed         FREED is sent
                  └── DISCARDED arrives ──> freed

``mapped_segments`` is the receiver's half.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import io
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

__all__ = [
    "SEALS",
    "Segment",
    "SegmentPool",
    "copied",
    "copy",
    "is_supported",
    "make_private",
    "map_memory",
    "offsets",
    "slices",
]

# A connection's free segments are kept up to this many bytes in all, and for this long.
MAX_FREE_BYTES = 1 << 30
MAX_FREE_SECONDS = 10.0
MIN_SEGMENT_BYTES = 256 << 10
# Most segments in use on a connection; Linux allows a process 65,530 mappings by default.
MAX_SEGMENTS = 1024
ALIGNMENT = 64
# The seals that fix the size of a segment's file; they cannot be removed again.
SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
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

    So messages of nearly the same size reuse a segment, and little memory is wasted.
    """
    step = max(MIN_SEGMENT_BYTES, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def copy(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copy bytes; large arrays by torch, on all cores."""
    if len(source) >= PARALLEL_BYTES and source.flags.writeable:  # torch warns of read-only arrays
        torch.from_numpy(target).copy_(torch.from_numpy(source))
    else:
        np.copyto(target, source)


def copied(view: memoryview) -> memoryview:
    """Return a copy of bytes."""
    if len(view) < LARGE_BYTES:
        return memoryview(bytearray(view))
    source = np.frombuffer(view, np.uint8)
    target = np.empty_like(source)
    copy(target, source)
    return target.data


def slices(view: memoryview, starts: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
    """Return the buffers that lie in the memory of a segment."""
    return [view[a : a + length] for a, length in zip(starts, lengths, strict=True)]


def map_memory(descriptor: int, capacity: int) -> Any:
    """Return a file's memory as an array of bytes; it is unmapped when the array is deleted.

    Python's own ``mmap`` keeps a descriptor for as long as the memory is mapped.
    """
    mapped = _MappedFile(descriptor, capacity)
    memory: Any = (ctypes.c_ubyte * capacity).from_address(mapped.address)
    memory.mapped = mapped
    return memory


def make_private(memory: Any, descriptor: int) -> None:
    """Make mapped memory private: writes to it no longer reach its file.

    Other threads may read and write it meanwhile: the system replaces the mapping in one step.

    Args:
        memory (Array): as ``map_memory`` returned it.
        descriptor (int): the descriptor of its file.

    Raises:
        OSError: there is no memory, or no address space; the mapping is as before.
    """
    capacity = len(memory)
    # elsewhere first: mapping in place may fail after it has unmapped the old memory
    address = _map(descriptor, capacity, mmap.MAP_PRIVATE, [])
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    if _libc.mremap(address, capacity, capacity, flags, ctypes.addressof(memory)) == _FAILED:
        error = _error()
        _libc.munmap(address, capacity)
        raise error


class _MappedFile:
    """A file's memory; it is unmapped when this is deleted."""

    __slots__ = ("_addresses", "_capacity", "address")

    def __init__(self, descriptor: int, capacity: int) -> None:
        self._capacity = capacity
        self._addresses: list[int] = []
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.address = _map(descriptor, capacity, flags, self._addresses)

    def __del__(self) -> None:
        for address in getattr(self, "_addresses", ()):  # an interrupt may end the constructor
            if address != _FAILED:
                _libc.munmap(address, self._capacity)


def _map(descriptor: int, capacity: int, flags: int, into: list[int]) -> int:
    """Map a file, and return the address of its memory.

    Args:
        descriptor, capacity: the file's descriptor, and its size in bytes.
        flags: the flags of ``mmap``.
        into: the list to which the call in C that maps the file adds the address, or ``_FAILED``.
            An interrupt during the call, which may take a second, is raised after that.
    """
    arguments = None, capacity, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0
    into.extend(itertools.starmap(_libc.mmap, (arguments,)))
    if into[0] == _FAILED:
        raise _error()
    return into[0]


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
if hasattr(_libc, "mremap"):
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = [
        ctypes.c_void_p,
        *[ctypes.c_size_t] * 2,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
_FAILED = ctypes.c_void_p(-1).value


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
        #: when the receiver released it last, and by which notice
        self.free_since = 0.0
        self.released_by: object = None
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        # in one call in C: an interrupt between the two would leave the descriptor open
        [file] = map(io.FileIO, map(os.memfd_create, ["rayrpc"], [flags]), ["r+"])
        try:
            descriptor = file.fileno()
            os.ftruncate(descriptor, capacity)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
            self._memory = map_memory(descriptor, capacity)
            self._view = memoryview(self._memory).cast("B")
            send(descriptor)
        finally:
            file.close()

    def fill(self, views: Sequence[memoryview], starts: Sequence[int]) -> None:
        """Copy buffers in, each to its offset."""
        for start, view in zip(starts, views, strict=True):
            length = view.nbytes
            if length < LARGE_BYTES:
                self._view[start : start + length] = view
            else:
                target = np.frombuffer(self._memory, np.uint8, length, start)
                copy(target, np.frombuffer(view, np.uint8))

    def buffers(self, starts: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
        """Return the buffers that were copied in."""
        return slices(self._view, starts, lengths)


class Lease:
    """A message's use of a segment; deleting the lease ends it, unless the message is written.

    So a segment is freed also if an exception, such as Ctrl-C, strikes the sender.

    Args:
        ended (deque): takes the number of the segment at the end; the garbage collector adds it, in
            any thread.
    """

    __slots__ = ("_ended", "number")

    def __init__(self, ended: collections.deque[int]) -> None:
        self._ended = ended
        self.number = 0

    def begin_to_send(self) -> None:
        """Note that the message may arrive, so that the receiver has to release the segment."""
        self.number = 0

    def __del__(self) -> None:
        number = getattr(self, "number", 0)  # an interrupt may end the constructor
        if number:
            self._ended.append(number)


class SegmentPool:
    """The sender's segments on one connection.

    An interrupt may come in any call: what must be done together is one call in C.

    Args:
        send (Callable): sends a segment's number, capacity and descriptor to the receiver;
            OSError if that is impossible now.
    """

    def __init__(self, send: Callable[[int, int, int], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._used: dict[int, Segment] = {}
        self._free: dict[int, list[Segment]] = collections.defaultdict(list)
        self._ended: collections.deque[int] = collections.deque()
        self._lock = threading.Lock()
        self._closed = False

    def lease(self) -> Lease:
        """Return a lease for ``acquire``."""
        return Lease(self._ended)

    def acquire(self, size: int, lease: Lease | None = None) -> Segment:
        """Return a segment that holds ``size`` bytes.

        Args:
            size: in bytes.
            lease: frees the segment if the message is not written; None: it always is.

        Raises:
            OSError: there is no memory, or no descriptor, for another segment.
        """
        capacity = capacity_for(size)
        lease = lease or Lease(collections.deque(maxlen=0))  # its end has no effect
        with self._lock:
            free = self._free[capacity]
            if free:
                segment = free[-1]
                lease.number = segment.number
                self._used[segment.number] = segment
                del free[-1]
                return segment
        if len(self._used) >= MAX_SEGMENTS:
            raise OSError("too many segments are in use")
        number = next(self._numbers)
        lease.number = number
        try:
            segment = Segment(number, capacity, lambda fd: self._send(number, capacity, fd))
        except OSError:
            lease.number = 0
            raise
        with self._lock:
            self._used[number] = segment
        return segment

    def release(self, number: int, notice: object = None) -> bool:
        """End the use of a segment.

        Args:
            number: of the segment.
            notice: the receiver's notice of it; a second call with it has no effect.

        Returns:
            Whether the segment is kept; else call ``discard``.
        """
        with self._lock:
            segment = self._used.get(number)
            if segment is None or (notice is not None and segment.released_by is notice):
                return True
            if self._closed or self._free_bytes + segment.capacity > MAX_FREE_BYTES:
                return False
            segment.free_since = time.monotonic()
            keep, used = self._free[segment.capacity].extend, map(self._used.pop, (number,))
            segment.released_by = notice  # no interrupt comes between this line and the next
            keep(used)
            return True

    def discard(self, number: int) -> None:
        """Free a segment that was in use, and that is not to be used again."""
        with self._lock:
            self._used.pop(number, None)

    def trim(self) -> list[int]:
        """Free segments that were unused for a while, or not sent; return their numbers.

        Another transport may send a message from the memory of a segment that was not sent: so such
        a segment is not used again.
        """
        limit = time.monotonic() - MAX_FREE_SECONDS
        freed = []
        with self._lock:
            for capacity, segments in list(self._free.items()):
                while segments and segments[0].free_since < limit:
                    freed.append(segments.pop(0).number)
                if not segments:
                    del self._free[capacity]
            while self._ended:
                number = self._ended.popleft()
                self._used.pop(number, None)
                freed.append(number)
        return freed

    @property
    def _free_bytes(self) -> int:
        return sum(capacity * len(segments) for capacity, segments in self._free.items())

    def close(self) -> None:
        """Free all segments; the receiver's mappings stay valid."""
        with self._lock:
            self._closed = True
            self._used.clear()
            self._free.clear()

    def close_after_fork(self) -> None:
        """Free a forked child's copies of all segments."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self.close()
