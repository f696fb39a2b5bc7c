"""The receiver's half of shared memory: segments of a peer, and the buffers in them.

Buffers lie in the mapped segment, so that receiving copies nothing.  At a fork, buffers in use
become private to each of the two processes, as all other memory does.  The sender does not use
their segment again, as the child may read it at any time.

    map ──> FREE ── buffers ──> IN USE ── all deleted ──> FREE          RELEASED is sent
              │                    └── fork ──> PRIVATE ── all deleted ──> unmapped  DISCARDED is
              └── FREED arrives ──> unmapped                                          sent

Making a mapping private takes the segment's descriptor, and a process keeps a limited number of
descriptors.  Buffers in segments without one are copied, and these segments are released at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import logging
import operator
import os
import resource
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rayrpc._transports.direct.shared_memory import (
    SEALS,
    copy,
    make_private,
    map_memory,
    offsets,
    slices,
)

__all__ = ["MappedSegments"]

logger = logging.getLogger(__name__)

# A process keeps at most so many descriptors of segments, and at most this part (1/n) of all the
# descriptors that it may have.
MAX_DESCRIPTORS = 256
MAX_DESCRIPTORS_PART = 8


class _Block(weakref.ref[Any]):
    """A weak reference to the object that all buffers in a segment reference.

    Deleting that object calls functions in C only: in a function in Python, an interrupt would keep
    the segment in use for ever.
    """

    __slots__ = ("on_deleted",)

    on_deleted: Callable[[Any], object]

    @classmethod
    def of(cls, block: Any, on_deleted: Callable[[Any], object], notice: Any) -> _Block:
        """Return the reference; ``on_deleted`` is called with the notice, and may be replaced."""
        made = cls(block, operator.methodcaller("on_deleted", notice))
        made.on_deleted = on_deleted
        return made


class _Mapping:
    """A segment that can become private.

    It holds no reference to the memory, which is unmapped when the last buffer is deleted.

    Args:
        memory (Array): the bytes of the segment.
        descriptor (int): of its file; closed when the mapping is private, or the memory unmapped.
        discard (Callable): called when it is private and the last buffer is deleted.
    """

    __slots__ = ("_descriptor", "_discard", "_memory", "_used")

    def __init__(self, memory: Any, descriptor: int, discard: Callable[[Any], object]) -> None:
        self._memory = weakref.ref(memory)
        self._descriptor = descriptor
        self._discard = discard
        self._used: _Block | None = None
        weakref.finalize(memory, self._close).atexit = False
        _mappings.add(self)

    def use(self, block: _Block) -> None:
        """Set the object that all buffers in the segment reference."""
        self._used = block

    @property
    def is_used(self) -> bool:
        """Tell whether a buffer in the segment exists."""
        return self._used is not None and self._used() is not None

    def before_fork(self) -> None:
        """Make the memory private if a buffer uses it.

        Raises:
            OSError: there is no memory, or no address space.
        """
        used = self._used
        block = None if used is None else used()
        memory = self._memory()  # it must not be unmapped meanwhile
        if used is not None and block is not None and memory is not None:
            make_private(memory, self._descriptor)
            used.on_deleted = self._discard
            self._close()

    def _close(self) -> None:
        _mappings.discard(self)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


# The mappings with a descriptor, of all connections, as a tensor may outlive its connection.
_mappings: set[_Mapping] = set()
# Held at a fork, and while a segment comes into use; reentrant, as a signal's handler may fork.
_forking = threading.RLock()
_handles_forks = False


def _handle_forks() -> None:
    global _handles_forks
    with _forking:
        if not _handles_forks:
            _handles_forks = True
            os.register_at_fork(
                before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
            )


def _before_fork() -> None:
    # before the fork: after it, other threads may write to the memory before the child's first step
    _forking.acquire()
    for mapping in list(_mappings):
        try:
            mapping.before_fork()
        except OSError as exc:
            logger.error(
                "a forked child shares received tensors with this process, and each sees what the "
                "other writes to them: they cannot be made private (%s). Free memory, or fork "
                "before the tensors are received.",
                str(exc),  # the exception's traceback would keep the memory
            )


def _after_fork() -> None:
    with contextlib.suppress(RuntimeError):  # a signal interrupted _before_fork
        _forking.release()


def _has_room() -> bool:
    """Tell whether this process may keep one more descriptor."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    part = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft // MAX_DESCRIPTORS_PART
    return len(_mappings) < min(MAX_DESCRIPTORS, part)


class MappedSegments:
    """The receiver's view of a peer's segments.

    Args:
        notify (Callable): called with a notice when no buffer of a segment is left; by the garbage
            collector, in any thread, so it must not take a lock.
        notice (Callable): returns the notice; takes the number of a segment, and whether the sender
            may use it again.
    """

    def __init__(
        self, notify: Callable[[Any], object], notice: Callable[[int, bool], object]
    ) -> None:
        self._notify = notify
        self._notice = notice
        # memory and mapping of each segment; buffers are copied where there is no mapping
        self._segments: dict[int, tuple[Any, _Mapping | None]] = {}
        self._blocks: dict[int, _Block] = {}
        _handle_forks()

    @property
    def used(self) -> list[int]:
        """The numbers of the segments of which a buffer exists."""
        return [number for number, block in self._blocks.items() if block() is not None]

    def has(self, number: int) -> bool:
        """Tell whether a segment is mapped."""
        return number in self._segments

    def map(self, number: int, descriptor: int, capacity: int) -> None:
        """Map a segment, and close its descriptor, now or later.

        Raises:
            OSError: it cannot be mapped, is smaller than ``capacity``, or could become so.
        """
        try:
            _check(descriptor, capacity)
            memory = map_memory(descriptor, capacity)
        except BaseException:
            os.close(descriptor)
            raise
        if _has_room():
            discard = functools.partial(_discard, weakref.ref(self), number)
            self._segments[number] = memory, _Mapping(memory, descriptor, discard)
        else:
            os.close(descriptor)
            self._segments[number] = memory, None

    def unmap(self, number: int) -> None:
        """Unmap a segment, as soon as none of its buffers is left."""
        self._segments.pop(number, None)
        self._blocks.pop(number, None)

    def close(self) -> None:
        """Unmap all segments, each as soon as none of its buffers is left."""
        self._segments.clear()
        self._blocks.clear()

    def buffers(self, number: int, lengths: Sequence[int]) -> list[memoryview]:
        """Return the buffers in a segment: writable, and valid as long as they are referenced.

        Raises:
            ValueError: it is not mapped, they do not fit in it, or earlier buffers still use it.
        """
        starts, size = offsets(lengths)
        memory, mapping = self._segments.get(number, ((), None))
        if size > len(memory):
            raise ValueError(f"{size} bytes do not fit in a segment of {len(memory)}")
        if mapping is None:
            view = self._copied(number, memory, size)
        else:
            view = self._mapped(number, memory, mapping, size)
        return slices(view, starts, lengths)

    def _mapped(self, number: int, memory: Any, mapping: _Mapping, size: int) -> memoryview:
        notice = self._notice(number, True)
        with _forking:
            if mapping.is_used:
                raise ValueError("the segment is in use")
            block = (ctypes.c_ubyte * size).from_buffer(memory)
            used = _Block.of(block, self._notify, notice)
            self._blocks[number] = used
            mapping.use(used)
        return np.frombuffer(memoryview(block), np.uint8).data

    def discard(self, number: int) -> None:
        """Unmap a segment that is private, and have the sender free it."""
        self.unmap(number)
        self._notify(self._notice(number, False))

    def _copied(self, number: int, memory: Any, size: int) -> memoryview:
        copied = np.empty(size, np.uint8)
        copy(copied, np.frombuffer(memory, np.uint8, size))
        reusable = not _has_room()  # else a new one, with a descriptor, replaces it
        if not reusable:
            self.unmap(number)
        self._notify(self._notice(number, reusable))
        return copied.data


def _discard(receiver: weakref.ref[MappedSegments], number: int, _: object) -> None:
    segments = receiver()
    if segments is not None:
        segments.discard(number)


def _check(descriptor: int, capacity: int) -> None:
    """Check that a segment's memory exists, and always will: else reading it kills the process."""
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    if seals & SEALS != SEALS:
        raise OSError("the segment is not sealed against a change of its size")
    size = os.fstat(descriptor).st_size
    if not 0 < capacity <= size:
        raise OSError(f"the segment has {size} bytes instead of {capacity}")
