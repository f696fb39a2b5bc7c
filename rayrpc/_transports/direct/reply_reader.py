"""Read a connection's replies, in the threads that wait for them or in a thread of the cache.

``reader_schedule`` decides which thread reads; this module reads, and notifies the next reader.
"""

from __future__ import annotations

import abc
import functools
import logging
import threading
import time

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.promise import Promise
from rayrpc._concurrency.reader import RELEASED, ReaderRole, ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._transports.direct.connection_call import READ, ConnectionCall
from rayrpc._transports.direct.reader_schedule import (
    BROKEN,
    CALLER_READS,
    NOTHING,
    START_DELAYED,
    START_THREAD,
    THREAD_READS,
    ReaderSchedule,
    Start,
)
from rayrpc._transports.direct.stream import Stream
from rayrpc._transports.direct.wire import TICK_SECONDS, Message

__all__ = ["ReplyReader"]

logger = logging.getLogger(__name__)

# Replies whose callbacks are not urgent are read after this time, or along with others.
DELAY_SECONDS = 0.005


class ReplyReader(abc.ABC):
    """Read the replies of a connection.

    Args:
        threads (ThreadCache): reads replies to calls that complete by callback.
        watchdog (ReaderWatchdog): releases readers that stay in one callback.
    """

    def __init__(self, threads: ThreadCache, watchdog: ReaderWatchdog) -> None:
        self._threads = threads
        self._watchdog = watchdog
        self._lock = threading.Lock()
        #: guarded by the lock, which calls share
        self.schedule: ReaderSchedule[Promise[object]] = ReaderSchedule()
        self._stream: Stream | None = None

    @abc.abstractmethod
    def _complete(self, message: Message, is_handled: bool = False) -> None:
        """Complete the call whose reply a message is."""

    @abc.abstractmethod
    def _break_off(self, reason: str) -> None:
        """End the connection."""

    def wait_reply(self, call: ConnectionCall, deadline: Deadline) -> None:
        """Wait for the reply to a call; read the connection if no other thread does.

        Raises:
            TimeoutError: the reply did not arrive before the deadline.
        """
        try:
            while True:
                with self._lock:
                    if call.is_done:
                        return
                    call.waiter = None
                    reads = self.schedule.claim(CALLER_READS, call)
                    if not reads:
                        self.schedule.add_caller(call.new_waiter())
                if reads or self._wait_notified(call, deadline):
                    is_done = self._read_until(call, deadline)
                    self._release_reader(call.waiter or call)
                    if is_done:
                        return
        except BaseException as exc:  # a time-out, or anything else at any point: Ctrl-C
            try:
                self._stop_waiting(call, exc)
            except BaseException as interrupt:
                self._threads.submit(functools.partial(self._stop_waiting, call, interrupt))
                raise
            raise

    def _wait_notified(self, call: ConnectionCall, deadline: Deadline) -> bool:
        """Wait for a reply, or to be the reader; return True if this thread is to read."""
        reads = call.wait_notified(deadline)
        with self._lock:
            if call.waiter is not None:
                self.schedule.remove_caller(call.waiter)
        return reads

    def _stop_waiting(self, call: ConnectionCall, error: BaseException) -> None:
        """End the wait of this thread, and its reading, at whatever point an exception came."""
        waiter = call.waiter
        with self._lock:
            reads = self.schedule.reader is call
        if waiter is not None:
            call.end_wait()  # no effect if another thread has just ended it
            with self._lock:
                self.schedule.remove_caller(waiter)
                reads |= self.schedule.reader is waiter and waiter.value is READ
        if reads:
            self._on_read_error(error)
            self._release_reader(waiter or call)
        else:
            self.repair()

    def _read_until(self, call: ConnectionCall, deadline: Deadline) -> bool:
        """Read until a call is complete; return False if the connection breaks before."""
        stream = self._stream
        assert stream is not None
        while not call.is_done:
            left = deadline.remaining()
            if left is not None and left < TICK_SECONDS and not stream.wait(left):
                raise TimeoutError
            message = self._next(stream)
            if message is not None:
                self._complete(message)
            elif self.schedule.state == BROKEN:
                return False
        return True

    def _release_reader(self, by: object = None) -> None:
        """Release the reader, and notify the next one.

        Args:
            by: the reader; see ``ReaderSchedule.reader``.
        """
        while True:
            with self._lock:
                following = self.schedule.release(by)
            if following is NOTHING:
                return
            if following is START_THREAD:
                self.start_reader(START_THREAD)
                return
            assert isinstance(following, Promise)
            if following.set(READ) or following.value is READ:
                return
            by = following  # this caller waits no longer

    def repair(self) -> None:
        """Complete the steps of the schedule that an interrupt has prevented."""
        with self._lock:
            schedule = self.schedule
            waiter = schedule.reader
            starts = schedule.due_start(urgent=True) is START_THREAD or schedule.start
        if starts:
            self.start_reader(START_THREAD)
        if schedule.is_delayed:
            self.start_reader(START_DELAYED)
        if schedule.state == BROKEN:
            self._break_off("its connection was cut")  # the owner may not have been notified yet
        if isinstance(waiter, Promise):
            waiter.set_again(READ)
            if waiter.value is not READ:
                self._release_reader(waiter)  # this caller waits no longer

    def start_reader(self, start: Start) -> None:
        """Start a thread that reads, as the schedule says."""
        if start is START_DELAYED:
            self._threads.submit(self._read_delayed)
        else:
            self._threads.submit(functools.partial(self._begin_to_read, self.schedule.start))

    def _begin_to_read(self, start: int) -> None:
        with self._lock:
            begins = self.schedule.begin(start)
        if begins:
            self._read_for_callbacks()

    def _read_for_callbacks(self) -> None:
        """Read and complete calls while callbacks are due, or until this thread is released."""
        stream = self._stream
        assert stream is not None
        schedule = self.schedule
        with ReaderRole(self._release_reader, self._watchdog) as role:
            try:
                while schedule.callbacks:
                    message = self._next(stream)
                    if message is not None:
                        stream.handled()  # while no other thread reads
                        role.message_received()
                        self._complete(message, is_handled=True)
                        if not role.message_done():
                            return
                    elif schedule.state == BROKEN:
                        break
            except BaseException as exc:
                logger.exception("error in a thread that reads a connection")
                if role.state != RELEASED:
                    self._on_read_error(exc)
        if role.state != RELEASED:
            self._release_reader()

    def _on_read_error(self, error: BaseException) -> None:
        """End the connection, except after a time-out or an interrupt that lost no data."""
        stream = self._stream
        assert stream is not None
        is_expected = isinstance(error, TimeoutError) or not isinstance(error, Exception)
        if not (is_expected and stream.is_intact):
            self._break_off(f"it could not be read: {error!r}")

    def _read_delayed(self) -> None:
        time.sleep(DELAY_SECONDS)
        with self._lock:
            reads = self.schedule.end_delay()
        if reads:
            self._read_for_callbacks()

    def _next(self, stream: Stream) -> Message | None:
        """Return the next message; None after a tick without one, or if the connection broke."""
        try:
            return stream.read()
        except TimeoutError:
            return None
        except EOFError as exc:
            self._break_off(f"its connection was cut ({exc})")
            return None

    def _read_if_idle(self, stream: Stream) -> bool:
        """Read what has arrived in this thread; return False if there is another reader."""
        with self._lock:
            if not self.schedule.claim(THREAD_READS):
                return False
        try:
            while stream.wait(0) and (message := self._next(stream)) is not None:
                self._complete(message)
        except BaseException as exc:
            self._on_read_error(exc)
            raise
        finally:
            self._release_reader()
        return True
