"""Memory for large buffers that arrive by TCP; it is reused when a buffer is deleted.

New memory costs a page fault for every 4 KB, which takes as long as receiving 4 KB.

    acquire ──> IN USE ── the buffer is deleted ──> FREE ── acquire ──> IN USE
                                                     └── trim ──> freed
"""

from __future__ import annotations

import collections
import ctypes
import threading
import time
import weakref
from typing import Any

import numpy as np

from rayrpc._transports.direct.shared_memory import MAX_FREE_SECONDS, capacity_for

__all__ = ["ReceivedMemory"]

# Free memory is kept up to this many bytes in all.
MAX_FREE_BYTES = 256 << 20


class _Block(weakref.ref[Any]):
    """A weak reference to the buffer that a user of some memory holds."""

    __slots__ = ("memory",)

    memory: Any


class ReceivedMemory:
    """Provide the memory of received buffers; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[tuple[float, Any]]] = collections.defaultdict(list)
        self._used: dict[int, _Block] = {}
        # The garbage collector appends to it, and must not take the lock.  It calls no function in
        # Python for that: in one, an interrupt would keep the memory in use for ever.
        self._deleted: collections.deque[_Block] = collections.deque()

    def acquire(self, size: int) -> memoryview:
        """Return a writable buffer of ``size`` bytes; its memory is not reused while it exists.

        Raises:
            MemoryError, ValueError: there is no such memory.
        """
        capacity = capacity_for(size)
        with self._lock:
            self._collect()
            free = self._free[capacity]
            memory: Any = free.pop()[1] if free else None
        if memory is None:
            memory = np.empty(capacity, np.uint8)
        block = (ctypes.c_ubyte * size).from_buffer(memory)
        used = _Block(block, self._deleted.append)
        used.memory = memory
        self._used[id(used)] = used
        return np.frombuffer(memoryview(block), np.uint8).data

    def trim(self) -> None:
        """Free memory that was not used for a while."""
        limit = time.monotonic() - MAX_FREE_SECONDS
        with self._lock:
            self._collect()
            for capacity, free in list(self._free.items()):
                while free and free[0][0] < limit:
                    del free[0]
                if not free:
                    del self._free[capacity]

    @property
    def _free_bytes(self) -> int:
        return sum(capacity * len(free) for capacity, free in self._free.items())

    def _collect(self) -> None:
        """Take back the memory of deleted buffers, up to a limit; call it with the lock held.

        A call after an interrupt takes back no memory twice.
        """
        now = time.monotonic()
        while self._deleted:
            block = self._deleted[0]
            if self._used.pop(id(block), None) is not None:
                memory = block.memory
                if self._free_bytes + len(memory) <= MAX_FREE_BYTES:
                    self._free[len(memory)].append((now, memory))
            self._deleted.popleft()
