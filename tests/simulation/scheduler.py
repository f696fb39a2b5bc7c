"""Run threads one at a time, in an order that a strategy decides; time is virtual.

A simulated thread is a thread of the system that waits for its turn. At each step, a lock, a wait,
a poll, a message, it asks the scheduler who goes on. If no thread can run, the clock jumps to the
next deadline. So a run takes no longer than its instructions, depends on its seed alone, and ends
at once when no thread will ever run again.

    READY ── chosen ──> RUNNING ── step ──> READY
                           ├── step(ready, seconds) ──> WAITING ── ready(), or time ──> READY
                           └── its function ends ──> DONE
"""

from __future__ import annotations

import _thread
import contextlib
import dis
import functools
import logging
import os
import random
import sys
import threading
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

__all__ = [
    "Choice",
    "END_SECONDS",
    "ExpectedError",
    "Failure",
    "SIMULATED_FILES",
    "STANDARD_FILE",
    "Scheduler",
    "SimulatedThread",
    "Stopped",
    "Strategy",
    "current",
    "signal_points",
]

#: of the code that is simulated
SIMULATED_FILES: set[str] = set()
#: of the code of ``threading`` that is
STANDARD_FILE = "simulated/threading.py"

STEP_SECONDS = 1e-6  # of virtual time
MAX_STEPS = 60_000
TRACE_STEPS = 60  # shown with a failure
# of real time: a thread is blocked outside of the simulation
STUCK_SECONDS = 60.0
# of real time, for a thread to end after a run
END_SECONDS = 5.0
# a thread that goes on after so many ``Stopped`` is left behind
MAX_STOPPED = 100
STACK_FRAMES = 8


def _nothing() -> None:
    pass


def _never() -> None:
    return None


class Stopped(BaseException):
    """Ends the threads that are left when a run is over."""


class ExpectedError(Exception):
    """An error of the program that is simulated: to be logged, and not to do any harm."""


class Failure(NamedTuple):
    """What went wrong in a run.

    Args:
        summary (str): one line; equal for the same defect.
        details (str): stacks.
    """

    summary: str
    details: str


class Choice(NamedTuple):
    """A decision that differs from the default one; see ``Scheduler``.

    Args:
        step (int): when.
        thread (str): key of the thread that goes on; empty: the clock advances.
    """

    step: int
    thread: str


class Strategy(Protocol):
    """Decides which thread goes on."""

    def on_spawn(self, thread: SimulatedThread) -> None:
        """Note a new thread."""

    def choose(
        self, scheduler: Scheduler, threads: list[SimulatedThread]
    ) -> SimulatedThread | None:
        """Return the thread that goes on.

        Args:
            scheduler: asks; its ``current`` is the thread that ran last.
            threads: those that can run, at least one.

        Returns:
            None to advance the clock to ``scheduler.next_deadline()``, if there is one.
        """


class SimulatedThread:
    """A thread under a scheduler.

    Args:
        scheduler (Scheduler): runs it.
        target (Callable): its function.
        name (str): for messages.
        key (str): identifies it in all runs of a program, whatever their schedule.
    """

    def __init__(
        self, scheduler: Scheduler, target: Callable[[], object], name: str, key: str
    ) -> None:
        self.name = name
        self.key = key
        #: Ctrl-C may strike it while it waits: it is what a main thread is in a program
        self.may_be_interrupted = False
        #: ... and after so many more of the points at which Python looks for it; 0: not
        self.interrupt_after = 0
        #: the handler of that signal; None: KeyboardInterrupt is raised
        self.handler: Callable[[], None] | None = None
        #: random choices that do not depend on what other threads do
        self.random = random.Random(f"{scheduler.seed} {key}")
        self.children = 0
        #: how many locks it holds
        self.locks = 0
        #: what it waits for; None: nothing
        self.ready: Callable[[], bool] | None = None
        self.deadline: float | None = None
        #: when ``ready`` may change by itself
        self.changes_at: Callable[[], float | None] = _never
        self.is_done = False
        #: what it does in its present step
        self.what = "start"
        self._scheduler = scheduler
        self._target = target
        self._turn = _thread.allocate_lock()
        self._turn.acquire()
        self._stops = 0
        self.real = threading.Thread(target=self._run, name=name, daemon=True)

    def __repr__(self) -> str:
        return f"{self.name} [{self.key}]"

    def can_run(self, now: float) -> bool:
        """Tell whether it does not wait, or no longer."""
        if self.ready is None or (self.deadline is not None and now >= self.deadline):
            return True
        return self.ready()

    def resume(self) -> None:
        """Have it run."""
        self._turn.release()

    def pause(self) -> None:
        """Wait, in this thread, for ``resume``."""
        self._turn.acquire()

    def stop(self) -> None:
        """Raise ``Stopped``; wait for ever if that did not end this thread many times."""
        self._stops += 1
        if self._stops > MAX_STOPPED:
            self._turn.acquire()
        raise Stopped

    def _run(self) -> None:
        self.pause()
        scheduler = self._scheduler
        try:
            if not scheduler.is_over:
                scheduler.trace_lines()
                self._target()
        except Stopped:
            pass
        except BaseException as exc:
            scheduler.fail(_summary(exc), f"{self} ended:\n{traceback.format_exc()}")
        finally:
            sys.settrace(None)
            self._target = _nothing
            scheduler.leave(self)


class Scheduler:
    """Run one program of several threads.

    The default choice is the thread that ran last, if it can go on, else the first one that can.

    Args:
        strategy (Strategy): decides who goes on.
        seed (int): of the random choices of threads.
        max_steps (int): a run that has not ended by then has a livelock.
        lines (bool): threads may be switched at every line of the code that is simulated, not only
            at steps.
        line_chance (float): of a step at such a line.
    """

    def __init__(
        self,
        strategy: Strategy,
        seed: int = 0,
        max_steps: int = MAX_STEPS,
        lines: bool = False,
        line_chance: float = 0.05,
    ) -> None:
        self.seed = seed
        self.now = 0.0
        self.steps = 0
        self.threads: list[SimulatedThread] = []
        self.failures: list[Failure] = []
        #: checked at every step, each returns what is wrong
        self.invariants: list[Callable[[], str | None]] = []
        #: the decisions that were not the default ones
        self.choices: list[Choice] = []
        #: a checksum of all steps: equal for equal runs
        self.digest = 0
        self.is_over = False
        #: of a KeyboardInterrupt at each wait of a thread that may be interrupted
        self.chance_of_interrupts = 0.0
        #: of each start of a thread to fail
        self.chance_of_failed_starts = 0.0
        #: of the garbage collector to run ``finalizer`` in a thread that has just acquired a lock,
        #: or is about to wait
        self.chance_of_finalizers = 0.0
        self.finalizer: Callable[[], None] = _nothing
        #: sockets that listen, by address
        self.listeners: dict[Any, Any] = {}
        #: those that are open, by number
        self.sockets: dict[int, Any] = {}
        #: called with both ends of each connection to a listener
        self.on_connected: Callable[[Any, Any], None] = lambda near, far: None
        self._strategy = strategy
        self._max_steps = max_steps
        self._lines = lines
        self._line_chance = line_chance
        self._current: SimulatedThread | None = None
        self._trace: deque[tuple[int, float, SimulatedThread, str]] = deque(maxlen=TRACE_STEPS)
        self._living: list[SimulatedThread] = []
        self._finished = threading.Event()
        self._is_deciding = False
        self._is_collecting = False

    @property
    def current(self) -> SimulatedThread:
        """The thread that runs."""
        assert self._current is not None
        return self._current

    def run(self, main: Callable[[], object]) -> list[Failure]:
        """Run a program until its main function returns, or the first failure; return failures."""
        global _current
        assert _current is None, "another simulation runs"
        _current = self

        def run_main() -> None:
            main()
            self._end()

        log = _Log(self)
        logger = logging.getLogger("rayrpc")
        propagates, logger.propagate = logger.propagate, False
        logger.addHandler(log)
        try:
            with _on_one_processor():
                self._current = self.spawn(run_main, "main")
            self._current.resume()
            if not self._wait():
                self.fail("a thread blocks outside of the simulation", self._stacks())
            self._end()
            for thread in self.threads:  # one at a time
                thread.resume()
                thread.real.join(END_SECONDS)
        finally:
            _current = None
            logger.removeHandler(log)
            logger.propagate = propagates
        return self.failures

    def _wait(self) -> bool:
        """Wait for the end of the run; return False if no step is made for long."""
        before = -1
        while self.steps != before:
            before = self.steps
            if self._finished.wait(STUCK_SECONDS):
                return True
        return False

    def spawn(self, target: Callable[[], object], name: str) -> SimulatedThread:
        """Start a thread; it runs when it is chosen."""
        parent = self._current
        key = "0"
        if parent is not None:
            parent.children += 1
            key = f"{parent.key}.{parent.children}"
        thread = SimulatedThread(self, target, name, key)
        self.threads.append(thread)
        self._living.append(thread)
        self._strategy.on_spawn(thread)
        thread.real.start()
        return thread

    def step(
        self,
        what: str,
        ready: Callable[[], bool] | None = None,
        seconds: float | None = None,
        changes_at: Callable[[], float | None] = _never,
    ) -> bool:
        """Let the strategy decide which thread goes on.

        Args:
            what: the thread that runs does next, for the trace.
            ready: it goes on when this returns True; None: at any time.
            seconds: ... or after this time; None: without limit.
            changes_at: returns the next time at which ``ready`` may change by itself.

        Returns:
            False if ``ready`` returns False: the time has passed.
        """
        me = self.current
        if self.is_over:
            me.stop()
        if self._is_deciding:  # an invariant, or a condition, that takes a lock
            return ready is None or ready()
        self._note(me, what)
        if self.steps > self._max_steps:
            self._stop(f"no end after {self._max_steps} steps")
            me.stop()
        me.ready = ready
        me.deadline = None if seconds is None else self.now + max(0.0, seconds)
        me.changes_at = changes_at
        following = self._choose()
        if following is None:
            me.stop()
        elif following is not me:
            self._current = following
            following.resume()
            me.pause()
            if self.is_over:
                me.stop()
        me.ready = me.deadline = None
        me.changes_at = _never
        return ready is None or ready()

    def interrupt_by_chance(self) -> None:
        """Raise KeyboardInterrupt, sometimes, in a thread that may be interrupted."""
        self.collect_by_chance()
        if self.current.may_be_interrupted:
            self.raise_by_chance(self.chance_of_interrupts, KeyboardInterrupt)

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Have no interrupt strike this thread in this context: its code is the scenario's."""
        me = self.current
        before = me.may_be_interrupted, me.interrupt_after
        me.may_be_interrupted, me.interrupt_after = False, 0
        try:
            yield
        finally:
            me.may_be_interrupted, me.interrupt_after = before

    def raise_by_chance(self, chance: float, *errors: type[BaseException]) -> None:
        """Raise one of these errors, sometimes."""
        me = self.current
        if chance and not self.is_over and me.random.random() < chance:
            error = me.random.choice(errors)
            self._note(me, f"raises {error.__name__}")
            raise error("injected")

    def collect_by_chance(self) -> None:
        """Run the finalizer in this thread, sometimes; at any time one thread collects."""
        me = self.current
        chance = self.chance_of_finalizers
        if not chance or self.is_over or self._is_deciding or self._is_collecting:
            return
        if me.random.random() < chance:
            self._is_collecting = True
            self._note(me, "collects garbage")
            with contextlib.suppress(KeyboardInterrupt):  # Python prints it
                self.finalizer()
            self._is_collecting = False

    def interrupt_after(self, points: int, handler: Callable[[], None] | None = None) -> None:
        """Have a signal interrupt this thread, in the code that is simulated.

        Args:
            points: after so many of the points at which Python runs the handlers of signals: the
                begin of a function, the return of a call, a jump back.
            handler: of the signal; None: KeyboardInterrupt is raised.
        """
        self.current.interrupt_after = points
        self.current.handler = handler
        self.trace_lines()

    def fail(self, summary: str, details: str) -> None:
        """Note a failure, which ends the run; only the first one counts."""
        if not self.is_over:
            self.failures.append(Failure(summary, f"{details}\n{self._shown_trace()}"))
            self._end()

    def leave(self, thread: SimulatedThread) -> None:
        """End a thread, and have another one go on."""
        thread.is_done = True
        self._living.remove(thread)
        if not self.is_over:
            following = self._choose()
            if following is not None:
                self._current = following
                following.resume()

    def trace_lines(self) -> None:
        """Trace this thread from now on, if the run needs that."""
        if self._lines or self.current.interrupt_after:
            sys.settrace(self._trace_call)

    # -- deciding -----------------------------------------------------------------------------

    def _choose(self) -> SimulatedThread | None:
        """Return the thread that goes on; None if the run is over."""
        self._is_deciding = True
        try:
            for invariant in self.invariants:
                if wrong := invariant():
                    self._stop(wrong)
                    return None
            while True:
                ready = [thread for thread in self._living if thread.can_run(self.now)]
                if not ready:
                    due = self.next_deadline()
                    if due is None:
                        self._stop("deadlock: all threads wait, and none for a time")
                        return None
                    self.now = due
                    continue
                default = self._current if self._current in ready else ready[0]
                chosen = self._strategy.choose(self, ready)
                if chosen is not default:
                    self.choices.append(Choice(self.steps, "" if chosen is None else chosen.key))
                if chosen is not None:
                    return chosen
                due = self.next_deadline()
                assert due is not None, "there is no time to advance to"
                self.now = due
                self.steps += 1  # each step has one choice
        finally:
            self._is_deciding = False

    def next_deadline(self) -> float | None:
        """Return the next time at which a thread may become ready; None if there is none."""
        times = [
            at
            for thread in self._living
            for at in (thread.deadline, thread.changes_at())
            if at is not None and at > self.now
        ]
        return min(times, default=None)

    def _trace_call(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if (file not in SIMULATED_FILES and file != STANDARD_FILE) or self.is_over:
            return None
        if not self._is_deciding and self.current.interrupt_after and not _is_finalizing(frame):
            frame.f_trace_opcodes = True
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self.is_over and not self._is_deciding:
            me = self.current
            if event == "opcode" and me.interrupt_after:
                self._count_point(me, frame)
            elif event == "line" and self._lines and me.random.random() < self._line_chance:
                self.step(f"line {frame.f_lineno} of {frame.f_code.co_name}")
        return self._trace_line

    def _count_point(self, me: SimulatedThread, frame: FrameType) -> None:
        if frame.f_lasti in signal_points(frame.f_code):
            me.interrupt_after -= 1
            if me.interrupt_after:
                return
            where = f"{frame.f_code.co_name}:{frame.f_lineno}"
            if me.handler is None:
                self._note(me, f"raises KeyboardInterrupt, {where}")
                raise KeyboardInterrupt("injected")  # which ends the tracing, too
            self._note(me, f"runs a handler of signals, {where}")
            me.handler()

    # -- the end ------------------------------------------------------------------------------

    def _stop(self, why: str) -> None:
        self.fail(why, self._stacks())

    def _end(self) -> None:
        self.is_over = True
        self._finished.set()

    def _note(self, thread: SimulatedThread, what: str) -> None:
        self.steps += 1
        self.now += STEP_SECONDS
        thread.what = what
        self.digest = zlib.crc32(f"{thread.key} {what}".encode(), self.digest)
        self._trace.append((self.steps, self.now, thread, what))

    def _shown_trace(self) -> str:
        lines = [
            f"{step:7d} {now:11.6f}  {thread}: {what}" for step, now, thread, what in self._trace
        ]
        return "\n".join(["The last steps (number, seconds, thread):", *lines])

    def _stacks(self) -> str:
        frames = sys._current_frames()
        stacks = []
        for thread in self.threads:
            frame = frames.get(thread.real.ident or 0)
            if thread.is_done or frame is None:
                continue
            waits = "" if thread.ready is None else ", waits"
            until = "" if thread.deadline is None else f" until {thread.deadline:.6f}"
            own = [
                entry
                for entry in traceback.extract_stack(frame)
                if not entry.filename.endswith(_OWN_FILES)
            ]
            shown = "".join(traceback.format_list(own[-STACK_FRAMES:]))
            stacks.append(f"{thread}: {thread.what}{waits}{until}\n{shown}")
        return "\n".join(stacks)


class _Log(logging.Handler):
    """Take logged exceptions and errors as failures."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, (Stopped, ExpectedError)) or (
            error is None and record.levelno < logging.ERROR
        ):
            return
        if error is None:
            self._scheduler.fail(record.getMessage(), "it was logged")
        else:
            text = "".join(traceback.format_exception(error))
            self._scheduler.fail(_summary(error), f"{record.getMessage()}\n{text}")


def _is_finalizing(frame: FrameType | None) -> bool:
    """Tell whether a frame is of a finalizer, whose exceptions Python prints and ignores."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@functools.cache
def signal_points(code: CodeType) -> frozenset[int]:
    """Return the instructions before which Python runs the handlers of signals."""
    points = {0}
    before = ""
    for each in dis.get_instructions(code):
        if before.startswith("CALL") or before == "RESUME":
            points.add(each.offset)
        if "JUMP_BACKWARD" in each.opname or each.opname == "JUMP_ABSOLUTE":
            points.add(each.argval)
        before = each.opname
    return frozenset(points)


def current() -> Scheduler:
    """Return the scheduler of the simulation that runs."""
    assert _current is not None, "no simulation runs"
    return _current


@contextlib.contextmanager
def _on_one_processor() -> Iterator[None]:
    """Have threads that are started run on one processor, on which they take turns much faster."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)  # of this thread; what it starts inherits it
    os.sched_setaffinity(0, [sorted(before)[os.getpid() % len(before)]])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _summary(error: BaseException) -> str:
    """Return an error's type, its first line, and the line of the program that raised it."""
    where = ""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if not entry.filename.endswith(_OWN_FILES):
            where = f" ({'/'.join(entry.filename.split('/')[-2:])}:{entry.lineno})"
            break
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}{where}"


_current: Scheduler | None = None
_OWN_FILES = (
    "simulation/scheduler.py",
    "simulation/primitives.py",
    "simulation/network.py",
    "/threading.py",
)
