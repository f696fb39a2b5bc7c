"""RRefs of simulated workers: made, sent on, fetched, deleted, while owners and holders may die.

Promised: a value lives as long as a handle of it does, on whatever worker; when the last one is
deleted, so is the value, and no worker keeps a fork; if a worker dies, its forks are released, and
a fetch from a dead owner says so.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

from simulation.faults import ERRORS, Faults
from simulation.groups import LIMITS, GroupRun, Program, User, smaller
from simulation.large import Large, limited
from simulation.scheduler import Scheduler, current
from simulation.workers import WORKERS, Worker, shut_down, wait

from rayrpc._runtime.rrefs.listing import leaks

__all__ = ["RRefs"]

MAKE, FETCH, DELETE, SEND, PASS_ON, FORGET = (
    "make",
    "fetch",
    "delete",
    "send",
    "pass on",
    "forget",
)
# A call of this size takes several writes and reads: smaller messages overtake it.
LARGE_BYTES = 12_000
# How long deletions may take, of virtual time: they are sent in batches, and again after a while.
SETTLE_SECONDS = 200.0


@dataclasses.dataclass(frozen=True)
class Step:
    """What a thread does with one of its handles.

    Args:
        what: is done.
        to: the worker that makes the value, or that gets a handle.
        index: which of the thread's handles, modulo their number.
        is_large: the call that makes the value is.
    """

    what: str
    to: int
    index: int
    is_large: bool = False


class RRefs:
    """The scenario; see the module."""

    name = "rrefs"

    def program(self, rng: random.Random) -> Program:
        workers = rng.randint(2, 3)

        def step() -> Step:
            what = rng.choice([MAKE, SEND, SEND, PASS_ON, FETCH, DELETE, FORGET])
            return Step(what, rng.randrange(workers), rng.randrange(4))

        users = tuple(
            User(
                rng.randrange(workers),
                (
                    Step(MAKE, rng.randrange(workers), 0),
                    *(step() for _ in range(rng.randint(1, 6))),
                ),
            )
            for _ in range(rng.randint(1, 3))
        )
        dies = (rng.randrange(workers), rng.random() ** 2 * 0.05) if rng.random() < 0.2 else None
        faults = Faults.some(rng, workers, dies)
        near = rng.random() < 0.3
        if rng.random() > 0.7:
            users = tuple(User(each.worker, _with_large(rng, each.steps)) for each in users)
            if not faults.interrupts and rng.random() < 0.5:
                points = tuple(int(rng.choice([200, 600, 1500]) * rng.random()) for _ in range(3))
                faults = dataclasses.replace(faults, interrupts=points)
        return Program(workers, users, faults, near=near)

    def smaller(self, program: Program) -> Iterator[Program]:
        return smaller(program, _simpler)

    def run(self, program: Program, scheduler: Scheduler) -> None:
        with limited(LIMITS):
            _Run(program, scheduler).run()


def _with_large(rng: random.Random, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return the steps: those that make values, and half of the others, do so by large calls."""
    return tuple(
        Step(MAKE, step.to, 0, True) if step.what == MAKE or rng.random() < 0.5 else step
        for step in steps
    )


def _simpler(step: Step) -> Iterator[Step]:
    if step.is_large:
        yield dataclasses.replace(step, is_large=False)


class Kept:
    """A value that an RRef refers to."""

    def __init__(self, number: int) -> None:
        self.number = number
        _alive.add(self)

    def __reduce__(self) -> Any:
        return _copy, (self.number,)


def _copy(number: int) -> int:
    return number


# Values at their owners, and the handles that workers keep, by worker.
_alive: weakref.WeakSet[Kept] = weakref.WeakSet()
_stores: dict[int, list[Any]] = {}


class _Run(GroupRun):
    def __init__(self, program: Program, scheduler: Scheduler) -> None:
        super().__init__(program, scheduler, echo)
        self.made = 0

    def run(self) -> None:
        _stores.clear()
        _alive.clear()
        super().run()
        self.check()
        shut_down(lambda worker: worker.agent.shutdown())

    def use(self, index: int, user: User) -> None:
        worker = WORKERS[user.worker]
        handles: list[tuple[int, Any]] = []
        for step in user.steps:
            try:
                with self.injector.strike(not index):
                    self.do(worker, step, handles)
            except (*ERRORS, KeyboardInterrupt) as exc:
                if not self.faults.may_lose:
                    raise AssertionError(f"{step} failed: {exc}") from exc

    def do(self, worker: Worker, step: Step, handles: list[tuple[int, Any]]) -> None:
        if step.what == MAKE:
            self.made += 1
            number = self.made
            argument = Large("unused", LARGE_BYTES) if step.is_large else None
            handles.append((number, worker.remote(step.to, make, number, argument)))
            return
        if not handles:
            return
        number, rref = handles[step.index % len(handles)]
        if step.what == FETCH:
            got = rref.to_here()
            got = got.number if isinstance(got, Kept) else got
            assert got == number, f"RRef {number} has the value {got}"
        elif step.what == DELETE:
            handles.remove((number, rref))
        elif step.what == SEND:
            worker.sync(step.to, keep, rref)
        elif step.what == PASS_ON:
            wait(worker.future(step.to, pass_on, (step.to + 1) % self.program.workers, rref))
        elif step.what == FORGET:
            worker.sync(step.to, forget)

    def check(self) -> None:
        """Check that values live as long as their handles."""
        living = [worker for worker in WORKERS if not worker.is_dead]
        for worker in living:
            if self.faults.dies is None:
                for rref in _stores.get(WORKERS.index(worker), []):
                    rref.to_here()
        rref = None
        _stores.clear()
        gc.collect()  # here, where it is a step of the program
        tables = [worker.agent.rrefs._table for worker in living]

        def is_settled() -> bool:
            _stores.clear()  # calls of a worker that died meanwhile may arrive yet
            return all(not (t.owned or t.used) and t.is_settled() for t in tables)

        def are_gone() -> bool:
            _stores.clear()
            return not _alive

        assert current().step("waits for deletions", is_settled, SETTLE_SECONDS), (
            f"entries are left:\n{[(each.name, leaks(each.agent.rrefs._table)) for each in living]}"
        )
        if self.faults.dies is None:
            is_empty = current().step("waits for values", are_gone, SETTLE_SECONDS)
            if not is_empty:
                gc.collect()  # an interrupt may leave cycles
                is_empty = not _alive
            assert is_empty, f"values are alive that have no RRef: {len(_alive)}"


# -- what is called ---------------------------------------------------------------------------


def echo(me: int, path: object, value: Any) -> Any:
    """Return the value."""
    return value


def make(me: int, number: int, unused: Large | None) -> Kept:
    """Return a value that is counted."""
    return Kept(number)


def keep(me: int, rref: Any) -> None:
    """Keep a handle."""
    _stores.setdefault(me, []).append(rref)


def pass_on(me: int, to: int, rref: Any) -> None:
    """Have another worker keep a handle."""
    WORKERS[me].sync(to, keep, rref)


def forget(me: int) -> None:
    """Drop a handle that was kept."""
    kept = _stores.get(me)
    if kept:
        kept.pop(0)
