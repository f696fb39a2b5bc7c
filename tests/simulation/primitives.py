"""What stands in for ``threading``, ``time`` and ``queue`` in simulated modules.

Each class does what the one of the same name does, as far as rayrpc uses it, and asks the scheduler
at each step. What ``threading`` has in Python is that code itself. Steps are taken before a lock
is acquired and after it is released, so that other threads come between any two critical sections.
"""

from __future__ import annotations

import queue
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from simulation import scheduler
from simulation.scheduler import END_SECONDS, STANDARD_FILE, SimulatedThread, current

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
    "wait_for_threads",
]


class Lock:
    """A lock; any thread may release it.

    Args:
        may_collect (bool): garbage may be collected as soon as it is held.
    """

    #: one thread alone acquires it: that is no step, but if it waits
    _is_private = False

    def __init__(self, may_collect: bool = True) -> None:
        self._is_held = False
        self._may_collect = may_collect
        #: that acquired it by ``with``; other locks are held to be waited for
        self._holder: SimulatedThread | None = None
        self._name = _place()

    def acquire(
        self, blocking: bool = True, timeout: float = -1, may_be_interrupted: bool = True
    ) -> bool:
        scheduler = current()
        if not self._is_private:
            scheduler.step(f"acquires {self._name}")
        if self._is_held:
            if not blocking:
                return False
            seconds = None if timeout < 0 else timeout
            if may_be_interrupted:
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

    _is_owned = locked  # as Condition finds it out, without acquiring it

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

    def _release_save(self) -> int:
        count, self._count = self._count, 0
        self._owner = None
        self._lock.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self._lock.acquire(may_be_interrupted=False)
        self._owner, self._count = current().current, count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class _PrivateLock(Lock):
    """A lock that a thread makes to wait for."""

    _is_private = True

    def __init__(self) -> None:
        super().__init__(may_collect=False)


def monotonic() -> float:
    """Return the virtual time; after a run, which may delete what is left, it stands still."""
    return 0.0 if scheduler._current is None else current().now


def sleep(seconds: float) -> None:
    """Wait for a virtual time."""
    current().interrupt_by_chance()
    current().step("sleeps", _never, seconds)


def wait_for_threads(seconds: float) -> None:
    """Wait until all other threads have ended, those too that start meanwhile.

    Args:
        seconds: they must have ended then.
    """
    me = current().current

    def others() -> list[SimulatedThread]:
        return [each for each in current().threads if each is not me and not each.is_done]

    current().step("waits for all threads", lambda: not others(), seconds)
    assert not others(), f"threads have not ended: {others()}"


def _never() -> bool:
    return False


def _over_simulated_locks(cls: type) -> Any:
    """Return a class of ``threading`` that is Python code, such that its code uses simulated locks.

    So a signal interrupts it where it interrupts the class itself.
    """
    members = dict(vars(cls))
    for name, value in members.items():
        if isinstance(value, types.FunctionType):
            code = value.__code__.replace(co_filename=STANDARD_FILE)
            new = types.FunctionType(code, _STANDARD, name, value.__defaults__)
            new.__kwdefaults__ = value.__kwdefaults__
            members[name] = new
    for name in ("__dict__", "__weakref__"):
        members.pop(name, None)
    result = type(cls.__name__, (), members)
    _STANDARD[cls.__name__] = result
    return result


#: the names that this code uses
_STANDARD: dict[str, Any] = {
    **vars(threading),
    "Lock": Lock,
    "RLock": RLock,
    "_allocate_lock": _PrivateLock,
    "_time": monotonic,
}

Condition = _over_simulated_locks(threading.Condition)
Event = _over_simulated_locks(threading.Event)
Semaphore = _over_simulated_locks(threading.Semaphore)


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
        self._started = Event()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("threads can only be started once")
        scheduler = current()
        scheduler.step(f"starts {self.name}")
        scheduler.raise_by_chance(scheduler.chance_of_failed_starts, RuntimeError, MemoryError)
        self._thread = scheduler.spawn(self._bootstrap, self.name)
        self._started.wait()

    def _bootstrap(self) -> None:
        self._started.set()
        self.run()

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


def _place() -> str:
    """Return where the object is made, in a module that is simulated."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename in (__file__, STANDARD_FILE) and frame.f_back is not None:
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
