"""What goes wrong in a group of simulated workers."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from simulation.primitives import Thread, sleep
from simulation.scheduler import Scheduler, current
from simulation.workers import WORKERS, wait

from rayrpc._runtime import interrupting_calls
from rayrpc.errors import CallError

__all__ = ["ERRORS", "Faults", "Injector"]

# Of calls.
ERRORS = (CallError, RuntimeError, MemoryError)
# Of virtual time.
DEATH_SECONDS = 10.0
MOST_CALLS = 20  # of finalizers


@dataclasses.dataclass(frozen=True)
class Faults:
    """What goes wrong.

    Args:
        dies: a worker that dies, and when; None: none.
        interrupts: when Ctrl-C strikes the first user; see ``Scheduler.interrupt_after``.
        handlers: when handlers of signals interrupt that one, and call.
        finalizers: the chance of the garbage collector to run a finalizer that calls.
        failed_starts: the chance of each start of a thread to fail.
    """

    dies: tuple[int, float] | None = None
    interrupts: tuple[int, ...] = ()
    handlers: tuple[int, ...] = ()
    finalizers: float = 0.0
    failed_starts: float = 0.0

    @property
    def may_lose(self) -> bool:
        """Tell whether calls may fail."""
        return self.dies is not None or bool(self.interrupts or self.failed_starts)

    @staticmethod
    def some(rng: random.Random, workers: int, dies: tuple[int, float] | None) -> Faults:
        """Return faults: none in half of the groups, and most often only those of one kind."""

        def points() -> tuple[int, ...]:
            return tuple(int(rng.choice([30, 200, 1000]) * rng.random()) for _ in range(3))

        interrupts: tuple[int, ...] = ()
        handlers: tuple[int, ...] = ()
        finalizers = failed_starts = 0.0
        if rng.random() < 0.15:
            interrupts = points()
        elif rng.random() < 0.15:
            handlers = points()
        if rng.random() < 0.15:
            finalizers = rng.choice([0.003, 0.02, 0.1])
        if rng.random() < 0.15:
            failed_starts = rng.choice([0.05, 0.3, 0.9])
        return Faults(dies, interrupts, handlers, finalizers, failed_starts)

    def smaller(self) -> Iterator[Faults]:
        """Yield faults of which less goes wrong."""
        none = Faults()
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != getattr(none, field.name):
                yield dataclasses.replace(self, **{field.name: getattr(none, field.name)})


class Injector:
    """Have things go wrong in a run.

    Args:
        faults (Faults): what.
        scheduler (Scheduler): of the run.
        echo (Callable): returns its last argument; finalizers and handlers call it on workers.
    """

    def __init__(self, faults: Faults, scheduler: Scheduler, echo: Callable[..., Any]) -> None:
        self._faults = faults
        self._scheduler = scheduler
        self._echo = echo
        self._interrupts = list(faults.interrupts)
        self._handlers = list(faults.handlers)
        self._futures: list[Any] = []
        self._called = 0

    def start(self) -> None:
        """Begin, when the workers run."""
        faults, scheduler = self._faults, self._scheduler
        if faults.dies is not None:
            number, after = faults.dies

            def kill() -> None:
                sleep(after)
                WORKERS[number].die()

            Thread(target=kill, name="killer").start()
        scheduler.finalizer = self._finalize
        scheduler.chance_of_finalizers = faults.finalizers

    def users_have_started(self) -> None:
        """Have the product's threads fail to start from now on."""
        self._scheduler.chance_of_failed_starts = self._faults.failed_starts

    @contextlib.contextmanager
    def strike(self, is_first: bool) -> Iterator[None]:
        """Have signals strike what a user does within this context."""
        scheduler, me = self._scheduler, self._scheduler.current
        if is_first and self._interrupts:
            me.may_be_interrupted = True
            scheduler.chance_of_interrupts = 0.02
            scheduler.interrupt_after(self._interrupts.pop(0))
        elif is_first and self._handlers:
            scheduler.interrupt_after(self._handlers.pop(0), self._call)
        try:
            yield
        finally:
            me.may_be_interrupted = False
            me.interrupt_after = 0

    def stop(self) -> None:
        """End: the calls of finalizers and handlers have values, and whoever was to die is dead."""
        scheduler, dies = self._scheduler, self._faults.dies
        scheduler.chance_of_finalizers = scheduler.chance_of_failed_starts = 0.0
        for future in self._futures:
            try:
                assert wait(future) == "called"
            except ERRORS as exc:
                assert self._faults.may_lose, f"the call of a finalizer failed: {exc}"
        if dies is not None:
            is_dead = scheduler.step(
                "waits for the death", lambda: WORKERS[dies[0]].is_dead, DEATH_SECONDS
            )
            assert is_dead

    def _finalize(self) -> None:
        interrupting_calls._collector = threading.get_ident()
        try:
            self._call()
        finally:
            interrupting_calls._collector = 0

    def _call(self) -> None:
        """Call in the place of a finalizer or of a handler."""
        self._called += 1
        if self._called > MOST_CALLS:
            return
        rng = current().current.random
        worker = rng.choice([each for each in WORKERS if not each.is_dead])
        to = rng.randrange(len(WORKERS))
        try:
            if rng.random() < 0.7:
                self._futures.append(worker.future(to, self._echo, (to,), "called"))
            else:
                worker.sync(to, self._echo, (to,), "called")
        except ERRORS as exc:
            if not (self._faults.may_lose or "cannot wait" in str(exc)):
                self._scheduler.fail("the call of a finalizer failed", traceback.format_exc())
