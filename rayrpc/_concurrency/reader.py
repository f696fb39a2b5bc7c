"""Hand-over of a connection's reader.

The thread that reads a connection also runs the handler of each message, which saves two context
switches a message.  If the handler blocks, another thread takes over reading: the first thread
calls ``release_reader`` before it blocks, and a watchdog releases a thread that stays in one
handler for more than a tick.

    READING ── message_received ──> HANDLING ── message_done ──> READING
                                       │
                                       └── release ──> RELEASED    another thread reads

``message_done`` returns False in the state RELEASED: the thread leaves the connection.

Invariant: a thread uses what a reader uses, the receive buffer and its poll object, in the state
READING, or in ``look_ahead``, during which it cannot be released.  So two threads never do.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.threads import SingleThread

__all__ = [
    "HANDLING",
    "READING",
    "RELEASED",
    "ReaderRole",
    "ReaderWatchdog",
    "after_reply",
    "is_reader",
    "on_block",
    "release_reader",
]

logger = logging.getLogger(__name__)

# The watchdog releases a thread that has been in one handler for one to two ticks.
TICK_SECONDS = 0.002
# After so many ticks without a message the watchdog sleeps until the next message.
QUIET_TICKS = 25
MAINTENANCE_SECONDS = 5.0

READING, HANDLING, RELEASED = range(3)


class _Here(threading.local):
    role: ReaderRole | _BlockNotice | None = None


_here = _Here()


def release_reader(briefly: bool = False) -> None:
    """Let another thread read, if this one is a connection's reader; call it before blocking.

    Args:
        briefly: the thread will be back soon: keep the role if messages come one at a time.
    """
    role = _here.role
    if role is None:
        return
    if briefly and role.one_at_a_time:
        role.kept = True
    else:
        role.release()


def after_reply(task: Callable[[], None]) -> None:
    """Run a task after the reply to the message that this thread handles was sent.

    The task runs at once if the thread handles no message, or has been released.

    Args:
        task: must not raise.
    """
    role = _here.role
    if isinstance(role, ReaderRole) and role.state == HANDLING:
        role.tasks.append(task)
    else:
        task()


@contextlib.contextmanager
def on_block(callback: Callable[[], None]) -> Iterator[None]:
    """Call ``callback`` once, before this thread, which is no reader, blocks in a call."""
    outer = _here.role
    _here.role = _BlockNotice(callback)
    try:
        yield
    finally:
        _here.role = outer


class _BlockNotice:
    """Stands in for a role in a thread that reads no connection."""

    one_at_a_time = False
    kept = False
    state = RELEASED

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def release(self) -> None:
        """Call the callback, once."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


def is_reader() -> bool:
    """Tell whether this thread is a connection's reader: if it blocks, another takes over."""
    role = _here.role
    return role is not None and role.state != RELEASED


class ReaderRole:
    """The role of a connection's reader, held by one thread; see the states above.

    Use it as a context in that thread.

    Args:
        hand_over (Callable): has another thread read; called once, from any thread, when the role
            is released.
        watchdog (ReaderWatchdog): releases it when its thread stays in one handler.
    """

    __slots__ = (
        "_hand_over",
        "_lock",
        "_watchdog",
        "kept",
        "one_at_a_time",
        "serial",
        "state",
        "tasks",
    )

    def __init__(self, hand_over: Callable[[], None], watchdog: ReaderWatchdog) -> None:
        self._hand_over = hand_over
        self._watchdog = watchdog
        self._lock = threading.Lock()
        self.state = READING
        #: counts the messages; the watchdog sees by it whether the thread makes progress
        self.serial = 0
        #: no message is expected before the reply to this one; set by the connection
        self.one_at_a_time = False
        #: a brief ``release_reader`` kept the role because of ``one_at_a_time``
        self.kept = False
        #: run by ``message_done``
        self.tasks: list[Callable[[], None]] = []

    def __enter__(self) -> ReaderRole:
        _here.role = self
        self._watchdog.add(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _here.role = None
        self._watchdog.discard(self)

    def message_received(self) -> None:
        """Begin to handle a message."""
        self.serial += 1
        self.state = HANDLING
        self.kept = False
        if self._watchdog.is_asleep:
            self._watchdog.wake()

    def message_done(self) -> bool:
        """End the handling of a message; return True if this thread is still the reader."""
        while self.tasks:
            self.tasks.pop()()
        with self._lock:
            if self.state == RELEASED:
                return False
            self.state = READING
            return True

    def look_ahead(self, look: Callable[[], bool]) -> bool:
        """Return ``look()``, which uses the connection as a reader; False if this thread is none.

        Args:
            look: must not block.
        """
        with self._lock:
            result = self.state != RELEASED and look()
        return result

    def release(self, serial: int | None = None) -> None:
        """Hand over, if the thread handles a message.

        Args:
            serial: only if it still handles the message with this number.
        """
        with self._lock:
            if self.state != HANDLING or serial not in (None, self.serial):
                return
            self.state = RELEASED
        self._hand_over()


class ReaderWatchdog:
    """Release readers that stay in one handler.

    Args:
        maintenance (Callable): called every ``MAINTENANCE_SECONDS`` once there was a message; must
            be short.
        clock (Callable): returns the time in seconds; must not go back.
        sleep (Callable): takes the seconds.
    """

    def __init__(
        self,
        maintenance: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._maintenance = maintenance
        self._clock = clock
        self._sleep = sleep
        self._last_serial: dict[ReaderRole, int] = {}
        # wakes the thread; in C, as an interrupt must not come between
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = SingleThread(self._run, "rayrpc-watch", "a call may delay others")
        self._closed = False
        self.is_asleep = True

    def add(self, role: ReaderRole) -> None:
        """Watch a role."""
        with self._lock:
            self._last_serial[role] = -1

    def discard(self, role: ReaderRole) -> None:
        """Stop watching a role."""
        with self._lock:
            self._last_serial.pop(role, None)

    def start(self) -> None:
        """Start the thread now, so that it need not start in a call, which may be interrupted."""
        self._thread.start()

    def wake(self) -> None:
        """Check the roles every tick."""
        if not self._thread.is_running:  # if it cannot be started, the next message tries again
            self._thread.start()
        with self._lock:
            if self._thread.is_running:
                self._wake_ups.put(None)
                self.is_asleep = False

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake_ups.put(None)

    def _run(self) -> None:
        quiet = 0
        due = Deadline(MAINTENANCE_SECONDS, self._clock)
        while not self._closed:
            if due.expired:
                due = Deadline(MAINTENANCE_SECONDS, self._clock)
                try:
                    self._maintenance()
                except Exception:
                    logger.exception("error in the maintenance of connections")
            self._sleep(TICK_SECONDS)
            if self._check():
                quiet = 0
                continue
            quiet += 1
            if quiet < QUIET_TICKS:
                continue
            with self._lock:
                self.is_asleep = True
                while not self._wake_ups.empty():
                    self._wake_ups.get()
            # a reader may have seen us awake, and not have woken us
            if not self._check() and not self._closed:
                with contextlib.suppress(queue.Empty):
                    self._wake_ups.get(timeout=MAINTENANCE_SECONDS)
            with self._lock:
                self.is_asleep = False
            quiet = 0

    def _check(self) -> bool:
        """Release the roles that made no progress since the last tick.

        Returns:
            True if any thread handled a message.
        """
        active = False
        with self._lock:
            roles = list(self._last_serial.items())
        for role, seen in roles:
            serial = role.serial
            if serial == seen:
                if role.state == HANDLING:
                    active = True
                    try:
                        role.release(serial)
                    except Exception:
                        logger.exception("a reader could not be released")
                continue
            active = True
            with self._lock:
                if role in self._last_serial:
                    self._last_serial[role] = serial
        return active
