"""What stands in for ``threading``, ``time`` and ``queue`` in simulated modules.

Each class does what the one of the same name does, as far as rayrpc uses it, and asks the scheduler
at each step. Steps are taken before a lock is acquired and after it is released, so that other
threads come between any two critical sections.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from simulation import scheduler
from simulation.scheduler import END_SECONDS, SimulatedThread, current

__all__ = [
    "Condition",
    "Event",
    "Lock",
    "RLock",
    "Semaphore",
    "SimpleQueue",
    "Thread",
    "Timer",
    "monotonic",
    "sleep",
]


class Lock:
    """A lock; any thread may release it.

    Args:
        may_collect (bool): garbage may be collected as soon as it is held.
    """

    def __init__(self, may_collect: bool = True) -> None:
        self._is_held = False
        self._may_collect = may_collect
        #: that acquired it by ``with``; other locks are held to be waited for
        self._holder: SimulatedThread | None = None
        self._name = _place()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = current()
        scheduler.step(f"acquires {self._name}")
        if self._is_held:
            if not blocking:
                return False
            seconds = None if timeout < 0 else timeout
            scheduler.interrupt_by_chance()
            if not scheduler.step(f"waits for {self._name}", self._is_free, seconds):
                return False
        self._is_held = True
        if self._may_collect:
            scheduler.collect_by_chance()
        return True

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False
        if self._holder is not None:
            self._holder.locks -= 1
            self._holder = None
        current().step(f"released {self._name}")

    def locked(self) -> bool:
        return self._is_held

    def _is_free(self) -> bool:
        return not self._is_held

    def __enter__(self) -> bool:
        self.acquire()
        self._holder = current().current
        self._holder.locks += 1
        return True

    def __exit__(self, *exc: object) -> None:
        self.release()


class RLock:
    """A lock that its owner may acquire again."""

    def __init__(self) -> None:
        self._lock = Lock(may_collect=False)
        self._owner: SimulatedThread | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = current().current
        if self._owner is not me:
            if not self._lock.acquire(blocking, timeout):
                return False
            self._owner = me
        self._count += 1
        current().collect_by_chance()
        return True

    def release(self) -> None:
        if self._owner is not current().current:
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def _is_owned(self) -> bool:
        return self._owner is current().current

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class Condition:
    """A condition; threads wait in order, and are notified in it."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = RLock() if lock is None else lock
        self.acquire = self._lock.acquire
        self.release = self._lock.release
        self._waiting: deque[_Notice] = deque()

    def __enter__(self) -> bool:
        return bool(self._lock.__enter__())

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        self._check_owned("wait on")
        notice = _Notice()
        self._waiting.append(notice)
        holder = self._lock._holder if isinstance(self._lock, Lock) else None
        count = self._release_whole()
        try:
            current().interrupt_by_chance()
            current().step("waits for a condition", notice.is_given, timeout)
        finally:
            if not notice.given:
                self._waiting.remove(notice)
            for _ in range(count):
                (self._lock.acquire if holder is None else self._lock.__enter__)()
        return notice.given

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else monotonic() + timeout
        while not (result := predicate()):
            left = None if end is None else end - monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        self._check_owned("notify")
        for _ in range(min(n, len(self._waiting))):
            self._waiting.popleft().given = True

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    def _check_owned(self, what: str) -> None:
        lock = self._lock
        if not (lock.locked() if isinstance(lock, Lock) else lock._is_owned()):
            raise RuntimeError(f"cannot {what} un-acquired lock")

    def _release_whole(self) -> int:
        count = 1 if isinstance(self._lock, Lock) else self._lock._count
        for _ in range(count):
            self._lock.release()
        return count


class _Notice:
    """Whether a waiting thread was notified."""

    def __init__(self) -> None:
        self.given = False

    def is_given(self) -> bool:
        return self.given


class Event:
    """An event."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        current().step("set an event")

    def clear(self) -> None:
        self._is_set = False
        current().step("cleared an event")

    def wait(self, timeout: float | None = None) -> bool:
        current().interrupt_by_chance()
        return current().step("waits for an event", self.is_set, timeout)


class Semaphore:
    """A semaphore."""

    def __init__(self, value: int = 1) -> None:
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        scheduler = current()
        scheduler.step("acquires a semaphore")
        if not self._value and not (
            blocking and scheduler.step("waits for a semaphore", lambda: self._value > 0, timeout)
        ):
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        current().step("released a semaphore")

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class Thread:
    """A thread; the scheduler ends it with the run."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "Thread"
        self.daemon = bool(daemon)
        self._target = target
        self._args = args
        self._kwargs = kwargs or {}
        self._thread: SimulatedThread | None = None

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("threads can only be started once")
        scheduler = current()
        scheduler.step(f"starts {self.name}")
        scheduler.raise_by_chance(scheduler.chance_of_failed_starts, RuntimeError, MemoryError)
        self._thread = scheduler.spawn(self.run, self.name)

    @property
    def ident(self) -> int | None:
        return None if self._thread is None else self._thread.real.ident

    def join(self, timeout: float | None = None) -> None:
        current().step(f"joins {self.name}", lambda: not self.is_alive(), timeout)
        if self._thread is not None and self._thread.is_done:
            self._thread.real.join(END_SECONDS)  # what its stack refers to is deleted by then

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.is_done


class Timer(Thread):
    """A thread that calls a function after a while."""

    def __init__(
        self,
        interval: float,
        function: Callable[..., object],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(target=function, name="Timer", args=args or (), kwargs=kwargs)
        self._interval = interval
        self._cancelled = Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        if not self._cancelled.wait(self._interval):
            super().run()


class SimpleQueue:
    """A queue; ``put`` takes no step, as it may be called while an object is deleted."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not current().step("takes of a queue", self._has_items, timeout if block else 0.0):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    def _has_items(self) -> bool:
        return bool(self._items)


def monotonic() -> float:
    """Return the virtual time; after a run, which may delete what is left, it stands still."""
    return 0.0 if scheduler._current is None else current().now


def sleep(seconds: float) -> None:
    """Wait for a virtual time."""
    current().interrupt_by_chance()
    current().step("sleeps", _never, seconds)


def _never() -> bool:
    return False


def _place() -> str:
    """Return where the object is made, in a module that is simulated."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"lock {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


#: what each module has instead
THREADING: dict[str, Any] = {
    each.__name__: each for each in (Condition, Event, Lock, RLock, Semaphore, Thread, Timer)
}
TIME: dict[str, Any] = {
    "monotonic": monotonic,
    "perf_counter": monotonic,
    "time": monotonic,
    "sleep": sleep,
}
QUEUE: dict[str, Any] = {"SimpleQueue": SimpleQueue}
assert set(THREADING) <= set(vars(threading))
