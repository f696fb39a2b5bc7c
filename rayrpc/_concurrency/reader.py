"""Turns at reading a connection: who reads may also run what was read, but is never missed.

Nothing is faster than the thread that read a message running what it asks for.  But it must not
keep the next messages waiting: before it blocks (``step_aside``), or when a watch sees that it is
busy for long, its turn ends, and another thread reads on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from types import MethodType
from typing import Any, TypeVar

__all__ = [
    "Habits",
    "SHORT_SECONDS",
    "Turn",
    "Watch",
    "afterwards",
    "called_by_name",
    "has_turn",
    "step_aside",
    "when_blocking",
]

F = TypeVar("F", bound=Callable[..., Any])

# A thread that is busy with one message for one to two ticks is relieved.
TICK_SECONDS = 0.002
# After so many ticks without a message the watch sleeps until there is one.
QUIET_TICKS = 25
CHORE_SECONDS = 5.0

# What takes no longer than this may run where the next message would wait for it, once it has
# done so often: a quick run counts 1, a slow one takes away many, and a hiccup can be made up for.
QUICK_SECONDS = 0.0005
# What takes no longer than this may do so where no message comes meanwhile, as far as is known.
SHORT_SECONDS = 0.002
TRUSTED = 3
MOST, LEAST = 64, -8
SLOW_COUNTS = 32
# Functions that are made anew for every call are forgotten all at once.
MOST_HABITS = 4096


_called_by_name: set[int] = set()


def called_by_name(func: F) -> F:
    """Know what a function does by its second argument, the name of what it calls."""
    _called_by_name.add(id(func))
    return func


class _Here(threading.local):
    turn: Turn | _NoTurn | None = None


_here = _Here()


def step_aside(briefly: bool = False) -> None:
    """Let another thread read on, if this one reads a connection; call it before blocking.

    Args:
        briefly: what follows is short: stay if no message is likely to come meanwhile.
    """
    turn = _here.turn
    if turn is None:
        return
    if briefly and turn.alone:
        turn.stayed = True
    else:
        turn.end()


def afterwards(task: Callable[[], None]) -> None:
    """Run a task, which must not raise, after the answer to the message that is dealt with here.

    Or at once: if this thread deals with none, or is taking long.
    """
    turn = _here.turn
    if isinstance(turn, Turn) and not turn.over:
        turn.tasks.append(task)
    else:
        task()


@contextlib.contextmanager
def when_blocking(notice: Callable[[], None]) -> Iterator[None]:
    """Have ``notice`` called once, before this thread, which reads nothing, blocks in a call."""
    outer = _here.turn
    _here.turn = _NoTurn(notice)
    try:
        yield
    finally:
        _here.turn = outer


class _NoTurn:
    """What a thread that reads no connection has in place of a turn."""

    alone = False
    stayed = False
    over = True

    def __init__(self, notice: Callable[[], None]) -> None:
        self._notice: Callable[[], None] | None = notice

    def end(self) -> None:
        """Give notice, once."""
        notice, self._notice = self._notice, None
        if notice is not None:
            notice()


def has_turn() -> bool:
    """Tell whether this thread may be kept for long, because another would read on."""
    turn = _here.turn
    return turn is not None and not turn.over


class Turn:
    """One thread's turn at reading a connection.

    Use it as a context in that thread.  In it, call ``begin`` when a message was read, and
    ``ready`` when it was dealt with.

    Args:
        relieve (Callable): has another thread read on; called once, from any thread, if the turn
            ends early.
        watch (Watch): ends it when that is due.
    """

    __slots__ = (
        "_lock",
        "_relieve",
        "_watch",
        "alone",
        "busy",
        "over",
        "serial",
        "stayed",
        "tasks",
    )

    def __init__(self, relieve: Callable[[], None], watch: Watch) -> None:
        self._relieve = relieve
        self._watch = watch
        self._lock = threading.Lock()
        #: number of the message that was read last
        self.serial = 0
        #: the thread is busy with it
        self.busy = False
        self.over = False
        #: messages come one at a time, as far as is known; to be set by who knows
        self.alone = False
        #: for that reason the thread did not step aside
        self.stayed = False
        #: to be run when the message was dealt with
        self.tasks: list[Callable[[], None]] = []

    def __enter__(self) -> Turn:
        _here.turn = self
        self._watch.add(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _here.turn = None
        self._watch.discard(self)

    def begin(self) -> None:
        """Note that a message was read."""
        self.serial += 1
        self.busy = True
        self.stayed = False
        if self._watch.sleeps:
            self._watch.wake()

    def ready(self) -> bool:
        """Note that it was dealt with; return True if this thread is to read the next."""
        while self.tasks:
            self.tasks.pop()()
        with self._lock:
            self.busy = False
            return not self.over

    def end(self, serial: int | None = None) -> None:
        """End the turn early; with ``serial``, only if the thread is still busy with that."""
        with self._lock:
            if self.over or not self.busy or serial not in (None, self.serial):
                return
            self.over = True
        self._relieve()


class Watch:
    """End turns of threads that are busy with one message for long.

    Args:
        chore (Callable): called every ``CHORE_SECONDS``, once there was a message; must be short.
    """

    def __init__(self, chore: Callable[[], None] = lambda: None) -> None:
        self._chore = chore
        self._turns: dict[Turn, int] = {}  # the serial that was seen last
        self._awake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.sleeps = True

    def add(self, turn: Turn) -> None:
        """Watch a turn."""
        with self._lock:
            self._turns[turn] = -1

    def discard(self, turn: Turn) -> None:
        """Watch a turn no longer."""
        with self._lock:
            self._turns.pop(turn, None)

    def wake(self) -> None:
        """Look again, every tick."""
        with self._lock:
            self.sleeps = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rayrpc-watch", daemon=True)
                self._thread.start()
        self._awake.set()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._awake.set()

    def _run(self) -> None:
        quiet = 0
        due = time.monotonic() + CHORE_SECONDS
        while not self._closed:
            if time.monotonic() > due:
                due = time.monotonic() + CHORE_SECONDS
                self._chore()
            time.sleep(TICK_SECONDS)
            if self._look():
                quiet = 0
                continue
            quiet += 1
            if quiet < QUIET_TICKS:
                continue
            self._awake.clear()
            self.sleeps = True
            if not self._look():  # a turn that began meanwhile may have seen us awake
                self._awake.wait(CHORE_SECONDS)
            self.sleeps = False
            quiet = 0

    def _look(self) -> bool:
        """End the turns that are due; tell whether anything was going on."""
        active = False
        with self._lock:
            turns = list(self._turns.items())
        for turn, seen in turns:
            serial = turn.serial
            if serial == seen:
                if turn.busy:
                    turn.end(serial)
                    active = True
                continue
            active = True
            with self._lock:
                if turn in self._turns:
                    self._turns[turn] = serial
        return active


class Habits:
    """Remember which functions never took long.

    A function is known by its ``id``, so that none is kept alive; if one takes the place of
    another, it only runs in another thread than it might.

    Args:
        seconds (float): what is not long.
    """

    def __init__(self, seconds: float = QUICK_SECONDS) -> None:
        self._seconds = seconds
        self._scores: dict[Hashable, int] = {}

    @staticmethod
    def key(func: Any, args: Any) -> Hashable:
        """Return what a function is known by."""
        key = id(func.__func__ if type(func) is MethodType else func)
        return (key, args[1]) if key in _called_by_name else key

    def is_quick(self, key: Hashable) -> bool:
        """Tell whether a function is not expected to take long."""
        return self._scores.get(key, 0) >= TRUSTED

    def note(self, key: Hashable, seconds: float, alone: bool) -> None:
        """Note how long a function ran, and whether no other did meanwhile."""
        score = self._scores.get(key, 0)
        if seconds <= self._seconds:
            if score == MOST:
                return
            score += 1
        elif alone:
            score = max(score - SLOW_COUNTS, LEAST)
        else:  # it may only have waited for the others
            return
        if len(self._scores) >= MOST_HABITS:
            self._scores.clear()
        self._scores[key] = score
