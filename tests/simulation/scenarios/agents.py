"""Whole workers in one process: agents that call one another over simulated connections.

Promised: each call ends once, with its own value, or, where something goes wrong, with an error;
what is called with ``remote`` is fetched; graceful shutdown waits for all calls, leaks no RRef, and
ends all threads.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

from simulation.faults import ERRORS, Faults
from simulation.groups import LIMITS, GroupRun, Program, User, smaller
from simulation.large import Large, limited
from simulation.primitives import Thread, sleep
from simulation.scenario import some_of
from simulation.scheduler import Scheduler, current
from simulation.workers import WORKERS, Worker, shut_down, wait
from torch.futures import Future

from rayrpc.functions import async_execution

__all__ = ["Agents"]

# How a call is made.
SYNC, ASYNC, REMOTE = "sync", "async", "remote"
# What the called function does: at once, after a while, or through other workers.
QUICK, SLOW, LATER, NESTED, NESTED_LATER = "quick", "slow", "later", "nested", "nested later"


@dataclasses.dataclass(frozen=True)
class Call:
    """A call.

    Args:
        how: it is made.
        function: what it does.
        path: the callee, and the workers that it calls in turn.
        is_large: its argument and its value are.
    """

    how: str
    function: str
    path: tuple[int, ...]
    is_large: bool = False


class Agents:
    """The scenario; see the module."""

    name = "agents"

    def program(self, rng: random.Random) -> Program:
        workers = rng.randint(1, 3)
        functions = some_of(rng, (QUICK, SLOW, LATER, NESTED, NESTED_LATER))
        ways = some_of(rng, (SYNC, ASYNC, REMOTE))
        is_nested = NESTED in functions or NESTED_LATER in functions

        def call() -> Call:
            function = rng.choice(functions)
            hops = rng.randint(2, 3) if function in (NESTED, NESTED_LATER) else 1
            path = tuple(rng.randrange(workers) for _ in range(hops))
            return Call(rng.choice(ways), function, path, rng.random() < 0.1)

        users = tuple(
            User(rng.randrange(workers), tuple(call() for _ in range(rng.randint(1, 4))))
            for _ in range(rng.randint(1, 3))
        )
        # as in torch, nested calls take slots
        needed = sum(len(call.path) for user in users for call in user.steps)
        slots = max(16, needed) if is_nested else rng.choice([1, 2, 16])
        dies = None
        if workers > 1 and rng.random() < 0.2:
            dies = rng.randrange(workers), rng.random() ** 3 * 0.05
        faults = Faults.some(rng, workers, dies)
        if faults.finalizers:  # a finalizer may call its own worker, and wait
            slots = max(16, needed)
        return Program(workers, users, faults, slots, near=rng.random() < 0.3)

    def smaller(self, program: Program) -> Iterator[Program]:
        return smaller(program, _simpler)

    def run(self, program: Program, scheduler: Scheduler) -> None:
        with limited(LIMITS):
            _Run(program, scheduler).run()


def _simpler(call: Call) -> Iterator[Call]:
    if call.is_large:
        yield dataclasses.replace(call, is_large=False)
    if call.how != SYNC:
        yield dataclasses.replace(call, how=SYNC)
    if call.function != QUICK:
        yield Call(call.how, QUICK, call.path[:1], call.is_large)


class _Run(GroupRun):
    def __init__(self, program: Program, scheduler: Scheduler) -> None:
        super().__init__(program, scheduler, quick)
        self.ended: collections.Counter[tuple[int, int]] = collections.Counter()

    def run(self) -> None:
        super().run()
        expected = sum(len(user.steps) for user in self.program.users)
        assert sum(self.ended.values()) == len(self.ended) == expected, f"ended: {self.ended}"
        shut_down(self.leave)

    def use(self, index: int, user: User) -> None:
        """Make the calls of a thread, and then wait for those that are asynchronous."""
        worker = WORKERS[user.worker]
        waits = []
        for number, call in enumerate(user.steps):
            sent: Any = f"{index}.{number}"
            if call.is_large:
                sent = Large(sent)
            try:
                with self.injector.strike(not index):
                    value = start(worker, call, sent)
            except (*ERRORS, KeyboardInterrupt) as exc:
                self.end(index, number, exc)
                continue
            if call.how == SYNC:
                self.wait(index, number, value, sent)
            else:
                waits.append((number, value, sent))
        for each in waits:
            self.wait(index, *each)

    def wait(self, index: int, number: int, value: Any, sent: Any) -> None:
        try:
            with self.injector.strike(not index):
                got = value()
        except (*ERRORS, KeyboardInterrupt) as exc:
            self.end(index, number, exc)
        else:
            assert got == sent, f"call {index}.{number} has the value {got!r}"
            self.ended[index, number] += 1

    def end(self, index: int, number: int, error: BaseException) -> None:
        self.ended[index, number] += 1
        if not self.faults.may_lose:
            raise AssertionError(f"call {index}.{number} failed: {error}") from error

    def leave(self, worker: Worker) -> None:
        if not worker.is_dead:
            worker.agent.join()
            if self.faults.dies is None:
                assert worker.agent.rrefs.delete_all(30.0)
                worker.agent.join()
                worker.agent.rrefs.check_leaks()
        worker.agent.shutdown()


# -- what is called ---------------------------------------------------------------------------


def quick(me: int, path: tuple[int, ...], value: Any) -> Any:
    """Return the value."""
    return value


def slow(me: int, path: tuple[int, ...], value: Any) -> Any:
    """Return the value after a while."""
    sleep(current().current.random.choice([0.001, 0.005, 0.02]))
    return value


@async_execution
def later(me: int, path: tuple[int, ...], value: Any) -> Any:
    """Return a Future that another thread completes with the value."""
    future: Any = Future()

    def complete() -> None:
        sleep(0.002)
        future.set_result(value)

    with current().uninterrupted():
        Thread(target=complete, name="completes later").start()
    return future


def nested(me: int, path: tuple[int, ...], value: Any) -> Any:
    """Return the value by a call of the next worker."""
    return _next(SYNC, path, value)()


@async_execution
def nested_later(me: int, path: tuple[int, ...], value: Any) -> Any:
    """Return the Future of a call of the next worker."""
    return _next(ASYNC, path, value).args[0]


def _next(how: str, path: tuple[int, ...], value: Any) -> Any:
    rest = path[1:]
    if how == SYNC:
        function = NESTED if len(rest) > 1 else QUICK
    else:
        function = NESTED_LATER if len(rest) > 1 else LATER
    return start(WORKERS[path[0]], Call(how, function, rest), value)


def start(worker: Worker, call: Call, value: Any) -> functools.partial[Any]:
    """Make a call, or prepare a synchronous one; return what waits for its value."""
    function = FUNCTIONS[call.function]
    to = call.path[0]
    args = call.path, value
    if call.how == SYNC:
        return functools.partial(worker.sync, to, function, *args)
    if call.how == ASYNC or WORKERS[to] is worker:  # the API makes a local RRef of a Future then
        return functools.partial(wait, worker.future(to, function, *args))
    return functools.partial(worker.remote(to, function, *args).to_here)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    QUICK: quick,
    SLOW: slow,
    LATER: later,
    NESTED: nested,
    NESTED_LATER: nested_later,
}
