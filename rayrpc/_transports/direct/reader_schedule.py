"""Decide which thread reads the caller's end of a connection: events in, the next reader out.

A connection is read only while a reply is expected.  A caller that waits for its reply reads the
connection itself if no other thread does, and completes the calls of others on the way; when it
has its reply, a waiting caller takes over.  While calls complete by callback and no caller waits,
a thread of the cache reads.

    CONNECTING ── release ──> as below
    IDLE ── claim ──> CALLER_READS                        a caller waits
         ── claim, due_start, end_delay ──> THREAD_READS    a thread starts, ``begin``
    CALLER_READS, THREAD_READS ── release ──┬──> CALLER_READS    a waiting caller is the next
                                            ├──> THREAD_READS    callbacks are due
                                            └──> IDLE
    any ── break_off ──> BROKEN                           no thread reads any more

Invariants: in IDLE no caller waits, and where callbacks are due a delayed start is under way; a
caller is chosen once, and removed from those that wait as it is chosen.

An exception, such as Ctrl-C, may strike a thread after a decision, before the thread has notified
the chosen caller, or started the chosen thread.  The schedule keeps the decision in ``reader`` and
``start``, so that ``ReplyReader.repair`` can carry it out.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Generic, Literal, TypeVar

__all__ = [
    "BROKEN",
    "CALLER_READS",
    "CONNECTING",
    "IDLE",
    "NOTHING",
    "ReaderSchedule",
    "START_DELAYED",
    "START_THREAD",
    "Start",
    "THREAD_READS",
]

CONNECTING, IDLE, CALLER_READS, THREAD_READS, BROKEN = range(5)

C = TypeVar("C")


class Start(Enum):
    """Instruction: which reader to start."""

    NOTHING = 0
    THREAD = 1  # a thread that reads
    DELAYED = 2  # a thread that reads after a while, if ``end_delay`` then says so


# Reading an enum's attribute takes ten times as long as reading a global.
NOTHING: Final = Start.NOTHING
START_THREAD: Final = Start.THREAD
START_DELAYED: Final = Start.DELAYED


class ReaderSchedule(Generic[C]):
    """Schedule the reader of a connection; pure, and guarded by the connection's lock.

    The type parameter is the type of what notifies a waiting caller.
    """

    __slots__ = ("_starts", "_waiting", "callbacks", "is_delayed", "reader", "start", "state")

    def __init__(self) -> None:
        self.state = CONNECTING
        #: how many calls under way complete by callback
        self.callbacks = 0
        #: in the state CALLER_READS: the caller that claimed to read, or that was chosen
        self.reader: object = None
        #: number of the start of a thread that has not begun to read; 0: there is none
        self.start = 0
        #: a delayed start is under way, whatever the state
        self.is_delayed = False
        self._waiting: dict[C, None] = {}  # callers that do not read, in order
        self._starts = 0  # so far

    def claim(self, state: int, reader: object = None) -> bool:
        """Become the reader if there is none.

        Args:
            state: CALLER_READS or THREAD_READS.
            reader: identifies the caller; None for a thread.
        """
        if self.state != IDLE:
            return False
        self.state = state
        self.reader = reader
        return True

    def begin(self, start: int) -> bool:
        """Begin to read in a thread; return False if the thread of this start has begun before."""
        if not start or self.start != start:
            return False
        self.start = 0
        return True

    def add_caller(self, caller: C) -> None:
        """Add a caller that waits, because ``claim`` failed."""
        self._waiting[caller] = None

    def remove_caller(self, caller: C) -> None:
        """Remove a caller that waits no longer; nothing happens if it was chosen."""
        self._waiting.pop(caller, None)

    def due_start(self, urgent: bool) -> Start:
        """Return what to start so that the replies of ``callbacks`` are read.

        Args:
            urgent: start a thread at once, not after a delay.
        """
        if self.state != IDLE or not self.callbacks:
            return NOTHING
        if urgent:
            return self._start_thread()
        if self.is_delayed:
            return NOTHING
        self.is_delayed = True
        return START_DELAYED

    def _start_thread(self) -> Literal[Start.THREAD]:
        self.state = THREAD_READS
        self.reader = None
        self._starts += 1
        self.start = self._starts
        return START_THREAD

    def end_delay(self) -> bool:
        """End a delayed start; return True if its thread is now the reader."""
        self.is_delayed = False
        return self.callbacks > 0 and self.claim(THREAD_READS)

    def release(self, by: object = None) -> C | Literal[Start.NOTHING, Start.THREAD]:
        """Release the reader, or end the connecting.

        Args:
            by: the ``reader`` that releases; None: a thread.

        Returns:
            The caller that reads next, or what to start. If the caller no longer waits, call
            ``release`` with it. NOTHING if ``by`` is not the reader.
        """
        if self.state == BROKEN or self.reader is not by:
            return NOTHING
        if self._waiting:
            caller = next(iter(self._waiting))
            del self._waiting[caller]
            self.state = CALLER_READS
            self.reader = caller
            return caller
        if self.callbacks:
            return self._start_thread()
        self.reader = None
        self.state = IDLE
        return NOTHING

    def break_off(self) -> bool:
        """End the schedule; return False if it had ended before."""
        is_first = self.state != BROKEN
        self.state = BROKEN
        self.reader = None
        return is_first
