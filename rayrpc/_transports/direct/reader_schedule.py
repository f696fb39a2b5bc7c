"""Decide which thread reads the caller's end of a connection: events in, the next reader out.

A connection is read only while a reply is expected.  A caller that waits for its reply reads the
connection itself if no other thread does, and completes the calls of others on the way; when it
has its reply, a waiting caller takes over.  While calls complete by callback and no caller waits,
a thread of the cache reads.

    CONNECTING ── release ──> as below
    IDLE ── claim ──> CALLER_READS                        a caller waits
         ── claim, add_callback, end_delay ──> THREAD_READS
    CALLER_READS, THREAD_READS ── release ──┬──> CALLER_READS    a waiting caller is the next
                                            ├──> THREAD_READS    callbacks are due
                                            └──> IDLE
    any ── break_off ──> BROKEN                           no thread reads any more

Invariants: in IDLE no caller waits, and where callbacks are due a delayed start is under way; a
caller is chosen once, and removed from those that wait as it is chosen.
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

    The type parameter is how a waiting caller is notified.
    """

    __slots__ = ("_is_delayed", "_waiting", "callbacks", "state")

    def __init__(self) -> None:
        self.state = CONNECTING
        #: how many calls under way complete by callback
        self.callbacks = 0
        self._waiting: dict[C, None] = {}  # callers that do not read, in order
        self._is_delayed = False  # a delayed start is under way, whatever the state

    def claim(self, state: int) -> bool:
        """Become the reader if there is none.

        Args:
            state: CALLER_READS or THREAD_READS.
        """
        if self.state != IDLE:
            return False
        self.state = state
        return True

    def add_caller(self, caller: C) -> None:
        """Add a caller that waits, because ``claim`` failed."""
        self._waiting[caller] = None

    def remove_caller(self, caller: C) -> None:
        """Remove a caller that waits no longer; nothing happens if it was chosen."""
        self._waiting.pop(caller, None)

    def add_callback(self, urgent: bool) -> Start:
        """Count a call that completes by callback.

        Args:
            urgent: its reply must be read at once.
        """
        self.callbacks += 1
        if self.state != IDLE:
            return NOTHING
        if urgent:
            self.state = THREAD_READS
            return START_THREAD
        if self._is_delayed:
            return NOTHING
        self._is_delayed = True
        return START_DELAYED

    def remove_callback(self) -> None:
        """Count a completed callback."""
        self.callbacks -= 1

    def end_delay(self) -> bool:
        """End a delayed start; return True if its thread is now the reader."""
        self._is_delayed = False
        return self.callbacks > 0 and self.claim(THREAD_READS)

    def release(self) -> C | Literal[Start.NOTHING, Start.THREAD]:
        """End the turn of the reader, or the connecting.

        Returns:
            The caller that reads next, or what to start. If the caller no longer waits, call
            ``release`` for it.
        """
        if self.state == BROKEN:
            return NOTHING
        if self._waiting:
            caller = next(iter(self._waiting))
            del self._waiting[caller]
            self.state = CALLER_READS
            return caller
        if self.callbacks:
            self.state = THREAD_READS
            return START_THREAD
        self.state = IDLE
        return NOTHING

    def break_off(self) -> bool:
        """End the schedule; return False if it had ended before."""
        is_first = self.state != BROKEN
        self.state = BROKEN
        return is_first
